"""Checkpoint folders: what counts as a checkpoint, what is removed, and what is only renamed."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.train.checkpoint import verify as verify_module
from meshwright.train.checkpoint.commit import (
    begin_save,
    commit,
    delete_others,
    list_checkpoints,
    make_retained,
    put_aside,
    refuse_newer,
    write_synced,
)
from meshwright.train.checkpoint.load import find_checkpoint
from meshwright.train.checkpoint.manifest import (
    LIMIT_BYTES,
    MANIFEST,
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    read_manifest,
)
from meshwright.train.checkpoint.verify import hash_file, verify_alone
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError, SaveError, UnreadableError


@pytest.fixture
def group() -> Iterator[None]:
    """The process group that chooses a checkpoint: this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def commit_step(folder: Path, step: int) -> Path:
    partial = begin_save(folder, step, 0)
    write_synced(partial / "config.yaml", f"# {step}\n")
    return commit(
        partial,
        CheckpointManifest(TrainPosition(step), {"config.yaml": hash_file(partial / "config.yaml")}, {}),
    )


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(folder)]


def test_only_a_committed_step_counts_and_oldest_come_first(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nothing") == []
    for step in (20, 3, 100_000_000):
        assert verify_alone(commit_step(tmp_path, step)).position == TrainPosition(step)
    for name in (
        ".step-00000007.partial",
        ".step-00000008.old",
        "damaged-step-00000009",
        "step-10",
        "step-00000011.bak",
    ):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [3, 20, 100_000_000]


def test_one_without_its_manifest_is_damaged_not_overlooked(tmp_path: Path) -> None:
    """Otherwise the run would start at step 0 without a warning."""
    commit_step(tmp_path, 5)
    (tmp_path / "step-00000005" / MANIFEST).unlink()
    assert steps(tmp_path) == [5]
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json \(No such file.*step-00000100"):
        verify_alone(tmp_path / "step-00000005")


def test_a_folder_that_cannot_be_read_is_no_folder_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read .*run\.dir"):
        list_checkpoints(tmp_path / "checkpoints")


def test_what_is_newer_than_the_start_is_refused(tmp_path: Path) -> None:
    commit_step(tmp_path, 5)
    refuse_newer(tmp_path, 5, own=True)
    ways_out = r"--checkpoint\.resume=auto .*newest.* another run\.dir"
    with pytest.raises(CheckpointError, match=rf"{tmp_path} .*step-00000005, newer .*step 4: .*{ways_out}"):
        refuse_newer(tmp_path, 4, own=True)
    for start_step in (0, 5, 9):
        with pytest.raises(CheckpointError, match=rf"step-00000005, .*not resume from: .*{ways_out}"):
            refuse_newer(tmp_path, start_step, own=False)
    refuse_newer(tmp_path / "new", 0, own=False)


def test_there_must_be_room(tmp_path: Path) -> None:
    with pytest.raises(
        SaveError, match=r"step 3 needs 1073741824\.0 GiB, .* has [\d.]+ [MG]iB free.*checkpoint\.keep"
    ):
        begin_save(tmp_path, 3, 2**60)
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_leftover_is_removed_and_nothing_else(tmp_path: Path) -> None:
    commit_step(tmp_path, 1)
    for name in (".step-00000002.partial", ".step-00000001.old", "damaged-step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".step-00000004.partial").write_text("a file")
    (tmp_path / ".step-00000005.old").symlink_to(tmp_path / "step-00000001")
    (tmp_path / ".step-00000006.old").symlink_to("nowhere")
    (tmp_path / "notes").write_text("x")
    partial = begin_save(tmp_path, 2, 0)
    assert list(partial.iterdir()) == []
    assert sorted(os.listdir(tmp_path)) == [
        ".step-00000002.partial",
        "damaged-step-00000003",
        "notes",
        "step-00000001",
    ]
    verify_alone(tmp_path / "step-00000001")


def test_only_what_is_in_the_way_must_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers of another step stay, if NFS keeps them open or they are mounted."""

    def rmtree(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    (tmp_path / ".step-00000001.old").mkdir()
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000004.partial").write_text("after those")
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert begin_save(tmp_path, 3, 0).is_dir()
    assert not (tmp_path / ".step-00000004.partial").exists()
    with pytest.raises(SaveError, match=r"step 2 cannot be written into .* \(Device or resource busy\)"):
        begin_save(tmp_path, 2, 0)


def test_folders_that_are_made_are_kept_by_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new run's folder, created just before, is synced too."""
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
    )
    begin_save(tmp_path / "runs" / "one" / "checkpoints", 1, 0)
    assert synced == [tmp_path / "runs" / "one", tmp_path / "runs", tmp_path, tmp_path.parent]
    begin_save(tmp_path / "runs" / "one" / "checkpoints", 2, 0)
    assert len(synced) == 4


def test_a_file_that_did_not_arrive_is_not_committed(tmp_path: Path) -> None:
    for arrived in (None, "short"):
        partial = begin_save(tmp_path, 1, 0)
        if arrived:
            (partial / "rank-00001.safetensors").write_text(arrived)
        with pytest.raises(
            SaveError, match=rf"rank-00001\.safetensors: missing .*{tmp_path}.* shared by all nodes"
        ):
            commit(
                partial,
                CheckpointManifest(TrainPosition(1), {"rank-00001.safetensors": SavedFile(100, "")}, {}),
            )
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [
        (0, 0, [10, 20, 25, 30]),
        (1, 0, [30]),
        (2, 20, [20, 25, 30]),
        (9, 0, [10, 20, 25, 30]),
        (1, 10, [10, 20, 30]),
    ],
)
def test_retention(keep: int, keep_every: int, kept: list[int], tmp_path: Path) -> None:
    assert make_retained([10, 20, 25, 30], keep, keep_every) == set(kept)
    for step in (10, 20, 25, 30):
        commit_step(tmp_path, step)
    delete_others(tmp_path, keep, keep_every)
    assert steps(tmp_path) == kept
    assert len(os.listdir(tmp_path)) == len(kept)


def test_a_damaged_one_is_put_aside_under_a_free_name(tmp_path: Path) -> None:
    for number in ("", "-2", "-3"):
        assert put_aside(commit_step(tmp_path, 7)) == tmp_path / f"damaged-step-00000007{number}"
    assert steps(tmp_path) == []


def test_a_manifest_is_read_as_it_was_written_and_not_without_bound(tmp_path: Path) -> None:
    partial = begin_save(tmp_path, 2, 0)
    write_synced(partial / "a.safetensors", "x" * 102)
    manifest = CheckpointManifest(
        TrainPosition(2, 16, 2**63 - 1, 32, 1, "é\n"),
        {"a.safetensors": hash_file(partial / "a.safetensors")},
        {"model.a": SavedTensor((5, 5), "float32"), "optim.a.step": SavedTensor((), "bfloat16")},
    )
    final = commit(partial, manifest)
    assert read_manifest(final) == manifest
    with open(final / MANIFEST, "ab") as file:
        file.truncate(LIMIT_BYTES + 10)
    with pytest.raises(CheckpointError, match=r"larger than .*67,108,864 bytes"):
        read_manifest(final)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("nowhere", r"checkpoint\.resume=nowhere: nowhere is not a checkpoint: no such folder"),
        ("", "checkpoint.resume is empty"),
        ("~nobody-here/x", "no usable path"),
    ],
)
def test_a_checkpoint_named_in_vain_is_an_error(
    resume: str, message: str, group: None, tmp_path: Path
) -> None:
    commit_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(CheckpointConfig(resume=resume), tmp_path, RankInfo(0, 1, 0, 1, False))


