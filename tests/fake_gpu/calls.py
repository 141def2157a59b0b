"""What the tests read in the log of a fake GPU, besides what tools.dryrun reports."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.log import LAUNCHES, STEPS, Call, NcclCollective, steady_step


@dataclass(frozen=True, order=True)
class Loaded:
    """A loaded Triton kernel: registers of a thread, and bytes of its stack, which holds spilled ones."""

    name: str
    registers: int
    stack_bytes: int


def unimplemented(calls: Sequence[Call]) -> list[str]:
    """Return the called functions that the fake does not implement."""
    return [call.words[0] for call in calls if call.kind == "unimplemented"]


def refused(calls: Sequence[Call]) -> list[Call]:
    """Return calls on a stream of another device than the thread's, and launches beyond H100 limits."""
    return [call for call in calls if call.kind in ("wrong_device", "bad_launch")]


def devices(calls: Sequence[Call]) -> set[int]:
    """Return the devices on which the process has a context; each context takes half a GiB."""
    return {int(call.words[0]) for call in calls if call.kind == "context"}


def triton_launches(calls: Sequence[Call]) -> Counter[Loaded]:
    """Return the number of launches of each Triton kernel, the project's and inductor's."""
    words = (call.words[:3] for call in calls if call.kind == "triton")
    return Counter(Loaded(name, int(registers), int(stack)) for name, registers, stack in words)


def function_name(mangled: str) -> str:
    """Return the innermost function of a mangled C++ name, in which every identifier follows its length
    (Itanium C++ ABI)."""
    name, prefix = "", re.match(r"_ZN?", mangled)
    rest = mangled[prefix.end() :] if prefix else ""
    while length := re.match(r"(\d+)", rest):
        start = length.end()
        name, rest = rest[start : start + int(length[1])], rest[start + int(length[1]) :]
    return name or mangled


def stream_waits(calls: Sequence[Call], step: Sequence[Call]) -> Counter[tuple[int, int]]:
    """Return how often in the step one stream waits for another: (waiting stream, awaited stream). `calls`:
    all calls of the process up to the step's end, because an event may have been recorded long before."""
    recorded: dict[str, int] = {}
    waits: Counter[tuple[int, int]] = Counter()
    begin = len(calls) - len(step)
    for at, call in enumerate(calls):
        if call.kind == "record":
            recorded[call.words[0]] = call.stream
        elif call.kind == "wait" and at >= begin and call.words[0] in recorded:
            waits[call.stream, recorded[call.words[0]]] += 1
    return waits


def steady_waits(calls: Sequence[Call]) -> Counter[tuple[int, int]]:
    """Return how often in the last step one stream waits for another: (waiting stream, awaited stream)."""
    end = calls.index(Call("mark", 0, (f"end {STEPS - 1}",)))
    return stream_waits(calls[:end], steady_step(calls))


def count_launches(calls: Sequence[Call]) -> int:
    """Return the number of kernel launches of all libraries except NCCL."""
    return sum(call.kind in LAUNCHES for call in calls)


def collectives(calls: Sequence[Call]) -> list[NcclCollective]:
    """Return the NCCL collectives in order."""
    return [*log.collectives(calls).values()]
