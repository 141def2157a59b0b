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
    inner = clock.phase("memory")(lambda: None)
    with progress() as seconds, clock.phase("bounds"):
        inner()
    assert seconds == {"tracing": 0, "bounds": 2 + 8, "memory": 4, "timeline": 0, "other": 1 + 16}


def test_a_terminal_has_one_line_in_the_end_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    monkeypatch.setattr(lines, "EVERY_S", 0.0)
    with os.fdopen(ours, "rb", 0) as reader, os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for after_s in (60.0, 0.0):
            monkeypatch.setattr(lines, "AFTER_S", after_s)
            with progress(), clock.phase("tracing"):
                clock.done = "1,204 plans bounded, 14 predicted"
            print("end", file=stderr, flush=True)
        monkeypatch.undo()
        written = b""
        while written.count(b"end") < 2:
            written += reader.read(1000)
    first, *drawn, last = written.decode().split("\r\x1b[K")
    assert first == last == "end\r\n"  # nothing before it is due
    assert drawn[:2] == ["planner: one plan, tracing (0 s)", "planner: 1,204 plans bounded, 14 predict"[:39]]
    assert max(map(len, drawn)) == 39
