"""Seconds of planning by phase, and the line on a terminal that shows how far it is."""

import os
import pty
import sys
import termios

import pytest

from meshwright.parallel.planner import progress as clocks
from meshwright.parallel.planner.progress import clock
from meshwright.tools.plan import progress as lines
from meshwright.tools.plan.progress import progress


def test_a_phase_does_not_count_those_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "perf_counter", iter([0, 1, 3, 7, 15, 31, 63]).__next__)

    @clock.phase("memory")
    def inner() -> None:
        pass

    with progress() as seconds, clock.phase("bounds"):
        inner()
    assert seconds == {"tracing": 0, "bounds": 2 + 8, "memory": 4, "timeline": 0, "other": 1 + 16}


def written(monkeypatch: pytest.MonkeyPatch, after_s: float) -> str:
    """What planning writes to a terminal of 40 columns."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    with (
        os.fdopen(ours, "rb", 0) as reader,
        os.fdopen(terminal, "w") as stderr,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(lines, "AFTER_S", after_s)
        patch.setattr(lines, "EVERY_S", 0.0)
        with progress(), clock.phase("tracing"):
            clock.done = "1,204 plans bounded, 14 predicted"
        print("end", file=stderr, flush=True)
        return reader.read(1000).decode()


def test_a_terminal_has_one_line_in_the_end_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *drawn, last = written(monkeypatch, after_s=0).split("\r\x1b[K")
    assert (first, last) == ("", "end\r\n")
    assert drawn[0] == "planner: tracing (0 s)"
    assert drawn[1] == "planner: 1,204 plans bounded, 14 predict"[:39]
    assert max(map(len, drawn)) == 39
    assert written(monkeypatch, after_s=60) == "end\r\n"
