"""Saves that fail or are cut short at every stage leave what was committed before, and nothing else that lasts."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import build_mesh
from tests.support.launch import EAGER, ROOT, TINY, command, environment
from train.build import build_model
from train.checkpoint import folder as folder_module
from train.checkpoint import saver as saver_module
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.folder import list_checkpoints
from train.checkpoint.manifest import MANIFEST, Position
from train.checkpoint.saver import Saved, Saver
from train.checkpoint.verify import verify_alone
from train.config import parse_config
from train.optim import build_optimizer
from train.place import Place
from train.planning import plan_run
from train.runtime import start_process

TEXTS = {"config.yaml": "run: {}\n", "plan.yaml": "plan\n"}
LARGE = {"config.yaml": "x" * 2_000_000}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "beside"])


class Trainer:
    """A model and its optimizer in this process, and what saves them."""

    def __init__(self) -> None:
        config = parse_config([*TINY, *EAGER])
        plan = plan_run(config, 1)
        self.mesh = build_mesh(plan.mesh, "cpu")
        self.model: Any = build_model(config, plan, self.mesh, torch.device("cpu"))
        self.optimizer = build_optimizer(self.model, config.optim)

    def save(self, folder: Path, step: int, texts: dict[str, str] = TEXTS, **settings: Any) -> Saved:
        saver = Saver(CheckpointConfig(**settings), folder, self.model, self.optimizer, self.mesh, texts, lambda: 2**30)
        saver.save(Position(step, 8 * step, 0, 32, 1, "data"))
        saver.wait()
        (news,) = saver.news()
        assert saver.failed == news.error
        assert (news.path is None) == bool(news.error)
        return news


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    threads = torch.get_num_threads()
    start_process(parse_config([]).run, Place(0, 1, 0, 1, False), torch.device("cpu"))
    yield Trainer()
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """Writing beyond it fails in the middle of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@BOTH
@pytest.mark.parametrize(("stage", "texts", "limit_bytes"), [
    ("rank-00000.safetensors", TEXTS, 100_000), ("partial", LARGE, 1_500_000), ("step-00000002 cannot be committed", TEXTS, 1000),
])  # fmt: skip
def test_a_full_disk_leaves_what_was_committed(
    stage: str, texts: dict[str, str], limit_bytes: int, asynchronous: bool, trainer: Trainer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the shard, in the config, in the manifest; although only one checkpoint is kept."""
    assert trainer.save(tmp_path, 1, keep=1, asynchronous=asynchronous).error == ""
    with monkeypatch.context() as patched:
        if "committed" in stage:  # the manifest is smaller than the shard: the disk fills up between the two
            really = saver_module.commit

            def commit(*arguments: Any) -> Path:
                with file_limit(limit_bytes):
                    return really(*arguments)

            patched.setattr(saver_module, "commit", commit)
            failed = trainer.save(tmp_path, 2, texts, keep=1, asynchronous=asynchronous)
        else:
            with file_limit(limit_bytes):
                failed = trainer.save(tmp_path, 2, texts, keep=1, asynchronous=asynchronous)
    assert stage in failed.error
    assert "File too large" in failed.error
    assert names(tmp_path) == ["step-00000001"]
    assert verify_alone(tmp_path / "step-00000001").position.step == 1
    assert trainer.save(tmp_path, 3, texts, keep=1, asynchronous=asynchronous).error == ""
    assert names(tmp_path) == ["step-00000003"]
    verify_alone(tmp_path / "step-00000003")


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_committed(value: float, asynchronous: bool, trainer: Trainer, tmp_path: Path) -> None:
    weight = trainer.model.head.output.weight
    (weight.to_local() if hasattr(weight, "to_local") else weight).data[-1, 3] = value
    said = trainer.save(tmp_path, 1, asynchronous=asynchronous).error
    assert said == "model.head.output.weight is not finite on rank 0, and nothing that is not finite is committed"
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_it_counts(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are made, every file, then the manifest, then the folder, then the rename, then the folder that it is in."""
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
    assert done[2:] == ["rank-00000.safetensors", *TEXTS, MANIFEST, ".step-00000001.partial", "-> step-00000001", "checkpoints"]


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


def test_older_ones_go_only_after_a_newer_one_is_there(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[list[int]] = []
    really = saver_module.delete_others

    def look(folder: Path, keep: int, keep_every: int) -> None:
        there.append([folder_module.step_of(verified) for verified in list_checkpoints(folder) if verify_alone(verified)])
        really(folder, keep, keep_every)

    monkeypatch.setattr(saver_module, "delete_others", look)
    for step in range(1, 6):
        assert trainer.save(tmp_path, step, keep=1, keep_every=2).error == ""
    assert there == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert [folder_module.step_of(path) for path in list_checkpoints(tmp_path)] == [2, 4, 5]


def test_a_step_that_is_there_is_not_written_again(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer.save(tmp_path, 1).error == ""
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}
    assert "nothing writes into a committed checkpoint" in trainer.save(tmp_path, 1).error
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == before
    assert names(tmp_path) == ["step-00000001"]


def test_a_folder_that_cannot_be_written_is_said(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written into" in trainer.save(tmp_path / "file" / "checkpoints", 1).error
    assert (tmp_path / "file").read_text() == ""


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks, killed at each stage or with a fault of their own."""
    done = subprocess.run([sys.executable, "-m", "tests.train.checkpoint_save_worker", str(tmp_path_factory.mktemp("cases"))],
                          cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_rank_killed_at_any_stage_leaves_whole_checkpoints(cut_short: list[dict[str, Any]], trainer: Trainer) -> None:
    """The other rank hears of it at once; nothing half done counts, and the next save removes it."""
    committed = {"after the rename": [1, 2], "before retention": [1, 2], "in a deletion": [2]}
    kills = [case for case in cut_short if case["case"] not in ("disk full on one rank", "NaN on one rank")]
    assert len(kills) == 10
    for case in kills:
        folder = Path(case["checkpoints"])
        assert sorted(heard[:34] for heard in case["heard"]) == ["exit -9", "the save of step 2 was cut off, as"], case
        found = list_checkpoints(folder)
        assert [verify_alone(path).position.step for path in found] == committed.get(case["case"], [1]), case
        leftover = set(case["after"]) - {path.name for path in found}
        assert leftover <= {".step-00000002.partial", ".step-00000001.old"}, case
        assert trainer.save(folder, 3, keep=1).error == "", case
        assert names(folder) == ["step-00000003"], case
    with_leftovers = [case for case in kills if any(name.startswith(".") for name in case["after"])]
    assert len(with_leftovers) == 7, "most stages leave something to remove"


def test_what_one_rank_cannot_write_no_rank_commits(cut_short: list[dict[str, Any]]) -> None:
    """All ranks hear the same, and save the next time."""
    said = {"disk full on one rank": "rank-00001.safetensors cannot be written (File too large)",
            "NaN on one rank": "model.tok_embeddings.weight is not finite on rank 1"}  # fmt: skip
    cases = [case for case in cut_short if case["case"] in said]
    assert len(cases) == 4
    for case in cases:
        assert all(said[case["case"]] in heard for heard in case["heard"]), case
        assert case["heard"][0] == case["heard"][1]
        assert case["after"] == ["step-00000001"], case
        assert names(Path(case["checkpoints"])) == ["step-00000003"], case
        verify_alone(Path(case["checkpoints"]) / "step-00000003")


@pytest.mark.parametrize(("on_error", "code"), [("stop", 1), ("warn", 0)])
def test_a_run_stops_or_goes_on_as_asked_when_the_disk_is_full(on_error: str, code: int, tmp_path: Path) -> None:
    """The shell's limit on a file's size lets everything be written but the tensors."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} of a text\n" * 200)
    data = [f"--data.source={tmp_path / 'text'}", f"--data.cache_dir={tmp_path / 'cache'}"]
    words = command(1, *TINY, *EAGER, *data, "--model.ffn_dim=256", "--train.steps=3", "--checkpoint.every=1",
                    f"--checkpoint.on_error={on_error}", f"--run.dir={tmp_path / 'run'}")  # fmt: skip
    done = subprocess.run(["bash", "-c", 'ulimit -f 500 && exec "$@"', "-", *words], cwd=ROOT, env=environment(),
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    if on_error == "stop":
        assert "rank-00000.safetensors cannot be written (File too large)" in done.stderr
        assert "Traceback" not in done.stderr
        assert status["state"] == "failed"
        assert status["step"] < 3
    else:
        assert done.stdout.count("warning: not saved: ") == 3
        assert (status["state"], status["step"]) == ("finished", 3)
    assert names(tmp_path / "run" / "checkpoints") == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small file system needs root")
def test_a_small_file_system_is_said_to_be_too_small(trainer: Trainer, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        said = trainer.save(tmp_path / "checkpoints", 1).error
        assert said.startswith("the checkpoint of step 1 needs 1.")
        assert "has 0.3 MiB free: make room, or lower checkpoint.keep" in said
        assert names(tmp_path / "checkpoints") == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
