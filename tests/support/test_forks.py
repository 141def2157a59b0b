"""Forks start and end like commands, and the ranks of one command like torchrun's workers."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.forks import PRELOADED, STACKS, fork
from tests.support.launch import LIMIT_S, Launch


def describe(path: Path) -> None:
    """Write the state of a new child process to a file."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    state = {
        "threads": len(os.listdir("/proc/self/task")),
        "group": dist.is_initialized(),
        "not imported": [name for name in PRELOADED if name not in sys.modules],
        "ignored signals": [n.name for n, handler in handlers.items() if signal.getsignal(n) is not handler],
    }
    path.write_text(json.dumps(state))


def test_a_fork_begins_with_one_thread_no_group_all_imports_and_default_signals(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fork(describe, out, output=tmp_path / "log").wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    expected = {"threads": 1, "group": False, "not imported": [], "ignored signals": []}
    assert json.loads(out.read_text()) == expected


def end(how: str) -> None:
    if how == "interrupted":
        raise KeyboardInterrupt
    sys.exit({"well": None, "by a code": 3, "by a word": "wrong"}[how])


def test_a_fork_ends_with_the_code_of_an_interpreter(tmp_path: Path) -> None:
    for how, code, printed in (
        ("well", 0, ""),
        ("by a code", 3, ""),
        ("by a word", 1, "wrong\n"),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt"),
        ("unheard of", 1, "KeyError"),
    ):
        assert fork(end, how, output=tmp_path / how).wait(LIMIT_S) == code, how
        assert printed in (tmp_path / how).read_text()


def waits(folder: Path) -> None:
    (folder / "waits").touch()
    time.sleep(2 * LIMIT_S)


def test_a_fork_prints_where_it_is(tmp_path: Path) -> None:
    process = fork(waits, tmp_path, output=tmp_path / "output")
    try:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        process.send_signal(STACKS)
        while "in waits" not in (tmp_path / "output").read_text():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def fails(folder: Path) -> None:
    while not (folder / "waits").exists():
        time.sleep(0.01)
    os._exit(7)


@pytest.mark.parametrize(
    "until",
    [lambda launch: launch.wait(LIMIT_S), lambda launch: launch.wait_until(lambda: False)],
    ids=["wait", "wait_until"],
)
def test_when_one_rank_has_failed_the_others_are_asked_to_end(
    until: Callable[[Launch], object], tmp_path: Path
) -> None:
    ranks = [fork(function, tmp_path, output=tmp_path / "output") for function in (waits, fails)]
    try:
        assert until(launch := Launch(ranks, tmp_path / "output")) in (1, False)
        assert [rank.returncode for rank in launch.ranks] == [-signal.SIGTERM, 7]
    finally:
        for rank in ranks:
            rank.kill()
