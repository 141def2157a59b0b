"""A node is lost under torchrun --nnodes=1:2: the world shrinks, the plan is made again, and training goes on."""

import os
import signal
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from parallel.plan_file import load_plan
from tests.e2e.faults import LIMIT_S, rows, started, tiny, wait, wait_for_step
from tests.support.launch import read_metrics, read_status, run, write_text
from tools.bench.launched import Launch

STEPS = 150
# How soon a lost agent is noticed, and how long the first waits for more: by default 15 s and 30 s.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,read_timeout=10"


def agent(port: int, is_host: bool) -> list[str]:
    """torchrun's options for one of two nodes."""
    return ["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=shrinks",
            f"--rdzv-conf={QUICK},is_host={int(is_host)}", "--max-restarts=3", "--monitor-interval=0.2"]  # fmt: skip


def kill_node(launch: Launch) -> None:
    """The agent and its workers, as if the machine had gone down."""
    for pid in [launch.process.pid, *launch.workers().values()]:
        os.kill(pid, signal.SIGKILL)


def world_size(folder: Path) -> int:
    return load_plan(folder / "plan.yaml").mesh.world_size


@pytest.mark.slow
def test_a_lost_node_shrinks_the_world_and_the_losses_go_on(tmp_path):
    data, whole, folder = write_text(tmp_path), tmp_path / "whole", tmp_path / "run"
    arguments = tiny(data, "--checkpoint.every=5", "--train.micro_batch_size=1", steps=STEPS)
    assert run(2, *arguments, f"--run.dir={whole}").returncode == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with started(2, folder, arguments, agent(port, True)) as kept, started(2, folder, arguments, agent(port, False)) as lost:
        wait_for_step(kept, folder, 12)
        assert world_size(folder) == 4
        wait(kept, lambda: len(lost.workers()) == 2)
        kill_node(lost)
        kept.wait_until_ended(LIMIT_S)
    assert kept.process.returncode == 0, kept.output()[-3000:]
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("finished", STEPS)
    assert status["resumed_from"] >= 10
    assert world_size(folder) == 2
    steps = [row["step"] for row in rows(folder)]
    assert [after for before, after in pairwise(steps) if after <= before] == [status["resumed_from"] + 1], "one start anew"
    want, got = read_metrics(whole), read_metrics(folder)
    assert [got[step]["loss"] for step in range(1, STEPS + 1)] == pytest.approx(
        [want[step]["loss"] for step in range(1, STEPS + 1)], abs=5e-5)  # fmt: skip
