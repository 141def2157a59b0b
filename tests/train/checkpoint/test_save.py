"""Saves that fail or are interrupted at any stage leave earlier checkpoints intact, and nothing permanent of
their own."""

import math
import os
import resource
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.train.main
from meshwright.train.checkpoint import commit as commit_module
from meshwright.train.checkpoint import save as save_module
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.manifest import MANIFEST, TrainPosition
from meshwright.train.checkpoint.reader import load_checkpoint
from meshwright.train.checkpoint.verify import verify_alone
from tests.support.checkpoint_saves import (
    KILLS,
    TEXTS,
    Trainer,
    names,
    save_with_a_fault,
    save_with_one_killed,
)
from tests.support.forks import fork
from tests.support.launch import EAGER, LIMIT_S, TINY, read_status
from tests.support.limited import full_at
from tests.support.worlds import run_ranks

LARGE = {"config.yaml": "x" * 2_000_000}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "beside"])


@pytest.fixture
def trainer(group: None) -> Trainer:
    return Trainer()


@BOTH
@pytest.mark.parametrize(
    ("stage", "texts", "limit_bytes"),
    [
        ("/step-00000002/rank-00000.safetensors cannot be written", TEXTS, 100_000),
        ("/step-00000002 cannot be written", LARGE, 1_500_000),
        ("step-00000002 cannot be committed", TEXTS, 1000),
    ],
)
def test_a_full_disk_leaves_what_was_committed(
    stage: str,
    texts: dict[str, str],
    limit_bytes: int,
    asynchronous: bool,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full in the shard, the config or the manifest, although only one checkpoint is kept."""
    really = save_module.commit

    def commit(*arguments: Any) -> Path:
        with full_at(limit_bytes):
            return really(*arguments)

    settings = {"keep": 1, "asynchronous": asynchronous}
    assert trainer.save(tmp_path, 1, **settings).error == ""
    with monkeypatch.context() as patched, ExitStack() as stack:
        if "committed" in stage:  # the manifest is smaller than the shard: the disk fills up between the two
            patched.setattr(save_module, "commit", commit)
        else:
            stack.enter_context(full_at(limit_bytes))
        failed = trainer.save(tmp_path, 2, texts, **settings)
    assert stage in failed.error
    assert "File too large" in failed.error
    assert names(tmp_path) == ["step-00000001"]
    assert verify_alone(tmp_path / "step-00000001").position.step == 1
    assert trainer.save(tmp_path, 3, texts, **settings).error == ""
    assert names(tmp_path) == ["step-00000003"]
    verify_alone(tmp_path / "step-00000003")


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_committed(
    value: float, asynchronous: bool, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.own_weight[-1, 3] = value
    error = trainer.save(tmp_path, 1, asynchronous=asynchronous).error
    assert error.startswith("model.weight is not finite on rank 0")
    assert names(tmp_path) == []


def test_a_save_beside_training_contains_the_values_of_its_step(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step changes the weights before anything is written."""
    changed, begin_save = threading.Event(), save_module.begin_save

    def begin(*arguments: Any) -> Path:
        assert changed.wait(LIMIT_S)
        return begin_save(*arguments)

    monkeypatch.setattr(save_module, "begin_save", begin)
    saver, weight = trainer.saver(tmp_path, asynchronous=True), trainer.own_weight
    before = weight.clone()
    saver.save(TrainPosition(1))
    weight.zero_()
    changed.set()
    saver.wait()
    (checkpoint,) = list_checkpoints(tmp_path)
    load_checkpoint(checkpoint, verify_alone(checkpoint), trainer.model, trainer.optimizer, trainer.mesh)
    assert torch.equal(weight, before)


def test_everything_is_on_the_disk_before_it_counts(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of syncs: new folders, every file, the manifest, the checkpoint's folder, the rename, and the
    folder that contains it."""
    done: list[str] = []
    really_sync, really_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        really_sync(handle)

    def rename(old: Path, new: Path) -> None:
        done.append(f"-> {new.name}")
        really_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    assert trainer.save(tmp_path / "checkpoints", 1).error == ""
    assert done[:2] == [tmp_path.name, tmp_path.parent.name]
    assert done[2:] == [
        "rank-00000.safetensors",
        *TEXTS,
        MANIFEST,
        ".step-00000001.partial",
        "-> step-00000001",
        "checkpoints",
    ]


def test_a_rename_that_the_disk_does_not_keep_is_taken_back(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.fsync

    def fsync(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")) == tmp_path:
            raise OSError(5, "Input/output error")
        really(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        assert "step-00000001 cannot be committed (Input/output error)" in trainer.save(tmp_path, 1).error
    assert names(tmp_path) == []
    assert trainer.save(tmp_path, 1).error == ""


def test_older_checkpoints_are_deleted_only_after_a_newer_one_is_committed(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    existing: list[list[int]] = []
    really = save_module.delete_others

    def record(folder: Path, *keep: int) -> None:
        existing.append([verify_alone(path).position.step for path in list_checkpoints(folder)])
        really(folder, *keep)

    monkeypatch.setattr(save_module, "delete_others", record)
    for step in range(1, 6):
        assert trainer.save(tmp_path, step, keep=1, keep_every=2).error == ""
    assert existing == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert names(tmp_path) == [f"step-{step:08d}" for step in (2, 4, 5)]


def test_a_step_that_is_there_is_not_written_again(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer.save(tmp_path, 1).error == ""
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}
    error = trainer.save(tmp_path, 1).error
    assert error.startswith(f"{tmp_path} contains step-00000001, so step 1 is not saved")
    assert "move it away" in error
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == before
    assert names(tmp_path) == ["step-00000001"]


def test_a_file_system_that_is_too_small_is_refused_and_one_of_unknown_size_is_not(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some FUSE file systems report 0 for everything."""
    sizes = [(300 * 1024, 0, 300 * 1024), (0, 0, 0)]
    monkeypatch.setattr(commit_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(*sizes.pop(0)))
    error = trainer.save(tmp_path, 1).error
    assert error.startswith("a checkpoint needs 1.")
    assert f"{tmp_path} has 0.3 MiB free" in error
    assert names(tmp_path) == []
    assert trainer.save(tmp_path, 1).error == ""


def test_a_rank_killed_at_any_stage_leaves_whole_checkpoints(trainer: Trainer, tmp_path: Path) -> None:
    """The other rank fails immediately; a partial checkpoint does not count, and the next save removes it."""
    committed = {"after the rename": [1, 2], "before retention": [1, 2], "in a deletion": [2]}
    leftovers = set[str]()
    for number, case in enumerate(KILLS):
        ends = save_with_one_killed(case, number % 2 == 0, tmp_path / str(number))
        assert sorted(end[:30] for end in ends) == ["exit -9", "the save of step 2 was cut off"], (case, ends)
        folder = tmp_path / str(number) / "checkpoints"
        checkpoints = list_checkpoints(folder)
        assert [verify_alone(path).position.step for path in checkpoints] == committed.get(case, [1]), case
        leftovers |= set(names(folder)) - {path.name for path in checkpoints}
        assert trainer.save(folder, 3, keep=1).error == "", case
        assert names(folder) == ["step-00000003"], case
    assert leftovers == {".step-00000002.partial", ".step-00000001.old"}


@BOTH
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("disk full", "/step-00000002/rank-00001.safetensors cannot be written (File too large)"),
        ("NaN", "model.weight is not finite on rank 1"),
        ("state", "AdamW keeps a object (odd) for weight"),
    ],
)
def test_what_one_rank_cannot_write_no_rank_commits(
    fault: str, message: str, asynchronous: bool, tmp_path: Path
) -> None:
    """All ranks get the same error, and the next save succeeds."""
    (error, after), other = run_ranks(2, save_with_a_fault, fault, asynchronous, tmp_path)
    assert message in error
    assert other == (error, after)
    assert after == ["step-00000001"]
    assert names(tmp_path) == ["step-00000003"]
    verify_alone(tmp_path / "step-00000003")


