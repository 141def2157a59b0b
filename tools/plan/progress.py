"""The progress of planning on a terminal: one line on standard error, overwritten, and erased at the end."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from meshwright.parallel.planner.progress import Clock, start

AFTER_S, EVERY_S = 2.0, 0.2
ERASE = "\r\x1b[K"  # to the start of the line, and clear it


@contextmanager
def progress() -> Iterator[Clock]:
    """Time the planning inside, by phase. After two seconds a line shows how far it is, if standard error is
    a terminal; other output inside would stand in it."""
    began = due = perf_counter()
    due += AFTER_S

    def draw(clock: Clock) -> None:
        nonlocal due
        if (now := perf_counter()) >= due:
            due = now + EVERY_S
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = f"planner: {clock.phase}, {clock.text} ({now - began:.0f} s)"
            print(ERASE + line[: width - 1], end="", file=sys.stderr, flush=True)

    clock = start(draw) if sys.stderr.isatty() else start()
    try:
        yield clock
    finally:
        start()
        clock.enter("other")
        if due > began + AFTER_S:
            print(ERASE, end="", file=sys.stderr, flush=True)
