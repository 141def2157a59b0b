"""Runs that hang, that share a folder, and that fail again and again: each ends with words that say why."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.faults import LIMIT_S, check_commits, rows, started, steps_of, tiny, wait, wait_for_step
from tests.support.launch import read_status, run, write_text
from train.config import parse_config
from train.data.tokens import load_corpus

STEP_S = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_is_named_within_the_time_out_and_5_s(stopped, data, tmp_path):
    folder = tmp_path / "run"
    with started(2, folder, tiny(data, "--checkpoint.every=5", f"--run.timeouts.step_s={STEP_S}")) as launch:
        wait_for_step(launch, folder, 6)
        workers = launch.workers()
        os.kill(workers[stopped], signal.SIGSTOP)
        since_s = time.monotonic()
        wait(launch, lambda: "STUCK: " in launch.output())
        assert time.monotonic() - since_s < STEP_S + 5
        wait(launch, lambda: 1 - stopped not in launch.workers())
        os.kill(workers[stopped], signal.SIGKILL)  # else torchrun waits 30 s for it
        launch.wait_until_ended(LIMIT_S)
    headline = launch.output().partition("STUCK: ")[2].partition("\n")[0]
    assert headline.startswith(f"rank {stopped} gives no answer"), headline
    assert launch.process.returncode == 1
    assert check_commits(folder) >= 5
    status = read_status(folder)
    assert status["state"] == "failed"
    assert f"rank {stopped} gives no answer" in status["reason"]


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(data, tmp_path):
    folder = tmp_path / "run"
    arguments = tiny(data, "--checkpoint.every=10")
    with started(1, folder, arguments) as launch:
        wait_for_step(launch, folder, 12)
        second = run(1, *arguments, f"--run.dir={folder}")
        assert second.returncode == 2, second.stderr
        assert f"run.dir={folder} is in use by process {launch.process.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert launch.running()
        wait_for_step(launch, folder, max(steps_of(folder)) + 10)
        launch.process.send_signal(signal.SIGTERM)
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 75
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(1, len(steps) + 1)), "the second has written nothing"
    assert check_commits(folder) == steps[-1]
    assert json.loads((folder / "status.json").read_text())["resumed_from"] is None


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_worker_was_killed_and_it_finishes(data, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    arguments = tiny(data, "--checkpoint.every=5", steps=150)
    assert run(2, *arguments, f"--run.dir={whole}").returncode == 0
    with started(2, folder, arguments, ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]) as launch:
        wait_for_step(launch, folder, 12)
        os.kill(launch.workers()[1], signal.SIGKILL)
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 0, launch.output()[-3000:]
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("finished", 150)
    assert status["resumed_from"] >= 10
    curves = [{row["step"]: (row["loss"], row["grad_norm"]) for row in rows(one)} for one in (whole, folder)]
    assert curves[0] == curves[1]


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """What is started meanwhile can write no larger file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_run_that_fails_at_the_same_step_every_time_is_not_started_for_ever(data, tmp_path):
    folder, arguments = tmp_path / "run", tiny(data, "--checkpoint.every=3", steps=6)
    load_corpus(parse_config(arguments).data)  # the tokens are a larger file
    restarts = ["--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    with small_files(200_000), started(1, folder, arguments, restarts) as launch:  # a checkpoint has twice as much
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 1
    output = launch.output()
    assert "CrashLoopError: 3 starts in a row went no further than step 3 (from the beginning). The last: SaveError: " in output
    assert "File too large" in output
    assert "Mend the cause and start the run by hand" in output
    assert read_status(folder)["state"] == "failed"
    assert [row["step"] for row in rows(folder)].count(1) == 3, "three times, and no fourth"
    assert not list((folder / "checkpoints").iterdir()), "a save that fails leaves no trace"