def test_all_that_are_damaged_are_an_error_and_all_but_one_are_passed_over(
    group: None, tmp_path: Path
) -> None:
    alone = RankInfo(0, 1, 0, 1, False)
    for step in (1, 2, 3):
        (commit_step(tmp_path, step) / "config.yaml").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"none of the 3 checkpoints in .* verifies.*step-00000003 is damaged"
    ):
        find_checkpoint(CheckpointConfig(), tmp_path, alone)
    assert steps(tmp_path) == [1, 2, 3], (
        "damaged checkpoints are renamed only if another one can be resumed from"
    )
    (tmp_path / "step-00000001" / "config.yaml").write_text("# 1\n")
    start = find_checkpoint(CheckpointConfig(), tmp_path, alone)
    assert (start.step, steps(tmp_path)) == (1, [1])
    assert len(start.messages) == 2
    assert f"{tmp_path}/step-00000003 is damaged" in start.messages[0]
    assert f"Renamed to {tmp_path}/damaged-step-00000003" in start.messages[0]
    assert find_checkpoint(CheckpointConfig(resume="none"), tmp_path, alone).checkpoint is None
    assert find_checkpoint(CheckpointConfig(), tmp_path / "new", alone).step == 0


def test_what_cannot_be_read_for_the_moment_is_not_damaged(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for the newest checkpoint: nothing is renamed, and later the run resumes from it."""
    alone, newest = RankInfo(0, 1, 0, 1, False), commit_step(tmp_path, 2)
    commit_step(tmp_path, 1)

    def fail(path: Path) -> SavedFile:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(verify_module, "hash_file", fail)
        for resume in ("auto", str(newest)):
            with pytest.raises(
                UnreadableError, match=r"config\.yaml cannot be read \(Input/output error\).*start again"
            ):
                find_checkpoint(CheckpointConfig(resume=resume), tmp_path, alone)
    assert steps(tmp_path) == [1, 2]
    assert find_checkpoint(CheckpointConfig(), tmp_path, alone).step == 2


def test_a_manifest_that_cannot_be_opened_for_the_moment_is_not_missing(tmp_path: Path) -> None:
    """This process has no file descriptors left."""
    checkpoint = commit_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handle = os.open("/dev/null", os.O_RDONLY)  # the lowest that is free
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (handle, hard))
    try:
        with pytest.raises(UnreadableError, match=r"manifest\.json cannot be read \(Too many open files\)"):
            read_manifest(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    verify_alone(checkpoint)
