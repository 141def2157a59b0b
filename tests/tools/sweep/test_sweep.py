"""tools.sweep with the real trainer: runs that finish, fail, are refused, interrupted or killed."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.tools.processes import children
from meshwright.tools.sweep.__main__ import main
from meshwright.tools.sweep.runner import interruptible
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.errors import LockError
from meshwright.train.fault_tolerance.run_lock import lock_folder
from tests.support.launch import (
    EAGER,
    LIMIT_S,
    TINY,
    Launch,
    family,
    kill,
    read_metrics,
    read_status,
    started,
    write_text,
)
from tests.support.nested import NESTED, run_nested
from tests.support.sweeps import Page

STEPS = 100
SPEC = {"config": "llama_debug.yaml", "processes": 1}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Config keys of a tiny eager run."""
    pairs = (
        argument[2:].partition("=")
        for argument in [*TINY, *EAGER, *write_text(tmp_path_factory.mktemp("data"))]
    )
    keys = {key: yaml.safe_load(value) for key, _, value in pairs}
    return {**keys, "train.eval_every": 0, "metrics.tensorboard": False, "optim.lr": 0.003}


def write(folder: Path, **spec: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "folder": str(folder / "study"), **spec}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def swept(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One sweep of three runs: one that ends, one that fails, one whose plan is refused."""
    folder = tmp_path_factory.mktemp("swept")
    runs = {"good": {"processes": 2}, "broken": {"data.source": "nowhere"}, "impossible": {"parallel.tp": 3}}
    overrides = {**keys, "train.steps": 6, "checkpoint.every": 0}
    done = run_nested("tools.sweep", str(write(folder, overrides=overrides, runs=runs)))
    return folder, done


@pytest.mark.sampled(3, day=2)
def test_runs_finish_fail_and_are_refused_each_in_its_folder(swept: tuple[Path, Any]) -> None:
    folder, done = swept
    study = folder / "study"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "[2/3] broken: failed, step 0/6: DataError" in done.stdout
    assert read_status(study / "good")["state"] == "finished"
    assert len(read_metrics(study / "good")) == 6
    assert "2 processes" in (study / "good" / "output.txt").read_text()
    document = json.loads((study / "report.json").read_text())
    assert [each["state"] for each in document["runs"]] == ["finished", "failed", "refused"]
    good, broken, impossible = document["runs"]
    assert broken["reason"].startswith("DataError: data.source=nowhere"), broken
    assert impossible["reason"].startswith("PlanError: parallel"), impossible
    assert good["device"] == "CPU (no GPU)"
    page = Page((study / "report.html").read_text())
    assert [cells[0] for cells in page.rows] == ["run", "good", "broken", "impossible"]


@pytest.mark.usefixtures("forked_commands")
def test_the_same_command_starts_only_what_has_not_finished(swept: tuple[Path, Any], capsys: Any) -> None:
    folder, _ = swept
    outputs = [folder / "study" / name / "output.txt" for name in ("good", "broken")]
    before = [path.stat().st_mtime_ns for path in outputs]
    with pytest.raises(SystemExit, match="1"):
        main([str(folder / "study.yaml"), "--json"])
    good, broken = (path.stat().st_mtime_ns > time for path, time in zip(outputs, before, strict=True))
    assert (good, broken) == (False, True)
    printed = capsys.readouterr()
    assert [each["state"] for each in json.loads(printed.out)["runs"]] == ["finished", "failed", "refused"]
    assert "[2/3] broken: failed" in printed.err


def test_a_run_that_trains_on_without_its_sweep_is_not_started_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "study" / "run").mkdir(parents=True)
    lock = lock_folder(tmp_path / "study" / "run")
    try:
        with pytest.raises(LockError, match=rf"study/run is in use by process {os.getpid()} .*end that run"):
            main([str(path)])
    finally:
        lock.release()


def test_what_nohup_ignores_stays_ignored_and_the_rest_interrupts() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def sweeping(path: Path, output: Path) -> Iterator[Launch]:
    """A running sweep; at the end all its processes are killed."""
    with started(1, "tools.sweep", str(path), output=output, module=NESTED) as sweep:
        try:
            yield sweep
        finally:
            kill(family(sweep.ranks[0].pid))


def was_asked_to_end(pid: int) -> bool:
    """Whether SIGTERM is pending for a stopped process."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return pending is not None and bool(int(pending[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.sampled(3)
def test_interrupted_then_killed_a_sweep_continues_from_checkpoints_to_its_end(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """First Ctrl-C: the run saves and both stop. Then SIGKILL to the entire sweep. Then the same command
    finishes."""
    overrides = {**keys, "train.steps": STEPS, "train.global_batch_size": 2, "checkpoint.every": 10}
    path, folder = write(tmp_path, overrides=overrides, runs={"long": {}}), tmp_path / "study" / "long"
    with sweeping(path, tmp_path / "first") as sweep:
        assert sweep.wait_until(lambda: list_checkpoints(folder / "checkpoints")), sweep.output()
        (trainer,) = children(sweep.ranks[0].pid)
        os.kill(trainer, signal.SIGSTOP)  # otherwise it may finish before the signal arrives
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait_until(lambda: was_asked_to_end(trainer)), sweep.output()
        os.kill(trainer, signal.SIGCONT)
        assert sweep.wait(LIMIT_S) == 130, sweep.output()
    assert re.search("interrupted.*same command", sweep.output())
    stopped = read_status(folder)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "signal SIGTERM")
    assert (
        max(read_metrics(folder)) == stopped["step"] == step_of(list_checkpoints(folder / "checkpoints")[-1])
    )
    with sweeping(path, tmp_path / "second") as sweep:
        assert sweep.wait_until(
            lambda: step_of(list_checkpoints(folder / "checkpoints")[-1]) > stopped["step"]
        ), sweep.output()
        kill(family(sweep.ranks[0].pid))
    assert read_status(folder)["state"] == "running", "no process was left to write another status"
    done = run_nested("tools.sweep", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_status(folder)["resumed_from"] >= stopped["step"]
    assert sorted(read_metrics(folder)) == list(range(1, STEPS + 1))
