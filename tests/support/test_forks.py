"""Forks end like commands, and the ranks of one command like torchrun's workers."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forks import STACKS, fork
from tests.support.launch import LIMIT_S, Launch


def ends(how: str) -> None:
    if how == "interrupted":
        raise KeyboardInterrupt
    sys.exit({"well": None, "by a code": 3, "by a word": "wrong"}[how])


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [
        ("well", 0, ""),
        ("by a code", 3, ""),
        ("by a word", 1, "wrong\n"),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt"),
        ("unheard of", 1, "KeyError"),
    ],
)
def test_a_fork_ends_with_the_code_of_an_interpreter(
    how: str, code: int, printed: str, tmp_path: Path
) -> None:
    assert fork(ends, how, output=tmp_path / "output").wait(LIMIT_S) == code
    assert printed in (tmp_path / "output").read_text()


def waits(folder: Path) -> None:
    (folder / "waits").touch()
    time.sleep(2 * LIMIT_S)


def test_a_fork_prints_where_it_is(tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = fork(waits, tmp_path, output=output)
    try:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        process.send_signal(STACKS)
        while "in waits" not in output.read_text():
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
