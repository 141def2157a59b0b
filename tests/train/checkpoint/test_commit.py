"""Checkpoint folders: what counts as a checkpoint, what is removed, and what is only renamed."""

import os
import resource
import shutil
from pathlib import Path

import pytest

from meshwright.train.checkpoint import verify as verify_module
from meshwright.train.checkpoint.commit import (
    begin_save,
    commit,
    delete_others,
    list_checkpoints,
    make_retained,
    step_of,
    write_synced,
)
from meshwright.train.checkpoint.manifest import (
    LIMIT_BYTES,
    MANIFEST,
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    hash_file,
    rank_file,
    read_manifest,
)
from meshwright.train.checkpoint.resume import find_checkpoint, put_damaged_aside
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError, SaveError, UnreadableError

ALONE = RankInfo(0, 1, 0, 1, False)


def commit_step(folder: Path, step: int) -> Path:
    partial = begin_save(folder, step, 0)
    write_synced(partial / rank_file(0), f"# {step}\n")
    files = {rank_file(0): hash_file(partial / rank_file(0))}
    return commit(partial, CheckpointManifest(TrainPosition(step), files, {}, mesh={"dp_shard": 1}))


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder)]


def test_only_a_committed_step_counts_and_oldest_come_first(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nothing") == []
    for step in (3, 20, 100_000_000):
        assert verify_alone(commit_step(tmp_path, step)).position == TrainPosition(step)
    others = (
        ".step-00000007.partial",
        ".step-00000008.old",
        "damaged-step-00000009",
        "step-10",
        "step-00000011.b",
    )
    for name in others:
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [3, 20, 100_000_000]


def test_a_missing_manifest_and_an_unreadable_folder_are_errors_and_no_start_at_step_0(
    tmp_path: Path,
) -> None:
    checkpoint = commit_step(tmp_path, 5)
    (checkpoint / MANIFEST).unlink()
    assert steps(tmp_path) == [5]
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json \(No such file.*step-00000100"):
        verify_alone(checkpoint)
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read .*run\.dir"):
        list_checkpoints(tmp_path / "checkpoints")


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
    kept = {".step-00000002.partial", "damaged-step-00000003", "notes", "step-00000001"}
    assert set(os.listdir(tmp_path)) == kept
    verify_alone(tmp_path / "step-00000001")


def test_leftovers_that_cannot_be_removed_stop_only_the_save_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may keep them open, or they are mounted."""

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


def test_a_file_that_is_missing_or_short_is_not_committed(tmp_path: Path) -> None:
    name = "rank-00001.safetensors"
    for content in (None, "short"):
        partial = begin_save(tmp_path, 1, 0)
        if content:
            (partial / name).write_text(content)
        with pytest.raises(SaveError, match=rf"{name}: missing .*{tmp_path}.* shared by all nodes"):
            commit(partial, CheckpointManifest(TrainPosition(1), {name: SavedFile(100, "")}, {}, mesh={}))
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


def test_a_manifest_is_read_as_it_was_written_and_not_without_bound(tmp_path: Path) -> None:
    partial = begin_save(tmp_path, 2, 0)
    write_synced(partial / rank_file(0), "x" * 102)
    manifest = CheckpointManifest(
        TrainPosition(2, 16, 2**63 - 1, 32, 1, "é\n"),
        {rank_file(0): hash_file(partial / rank_file(0))},
        {"model.a": SavedTensor((5, 5), "float32"), "optim.a.step": SavedTensor((), "bfloat16")},
        {"dp_replicate": 1},
    )
    final = commit(partial, manifest)
    assert read_manifest(final) == manifest
    with open(final / MANIFEST, "ab") as file:
        file.truncate(LIMIT_BYTES + 10)
    with pytest.raises(CheckpointError, match=r"larger than .*67,108,864 bytes"):
        read_manifest(final)


def test_a_named_checkpoint_that_does_not_exist_is_an_error(group: None, tmp_path: Path) -> None:
    commit_step(tmp_path, 1)
    for resume, message in (
        ("nowhere", r"checkpoint\.resume=nowhere: nowhere is not a checkpoint: no such folder"),
        ("", "checkpoint.resume is empty"),
        ("~nobody-here/x", "no usable path"),
    ):
        with pytest.raises(CheckpointError, match=message):
            find_checkpoint(CheckpointConfig(resume=resume), tmp_path, ALONE)


def test_damaged_checkpoints_are_skipped_and_renamed_if_another_one_verifies(
    group: None, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        (commit_step(tmp_path, step) / rank_file(0)).write_text("x")
    (tmp_path / "damaged-step-00000003").mkdir()  # of an earlier resume
    with pytest.raises(
        CheckpointError, match=r"none of the 3 checkpoints in .* verifies.*step-00000003 is damaged"
    ):
        find_checkpoint(CheckpointConfig(), tmp_path, ALONE)
    assert steps(tmp_path) == [1, 2, 3]
    (tmp_path / "step-00000001" / rank_file(0)).write_text("# 1\n")
    start = find_checkpoint(CheckpointConfig(), tmp_path, ALONE)
    assert (start.step, steps(tmp_path)) == (1, [1, 2, 3])
    message, _ = put_damaged_aside(start, ALONE)
    assert steps(tmp_path) == [1]
    assert f"{tmp_path}/step-00000003 is damaged" in message
    assert message.endswith(f"Renamed to {tmp_path}/damaged-step-00000003-2")
    assert (tmp_path / "damaged-step-00000003-2" / rank_file(0)).exists()
    assert find_checkpoint(CheckpointConfig(resume="none"), tmp_path, ALONE).checkpoint is None
    assert find_checkpoint(CheckpointConfig(), tmp_path / "new", ALONE).step == 0


def test_a_checkpoint_that_cannot_be_read_for_the_moment_is_not_damaged(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for the newest checkpoint: nothing is renamed, and later the run resumes from it."""
    commit_step(tmp_path, 1)
    newest = commit_step(tmp_path, 2)

    def fail(path: Path) -> SavedFile:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(verify_module, "hash_file", fail)
        for resume in ("auto", str(newest)):
            with pytest.raises(
                UnreadableError,
                match=r"rank-00000\.safetensors cannot be read \(Input/output.*start again",
            ):
                find_checkpoint(CheckpointConfig(resume=resume), tmp_path, ALONE)
    assert steps(tmp_path) == [1, 2]
    assert find_checkpoint(CheckpointConfig(), tmp_path, ALONE).step == 2


def test_without_file_descriptors_a_manifest_is_unreadable_and_not_missing(tmp_path: Path) -> None:
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
