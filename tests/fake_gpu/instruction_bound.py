"""A lower bound of a memory-bound kernel's time on an H100, from its machine code (SASS): the time to issue
the instructions of its main loop, beside the time to move the loop's bytes.

It assumes the best case: no instruction waits for another, and all multiprocessors are always busy. The real
time is at least the larger of the two times; how much longer it is does not follow.
"""

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

MULTIPROCESSORS = 132
# boost: 132 multiprocessors x 128 lanes x 2 x this are the 66.9 float32 TFLOP/s of the H100 SXM5's data sheet
CLOCK = 1.98e9
# instructions of a warp that a multiprocessor issues per clock: one for each of its four schedulers
ISSUED = 4.0
# Instructions of a warp per clock and multiprocessor. CUDA C++ Programming Guide, throughput of native
# arithmetic instructions of compute capability 9.0 (in threads: 32 times as much); which ones share a pipe:
# Nsight Compute, "Pipelines". Others only issue.
PIPES = (
    ("float32", r"FADD|FMUL|FFMA", 4.0),
    ("special functions", r"MUFU", 0.5),
    ("integer products", r"IMAD|IMUL", 2.0),
    (
        "integer and logic",
        r"IADD|VIADD|LOP3|SHF|LEA|PRMT|SEL|ISETP|IMNMX|VIMNMX|IABS|FSEL|FSETP|FMNMX|F2FP|SGXT|PLOP3",
        2.0,
    ),
    ("shuffles", r"SHFL", 1.0),
    ("loads and stores", r"LD|ST|ATOM|RED", 1.0),
)
# of a load or store, by its suffix; without one 32
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass(frozen=True)
class Instruction:
    """A line of SASS: its opcode with all suffixes, whether a predicate guards it, and the label it may jump
    to."""

    opcode: str
    guarded: bool
    target: str | None

    @property
    def moved_bytes(self) -> int:
        """Of a thread, from or to global memory."""
        if not self.opcode.startswith(("LDG", "STG")):
            return 0
        return next((BITS[suffix] for suffix in self.opcode.split(".") if suffix in BITS), 32) // 8


@dataclass(frozen=True)
class Bound:
    """A warp's main loop, once.

    Args:
        instructions: of the shortest way through it
        moved_bytes: of each thread, from and to global memory
        clocks: that a multiprocessor takes at least, by what limits it
    """

    instructions: int
    moved_bytes: int
    clocks: dict[str, float]

    def instructions_per_element(self, element_bytes: int) -> float:
        """Of a thread, where an element has so many bytes moved."""
        return self.instructions * element_bytes / self.moved_bytes

    def share_of_memory_time(self, bytes_per_s: float) -> float:
        """Time to issue it by the time to move its bytes at this rate. Above 1 the kernel cannot reach the
        rate."""
        issue_s = max(self.clocks.values()) / (MULTIPROCESSORS * CLOCK)
        return issue_s / (32 * self.moved_bytes / bytes_per_s)


def bound_of(sass: str) -> Bound:
    """The bound of the kernel's main loop: of all loops the one that moves the most bytes."""
    code, labels = _parse(sass)
    first, last = _main_loop(code, labels)
    way = _shortest_way(code, labels, first, last)
    moved_bytes = sum(one.moved_bytes for one in way)
    if moved_bytes != sum(one.moved_bytes for one in code[first : last + 1]):
        raise ValueError("the shortest way through the main loop leaves a load or store out")
    clocks = defaultdict[str, float](float, issue=len(way) / ISSUED)
    for one in way:
        for pipe, pattern, rate in PIPES:
            if re.match(pattern, one.opcode):
                clocks[pipe] += 1 / rate
                break
    return Bound(len(way), moved_bytes, dict(clocks))


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions in order, and of each label the place of the next one."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?([A-Z][\w.]*)(.*?);", line):
            jump = (
                re.fullmatch(r"(.*?)`\((\.L_x_\d+)\)", found[3].strip())
                if found[2].startswith("BRA")
                else None
            )
            code.append(
                Instruction(found[2], bool(found[1] or (jump and jump[1])), jump[2] if jump else None)
            )
    return code, labels


def _main_loop(code: Sequence[Instruction], labels: dict[str, int]) -> tuple[int, int]:
    """Places of the first and last instruction."""
    loops = [
        (labels[one.target], last)
        for last, one in enumerate(code)
        if one.target and labels[one.target] < last
    ]
    return max(loops, key=lambda loop: sum(one.moved_bytes for one in code[loop[0] : loop[1] + 1]))


def _shortest_way(
    code: Sequence[Instruction], labels: dict[str, int], first: int, last: int
) -> list[Instruction]:
    """The fewest instructions from first to last: what lies off it, as the slow path of a division, need not
    be executed."""
    came_from, queue = {first: first}, deque([first])
    while last not in came_from:
        place = queue.popleft()
        for following in _following(code[place], place, labels):
            if following not in came_from:
                came_from[following] = place
                queue.append(following)
    places = [last]
    while places[-1] != first:
        places.append(came_from[places[-1]])
    return [code[place] for place in reversed(places)]


def _following(one: Instruction, place: int, labels: dict[str, int]) -> list[int]:
    """Where a thread may be after the instruction."""
    jumps = [labels[one.target]] if one.target else []
    ends = not one.guarded and (one.target is not None or one.opcode.startswith(("EXIT", "RET")))
    return jumps if ends else [*jumps, place + 1]
