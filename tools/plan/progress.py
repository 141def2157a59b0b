"""The progress of planning: a line on standard error, if that is a terminal, erased at the end."""

import contextlib
import os
import sys
from collections.abc import Iterator
from time import perf_counter

from meshwright.parallel.planner.progress import clock

AFTER_S, EVERY_S = 2.0, 0.2
ERASE = "\r\x1b[K"  # to the start of the line, and clear it


@contextlib.contextmanager
def progress() -> Iterator[dict[str, float]]:
    """Show the progress of the planning inside after two seconds, and yield its seconds by phase."""
    began, drawn_s = perf_counter(), 0.0

    def draw() -> None:
        nonlocal drawn_s
        if (now_s := perf_counter() - began) >= max(AFTER_S, drawn_s + EVERY_S):
            drawn_s = now_s
            with contextlib.suppress(OSError):  # the terminal may be gone
                width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
                line = f"planner: {clock.done or 'one plan'}, {clock.current} ({now_s:.0f} s)"[: width - 1]
                print(ERASE + line, end="", file=sys.stderr, flush=True)

    try:
        yield clock.start(draw if sys.stderr.isatty() else None)
    finally:
        clock.enter("other")
        clock.start()
        with contextlib.suppress(OSError):
            print(ERASE if drawn_s else "", end="", file=sys.stderr, flush=True)
