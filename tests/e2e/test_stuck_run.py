"""Runs that hang, that share a folder, and that fail repeatedly: each ends with a message that gives the
reason."""

import signal
import time

import pytest

from meshwright.train.config_parser import parse_config
from tests.support.launch import read_status, rows_in, run
from tests.support.run_faults import (
    LIMIT_S,
    check_commits,
    started,
    steps_of,
    tiny,
    torchrun,
    wait,
    wait_for_commit,
    wait_for_step,
)
from tests.support.stores import load_corpus

STEP_S = 4


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_when_the_time_out_is_over(stopped, data, tmp_path):
    """In real time. Before, all are stopped for longer than their timeout, and continue."""
    folder = tmp_path / "run"
    with started(2, folder, tiny(data, "--checkpoint.every=5", f"--run.timeouts.step_s={STEP_S}")) as launch:
        wait_for_step(launch, folder, 3)
        launch.send_signal(signal.SIGSTOP)
        time.sleep(STEP_S + 4)
        launch.send_signal(signal.SIGCONT)
        wait_for_commit(launch, folder, max(steps_of(folder)) + 5)
        launch.ranks[stopped].send_signal(signal.SIGSTOP)
        wait(launch, lambda: "STUCK: " in launch.output())
        launch.ranks[1 - stopped].wait(LIMIT_S)
        launch.ranks[stopped].kill()  # torchrun would do so after 30 s
        assert launch.wait(LIMIT_S) == 1
    headline = launch.output().partition("STUCK: ")[2].partition("\n")[0]
    assert headline.startswith(f"rank {stopped}: no answer"), headline
    assert check_commits(folder) >= 5
    status = read_status(folder)
    assert status["state"] == "failed"
    assert f"rank {stopped}: no answer" in status["reason"]


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(data, tmp_path):
    folder = tmp_path / "run"
    arguments = tiny(data, "--checkpoint.every=10")
    with started(1, folder, arguments) as launch:
        wait_for_step(launch, folder, 2)
        second = run(1, *arguments, f"--run.dir={folder}")
        assert second.returncode == 2, second.stderr
        assert f"run.dir={folder} is in use by process {launch.ranks[0].pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert launch.running()
        wait_for_step(launch, folder, max(steps_of(folder)) + 2)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(LIMIT_S) == 75
    steps = [row["step"] for row in rows_in(folder)]
    assert steps == list(range(1, len(steps) + 1)), "the second run has written nothing"
    assert check_commits(folder) == steps[-1]
    assert read_status(folder)["resumed_from"] is None


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_run_that_fails_at_the_same_step_every_time_is_not_started_for_ever(data, tmp_path):
    folder, arguments = (
        tmp_path / "run",
        tiny(data, "--checkpoint.every=3", "--checkpoint.asynchronous=false", steps=6),
    )
    load_corpus(parse_config(arguments).data)  # creates the file of tokens, which exceeds the limit below
    file_limit = "FSIZE=200000"  # about half a checkpoint
    options = ["--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    with torchrun(folder, options, arguments, limit=file_limit) as launch:
        assert launch.wait(LIMIT_S) == 1
    output = launch.output()
    error = output[output.index("CrashLoopError: ") :]
    for fact in (
        "3 starts in a row",
        "step 3 (from the beginning)",
        "SaveError: ",
        "File too large",
        "by hand",
    ):
        assert fact in error, fact
    assert read_status(folder)["state"] == "failed"
    assert [row["step"] for row in rows_in(folder)].count(1) == 3, "three starts, and no fourth"
    assert not list((folder / "checkpoints").iterdir()), "a failed save leaves no files"
