"""The helpers that start ranks: their results, their reports of failures, and the state of a new fork."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import PRELOADED, fork
from tests.support.launch import started
from tests.support.worlds import RanksError, run_ranks

LINES = 40  # maximum length of a report
RANKS = 3


def sum_of(value: float) -> tuple[int, float]:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def fail_on_one(how: str, depth: int = 40) -> None:
    """Fail on rank 1 after `depth` calls of itself, because a report must show the innermost frames of a
    stack."""
    if depth:
        return fail_on_one(how, depth - 1)
    if dist.get_rank() == 1:
        {"raise": divide, "crash": crash, "leave": leave, "hang": hang}[how]()
    return dist.barrier()


def divide() -> None:
    _ = 1 / 0


def crash() -> None:
    os.abort()


def leave() -> None:
    traceback.print_stack()  # os._exit prints no stack
    os._exit(0)


def hang() -> None:
    time.sleep(1000)


def describe_fork(path: Path) -> None:
    """Write a description of a new child process to a file."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    state = {
        "threads": len(os.listdir("/proc/self/task")),
        "group": dist.is_initialized(),
        "imported": [name for name in PRELOADED if name in sys.modules],
        "ignored signals": [
            number.name for number, handler in handlers.items() if signal.getsignal(number) is not handler
        ],
    }
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gives_back_what_it_returned(ranks):
    assert run_ranks(ranks, sum_of, 1.0) == [
        (rank, sum(1.0 + r for r in range(ranks))) for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("how", "first", "innermost"),
    [
        ("raise", "rank 1 failed:", "in divide\n    _ = 1 / 0\n"),
        ("crash", "rank 1 ended with -6:\nFatal Python error: Aborted\n", " in crash\n"),
        ("leave", "rank 1 ended with 0:\n", "in leave\n"),
        ("hang", "no rank failed, but after ", " in hang\n"),
    ],
    ids=["raise", "crash", "leave", "hang"],
)
def test_a_failure_names_the_rank_its_line_and_where_the_others_were(how, first, innermost):
    # on a busy machine the ranks may not have connected within the first limit
    for limit_s in (3, 15, 60) if how == "hang" else (60,):
        with pytest.raises(RanksError) as caught:
            run_ranks(RANKS, fail_on_one, how, limit_s=limit_s)
        report = str(caught.value)
        if innermost in report:
            break
    assert report.startswith(first)
    assert innermost in report
    assert " in fail_on_one" in report
    assert how != "hang" or "rank 1 was in\n" in report
    assert len(report.splitlines()) < LINES
    if how not in ("crash", "leave"):  # in these cases gloo fails on the other ranks too
        assert "rank 0, 2 was in" in report
        assert "barrier" in report
    assert run_ranks(1, sum_of, 0.0) == [(0, 0.0)], "the failure does not affect the next call"


def test_a_fork_begins_with_one_thread_no_group_all_imports_and_open_ears(tmp_path):
    out = tmp_path / "out"
    assert fork(describe_fork, out, output=tmp_path / "log").wait(60) == 0, (tmp_path / "log").read_text()
    assert json.loads(out.read_text()) == {
        "threads": 1,
        "group": False,
        "imported": list(PRELOADED),
        "ignored signals": [],
    }


def test_ranks_of_a_command_end_together_as_under_torchrun(tmp_path):
    """If a rank is killed, the launch fails, the other ranks receive SIGTERM, and no process is left."""
    with started(2, "-h", output=tmp_path / "out", module="http.server") as done:
        assert done.wait(60) == 0
    with started(2, "0", output=tmp_path / "out", module="http.server") as launch:
        launch.ranks[1].send_signal(signal.SIGKILL)
        assert launch.wait(60) == 1
    assert [rank.returncode for rank in launch.ranks] == [-signal.SIGTERM, -signal.SIGKILL]