def train_on_a_small_disk(arguments: list[str]) -> None:
    """Run train.main where everything can be written but the tensors."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    meshwright.train.main.main(arguments)


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_when_the_disk_is_full_a_run_stops_or_goes_on_as_asked_and_is_never_finished(
    on_error: str, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a line of a text\n" * 800)
    data = [f"--data.source={tmp_path / 'text'}", f"--data.cache_dir={tmp_path / 'cache'}"]
    keys = ["--train.steps=3", "--checkpoint.every=1", f"--checkpoint.on_error={on_error}"]
    arguments = [*TINY, *EAGER, *data, *keys, f"--run.dir={tmp_path / 'run'}"]
    out, err = tmp_path / "out", tmp_path / "err"
    training = fork(train_on_a_small_disk, arguments, output=out, errors=err)
    assert training.wait(LIMIT_S) == 1, out.read_text() + err.read_text()
    status = read_status(tmp_path / "run")
    assert "rank-00000.safetensors cannot be written (File too large)" in err.read_text()
    assert "Traceback" not in err.read_text()
    assert status["state"] == "failed"
    assert "finished" not in out.read_text()
    assert (status["step"] < 3) == (on_error == "stop")
    assert (out.read_text().count("warning: not saved: ") == 3) == (on_error == "warn")
    assert names(tmp_path / "run" / "checkpoints") == []
