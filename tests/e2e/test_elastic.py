"""A node is lost under torchrun --nnodes=1:2: the world shrinks, the run plans again, and training
continues."""

import os
import signal
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.parallel.plan.serialize import load_plan
from tests.support.launch import Launch, read_status, rows_in, run
from tests.support.run_faults import (
    LIMIT_S,
    curve,
    kill,
    steps_of,
    tiny,
    torchrun,
    wait,
    wait_for_commit,
    wait_for_step,
    workers,
)

# The time until a lost agent is noticed, and the time that the first agent waits for more (on a busy machine
# the second joins seconds later): by default 15 s and 30 s.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=12,read_timeout=10"


def agent(port: int, is_host: bool) -> list[str]:
    """torchrun's options for one of two nodes."""
    return [
        "--nnodes=1:2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=shrinks",
        f"--rdzv-conf={QUICK},is_host={int(is_host)}",
        "--max-restarts=3",
        "--monitor-interval=0.2",
    ]


def kill_node(launch: Launch) -> None:
    """Kill the agent and its workers, as if the machine had gone down."""
    orphans = workers(launch)
    os.kill(launch.ranks[0].pid, signal.SIGKILL)
    kill(orphans)


def world_size(folder: Path) -> int:
    return load_plan(folder / "plan.yaml").mesh.world_size


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_lost_node_shrinks_the_world_and_the_losses_go_on(data, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    saving = ("--checkpoint.every=5", "--train.micro_batch_size=1")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = tiny(data, *saving)
    first, second = (
        torchrun(folder, agent(port, True), arguments, "kept"),
        torchrun(folder, agent(port, False), arguments, "lost"),
    )
    with first as kept, second as lost:
        wait_for_commit(kept, folder, 10)
        assert world_size(folder) == 4
        wait(kept, lambda: len(workers(lost)) == 2)
        kill_node(lost)
        wait(kept, lambda: (read_status(folder)["resumed_from"] or 0) >= 10)
        wait_for_step(kept, folder, max(steps_of(folder)) + 3)
        assert world_size(folder) == 2
        os.kill(workers(kept)[0], signal.SIGTERM)
        assert kept.wait(LIMIT_S) == 0, kept.output()[-3000:]
    status = read_status(folder)
    steps = [row["step"] for row in rows_in(folder)]
    again = [after for before, after in pairwise(steps) if after != before + 1]
    assert again in ([], [status["resumed_from"] + 1]), (
        "steps repeat at most once: after the resume, unless the last step done was committed"
    )
    assert run(2, *tiny(data, *saving, steps=status["step"]), f"--run.dir={whole}").returncode == 0
    expected, got = curve(whole), curve(folder)
    assert sorted(got) == sorted(expected)
    assert [got[step][0] for step in expected] == pytest.approx(
        [expected[step][0] for step in expected], abs=5e-5
    )
