"""tools.sweep with the real trainer: runs that finish, fail, are refused or interrupted."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.tools import processes
from meshwright.tools.sweep import runner
from meshwright.tools.sweep.__main__ import main
from meshwright.tools.sweep.spec import make_runs, read_spec
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.errors import LockError
from meshwright.train.fault_tolerance.run_folder import lock_folder
from tests.support.launch import (
    EAGER,
    LIMIT_S,
    TINY,
    family,
    kill,
    read_metrics,
    read_status,
    started,
    write_text,
)
from tests.support.nested import NESTED, run_nested
from tests.support.sweeps import Page, write_run
from tests.support.tables import try_each

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


def test_a_run_that_has_not_recorded_its_end_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`before` it started, its folder had a status; the script is the run."""
    path = write(tmp_path)
    (run,) = make_runs(path, read_spec(path, {}, {}))

    def check(before: str, script: str, state: str, reason: str = "") -> None:
        write_run(run.folder, [], before)
        monkeypatch.setattr(runner, "run_command", lambda _: ["sh", "-c", f"cd {run.folder}; {script}"])
        runner.run_once(run)
        status = read_status(run.folder)
        assert (status["state"], status["reason"]) == (state, reason)

    finish = "sed -i s/running/finished/ status.json"
    rows = [
        ("running", finish, "finished"),
        ("running", f"{finish}; exit 1", "failed", "no output (exit code 1)"),
        ("stopped", "true", "stopped"),
        ("stopped", "echo PlanError: no; exit 2", "failed", "PlanError: no (exit code 2)"),
        ("running", "echo last words; kill -9 $$", "failed", "last words (exit code -9)"),
        ("running", "sed -i s/running/failed/ status.json; exit 1", "failed"),
    ]
    try_each(rows, check)


def run_interrupted(run: Any) -> None:
    """Start a run whose program interrupts the sweep by SIGUSR1."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run_once(run)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_is_interrupted_before_its_first_step_waits_for_the_next_start(
    tmp_path: Path, monkeypatch: Any
) -> None:
    path = write(tmp_path)
    (run,) = make_runs(path, read_spec(path, {}, {}))
    monkeypatch.setattr(runner, "run_command", lambda _: ["sh", "-c", "kill -USR1 $PPID; sleep 20"])
    run_interrupted(run)
    assert not (run.folder / "status.json").exists()


def test_a_second_interrupt_kills_a_run_that_does_not_stop(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path)
    (run,) = make_runs(path, read_spec(path, {}, {}))
    twice = "sleep 0.5; kill -USR1 $PPID; sleep 1; kill -USR1 $PPID; sleep 20"
    script = f"trap '' TERM; echo $$ > {run.folder}/pid; {twice}"
    monkeypatch.setattr(runner, "run_command", lambda _: ["sh", "-c", script])
    monkeypatch.setattr(processes, "GRACE_S", 0.0)
    run_interrupted(run)
    assert not processes.find_running([int((run.folder / "pid").read_text())])
    assert read_status(run.folder)["state"] == "failed"


def test_what_nohup_ignores_stays_ignored_and_the_rest_interrupts() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runner.interruptible():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) != signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def saved_steps(folder: Path) -> list[int]:
    return [0, *map(step_of, list_checkpoints(folder / "checkpoints"))]


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_an_interrupted_sweep_saves_and_the_same_command_resumes_its_run(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    overrides = {**keys, "train.steps": 10**6, "train.global_batch_size": 2, "checkpoint.every": 10}
    path, folder = write(tmp_path, overrides=overrides, runs={"long": {}}), tmp_path / "study" / "long"
    ends = [{"step": 0}]
    for turn in range(2):
        with started(1, "tools.sweep", str(path), output=tmp_path / f"{turn}", module=NESTED) as sweep:
            try:
                assert sweep.wait_until(lambda: saved_steps(folder)[-1] > ends[-1]["step"]), sweep.output()
                sweep.send_signal(signal.SIGINT)
                assert sweep.wait(LIMIT_S) == 130, sweep.output()
            finally:
                kill(family(sweep.ranks[0].pid))
        assert re.search("interrupted.*same command", sweep.output())
        ends.append(read_status(folder))
        assert (ends[-1]["state"], ends[-1]["reason"]) == ("stopped", "signal SIGTERM")
        assert saved_steps(folder)[-1] == ends[-1]["step"]
    assert ends[2]["resumed_from"] == ends[1]["step"]
