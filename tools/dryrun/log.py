"""Read the log of a fake GPU (fake_cuda/core.h): the calls of one process."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STEPS = 3  # the first compiles, the second still fills caches, the third equals all later ones
# In the scratch folder, beside the log and the compiler's caches. step.py says what they contain.
PLAN_FILE, MEMORY_FILE, AXES_FILE = "plan.yaml", "memory.json", "axes.json"
TRACE_FILE, OPERATORS_FILE, WAITS_FILE = "trace.json", "operators.json", "waits.json"

LAUNCHES = ("kernel", "gemm", "triton", "cudnn")  # torch, cuBLAS, Triton (the project's, inductor's), cuDNN
POINT_TO_POINT = ("send", "recv")
ON_STREAMS = (*LAUNCHES, "nccl", "memcpy", "memset")
WAITS = ("device_sync", "stream_sync", "event_sync", "memcpy_sync")
# Slow calls, some of which also wait for the device.
ALLOCATIONS = (
    "malloc",
    "free",
    "create",
    "release",
    "reserve",
    "map",
    "unmap",
    "pin",
    "unpin",
    "out_of_memory",
)


@dataclass(frozen=True)
class Call:
    """One line of the log: the kind of call, the stream (0: the default stream, on which a step computes),
    and the fields of the kind."""

    kind: str
    stream: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class NcclCollective:
    """One collective. `bytes`: of the full tensor, as in tools.simulate; `stream` 0: the computing one."""

    op: str
    communicator: int
    ranks: int
    bytes: int
    stream: int


def read_log(scratch: Path) -> list[Call]:
    """Return all calls of the only process with a log in the folder."""
    (path,) = scratch.glob("log.*")
    return read_calls(path)


def read_calls(path: Path) -> list[Call]:
    """Return all calls of a log, without an unfinished last line."""
    rows = (line.split("\t") for line in path.read_text().split("\n")[:-1])
    return [Call(row[1], int(row[2], 16), tuple(row[3:])) for row in rows]


def between(calls: Sequence[Call], begin: str, end: str) -> list[Call]:
    """Return the calls between two marks of the program."""
    marks = {call.words[0]: at for at, call in enumerate(calls) if call.kind == "mark"}
    return list(calls[marks[begin] + 1 : marks[end]])


def host_waits(calls: Sequence[Call]) -> list[Call]:
    """Return the calls in which the host waits for the device. This includes copies from or to pageable
    memory (CUDA runtime API, section "API synchronization behavior": the stream is synchronized first)."""
    return [
        call
        for call in calls
        if call.kind in WAITS or (call.kind == "memcpy" and call.words[2] == "pageable")
    ]


def allocations(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that allocate or free device memory or page-locked host memory."""
    return [call for call in calls if call.kind in ALLOCATIONS]


def collectives(calls: Sequence[Call]) -> dict[int, NcclCollective]:
    """Return the NCCL collectives, by the id of their first call. An all-to-all is a group of sends to ranks
    that get something and of receives from those that give something (torch's ProcessGroupNCCL)."""
    groups = dict[object, list[Call]]()
    for call in calls:
        if call.kind == "nccl":
            group = call.words[4] if call.words[0] in POINT_TO_POINT else id(call)
            groups.setdefault(group, []).append(call)
    return {id(group[0]): _collective(group) for group in groups.values()}


def _collective(group: Sequence[Call]) -> NcclCollective:
    op, number, ranks, size = group[0].words[0], *map(int, group[0].words[1:4])
    if op in POINT_TO_POINT:
        sizes = (sum(int(c.words[3]) for c in group if c.words[0] == kind) for kind in POINT_TO_POINT)
        op, size = "all_to_all", max(sizes)
    return NcclCollective(op, number, ranks, size, group[0].stream)


def steady_step(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the last step."""
    return between(calls, f"step {STEPS - 1}", f"end {STEPS - 1}")


def stream_numbers(step: Sequence[Call], others: Iterable[int] = ()) -> dict[int, int]:
    """Return a number for each stream, by order of first use, then for others; 0 is the default one, which
    computes."""
    used = (call.stream for call in step if call.kind in ON_STREAMS)
    return {stream: n for n, stream in enumerate(dict.fromkeys([0, *used, *sorted(others)]))}


def grid_blocks(launch: Call) -> int:
    """Return the number of blocks in the grid of a torch or Triton kernel."""
    grid = launch.words[1 if launch.kind == "kernel" else 3]
    return math.prod(map(int, grid.split(",")))
