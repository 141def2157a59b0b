"""The steps of one rank on the fake GPU: the command that runs them, and the parts of their log."""

import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.log import Call

STEPS = 3  # the first compiles, the second still fills caches, the third equals all later ones


def step_command(world_size: int, scratch: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command of the steps, which writes the allocator's peaks to memory.json in `scratch`."""
    counts = [str(world_size), str(STEPS), str(scratch / "memory.json")]
    return [sys.executable, "-m", "meshwright.tools.dryrun.step", *counts, *arguments]


def steady_step(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the last step."""
    return log.between(calls, f"step {STEPS - 1}", f"end {STEPS - 1}")


def stream_names(step: Sequence[Call], waits: Iterable[tuple[int, int]]) -> dict[int, str]:
    """Return names of the streams by order of first use; stream 0 is the default stream, on which the step
    computes."""
    used = (call.stream for call in step if call.kind in log.ON_STREAMS)
    order = list(dict.fromkeys([0, *used, *sorted(stream for pair in waits for stream in pair)]))
    return {stream: f"stream {number}" for number, stream in enumerate(order)}


def grid_blocks(launch: Call) -> int:
    """Return the number of blocks in the grid of a torch or Triton kernel."""
    grid = launch.words[1 if launch.kind == "kernel" else 3]
    return math.prod(map(int, grid.split(",")))


def function_name(mangled: str) -> str:
    """Return the innermost function of a mangled C++ name, in which every identifier follows its length
    (Itanium C++ ABI)."""
    name, prefix = "", re.match(r"_ZN?", mangled)
    rest = mangled[prefix.end() :] if prefix else ""
    while length := re.match(r"(\d+)", rest):
        start = length.end()
        name, rest = rest[start : start + int(length[1])], rest[start + int(length[1]) :]
    return name or mangled
