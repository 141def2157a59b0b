"""Reads the log of a fake GPU (cuda/core.h): what one process asked of it, call by call."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHES = ("kernel", "gemm", "triton", "cudnn")  # torch's own, cuBLAS, Triton's (ours and inductor's), cuDNN
ON_STREAMS = (*LAUNCHES, "nccl", "memcpy", "memset")
WAITS = ("device_sync", "stream_sync", "event_sync", "memcpy_sync")
# Slow calls, and some of them wait for the device too.
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
    """One line: a kind of call, the stream (0: the default one, on which a step computes), and what belongs
    to the kind."""

    kind: str
    stream: int
    words: tuple[str, ...]


@dataclass(frozen=True, order=True)
class Loaded:
    """A kernel that Triton compiled and the process loaded: registers of a thread, and bytes of its stack,
    where others are spilled."""

    name: str
    registers: int
    stack_bytes: int


@dataclass(frozen=True)
class Collective:
    """One collective. `bytes` is its full side, as in tools.simulate; `stream` 0 is the one on which a step
    computes."""

    op: str
    communicator: int
    ranks: int
    bytes: int
    stream: int


def read_log(scratch: Path) -> list[Call]:
    """All calls of the only process that wrote a log into the folder."""
    (path,) = scratch.glob("log.*")
    return read_calls(path)


def read_calls(path: Path) -> list[Call]:
    """All calls of a log; a line that the process did not finish is left out."""
    rows = (line.split("\t") for line in path.read_text().split("\n")[:-1])
    return [Call(row[1], int(row[2], 16), tuple(row[3:])) for row in rows]


def between(calls: Sequence[Call], begin: str, end: str) -> list[Call]:
    """Calls between two marks of the program's."""
    marks = {call.words[0]: at for at, call in enumerate(calls) if call.kind == "mark"}
    return list(calls[marks[begin] + 1 : marks[end]])


def count_launches(calls: Sequence[Call]) -> int:
    """Kernels of every library, without NCCL's."""
    return sum(call.kind in LAUNCHES for call in calls)


def host_waits(calls: Sequence[Call]) -> list[Call]:
    """Calls in which the host waits for the device. A copy from or to pageable memory is one (CUDA runtime
    API, section "API synchronization behavior": the stream is synchronised first)."""
    return [
        call
        for call in calls
        if call.kind in WAITS or (call.kind == "memcpy" and call.words[2] == "pageable")
    ]


def allocations(calls: Sequence[Call]) -> list[Call]:
    """Calls that take or give back memory of the device, or page-locked memory of the host."""
    return [call for call in calls if call.kind in ALLOCATIONS]


def unimplemented(calls: Sequence[Call]) -> list[str]:
    """Functions that were called and that the fake has not."""
    return [call.words[0] for call in calls if call.kind == "unimplemented"]


def refused(calls: Sequence[Call]) -> list[Call]:
    """Calls on a stream of another device than the thread's, and launches beyond an H100's limits."""
    return [call for call in calls if call.kind in ("wrong_device", "bad_launch")]


def stream_waits(calls: Sequence[Call], step: Sequence[Call]) -> Counter[tuple[int, int]]:
    """How often in the step one stream waits for what another was given: (who waits, for whom). `calls`: all
    of the process up to the step's end, for an event may have been recorded long before."""
    recorded: dict[str, int] = {}
    found: Counter[tuple[int, int]] = Counter()
    begin = len(calls) - len(step)
    for at, call in enumerate(calls):
        if call.kind == "record":
            recorded[call.words[0]] = call.stream
        elif call.kind == "wait" and at >= begin and call.words[0] in recorded:
            found[call.stream, recorded[call.words[0]]] += 1
    return found


def devices(calls: Sequence[Call]) -> set[int]:
    """On which the process has a context: each costs half a GiB."""
    return {int(call.words[0]) for call in calls if call.kind == "context"}


def collectives(calls: Sequence[Call]) -> list[Collective]:
    """NCCL's, in order."""
    rows = [(call.words, call.stream) for call in calls if call.kind == "nccl"]
    return [
        Collective(op, int(number), int(ranks), int(size), stream)
        for (op, number, ranks, size), stream in rows
    ]


def loaded_kernels(calls: Sequence[Call]) -> set[Loaded]:
    """Those that run, and other configurations of them that inductor tried."""
    return {_loaded(call) for call in calls if call.kind == "cubin"}


def triton_launches(calls: Sequence[Call]) -> Counter[Loaded]:
    """How often each kernel was launched that Triton compiled: inductor's and ours."""
    return Counter(_loaded(call) for call in calls if call.kind == "triton")


def _loaded(call: Call) -> Loaded:
    name, registers, stack = call.words[:3]
    return Loaded(name, int(registers), int(stack))
