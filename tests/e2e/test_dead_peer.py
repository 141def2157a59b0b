"""A rank dies or hangs while the main threads of the others are inside a call that never returns, as on GPUs:
they end, and status.json has the reason. A rank that is only late ends nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.launch import Launch, read_status, started
from tests.support.run_faults import (
    LIMIT_S,
    check_commits,
    check_stopped,
    steps_of,
    tiny,
    torchrun,
    wait,
    wait_for_commit,
    workers,
)

HELD = "tests.support.workers.held_training"
SAVED, HELD_STEP = 2, 3
SAVING = (f"--checkpoint.every={SAVED}", "--checkpoint.asynchronous=false")
# a rank that only SIGTERM of the launcher ends outlives the test
GRACE = f"--run.grace_s={10 * LIMIT_S:g}"


def held(folder: Path, way: str, ranks: str, data: list[str]):
    """A run on two ranks whose main threads are held at HELD_STEP."""
    arguments = tiny(data, GRACE, *SAVING)
    command = (way, ranks, str(HELD_STEP), *arguments, f"--run.dir={folder}")
    return started(2, *command, output=folder.with_suffix(".txt"), module=HELD)


def ended(launch: Launch, folder: Path) -> str:
    """Wait until all ranks have ended, and return the reason in status.json."""
    assert launch.wait(LIMIT_S) == 1
    assert check_commits(folder) == SAVED
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("failed", SAVED)
    assert "run the same command again" in status["how_to_go_on"]
    return status["reason"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_whose_main_threads_cannot_return(killed, data, tmp_path):
    folder = tmp_path / "run"
    with held(folder, "device", "0,1", data) as launch:
        wait_for_commit(launch, folder, SAVED)
        wait(launch, lambda: read_status(folder)["step"] == SAVED)
        launch.ranks[killed].send_signal(signal.SIGKILL)
        reason = ended(launch, folder)
        name = f"rank {killed} (process {launch.ranks[killed].pid} on "
    assert reason.startswith(name), reason
    assert "resumes from the last one" in reason
    assert f"PeerLostError: {name}" in launch.output()


def test_a_step_that_takes_longer_than_its_time_out_ends_the_run_with_a_diagnosis(data, tmp_path):
    folder = tmp_path / "run"
    with held(folder, "stuck", "1", data) as launch:
        reason = ended(launch, folder)
    assert reason.startswith("STUCK: rank 1: "), reason
    assert "held_step" in reason
    assert "run.timeouts.step_s=" in launch.output()
    assert launch.output().count("STUCK: ") == 1


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_late_ranks_and_a_late_store_end_nothing(data, tmp_path):
    """A compiler that takes 45 s on one rank; meanwhile another rank is stopped for 30 s, and torchrun, which
    hosts the store, for 10 s."""
    folder = tmp_path / "run"
    arguments = tiny(data, *SAVING, "--train.global_batch_size=6")
    options = ["--standalone", "--nproc-per-node=3"]
    with torchrun(folder, options, arguments, program=[HELD, "45", "2", str(HELD_STEP)]) as launch:
        wait_for_commit(launch, folder, SAVED)
        stopped, agent = workers(launch)[1], launch.ranks[0].pid
        os.kill(stopped, signal.SIGSTOP)
        os.kill(agent, signal.SIGSTOP)
        time.sleep(10)
        os.kill(agent, signal.SIGCONT)
        time.sleep(20)
        assert len(workers(launch)) == 3, launch.output()
        os.kill(stopped, signal.SIGCONT)
        wait(launch, lambda: max(steps_of(folder)) > HELD_STEP + 3)
        launch.send_signal(signal.SIGTERM)
        launch.wait(LIMIT_S)
    assert check_stopped(folder, "signal SIGTERM") > HELD_STEP
