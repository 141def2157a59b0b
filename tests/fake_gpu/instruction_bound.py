"""A lower bound of a memory-bound kernel's time on an H100, from its machine code (SASS): the time to issue
the instructions of its main loop, compared with the time to move the loop's bytes.

It assumes the best case: no instruction waits for another, and all multiprocessors are always busy. The real
time is at least the larger of the two times.
"""

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

MULTIPROCESSORS = 132
# boost clock: 132 multiprocessors x 128 lanes x 2 x CLOCK are the 66.9 float32 TFLOP/s of the H100 SXM5's
# data sheet
CLOCK = 1.98e9
# instructions of a warp that a multiprocessor issues per clock: one for each of its four schedulers
ISSUED = 4.0
# Instructions of a warp per clock and multiprocessor. CUDA C++ Programming Guide, throughput of native
# arithmetic instructions of compute capability 9.0 (per thread: 32 times as many); pipes that instructions
# share: Nsight Compute, "Pipelines". Other instructions only take issue slots.
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
# bits of a load or store by its suffix; 32 without one
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass(frozen=True)
class Instruction:
    """A line of SASS: its opcode with all suffixes, whether a predicate guards it, and the label of a
    jump."""

    opcode: str
    guarded: bool
    target: str | None

    @property
    def moved_bytes(self) -> int:
        """Bytes that a thread moves from or to global memory."""
        if not self.opcode.startswith(("LDG", "STG")):
            return 0
        return next((BITS[suffix] for suffix in self.opcode.split(".") if suffix in BITS), 32) // 8


@dataclass(frozen=True)
class Bound:
    """One iteration of a warp's main loop.

    Args:
        instructions: on the shortest path through it
        moved_bytes: per thread, from and to global memory
        clocks: minimum clocks of a multiprocessor, by limiting resource
    """

    instructions: int
    moved_bytes: int
    clocks: dict[str, float]

    def instructions_per_element(self, element_bytes: int) -> float:
        """Return the instructions of a thread per element, if an element moves `element_bytes`."""
        return self.instructions * element_bytes / self.moved_bytes

    def share_of_memory_time(self, bytes_per_s: float) -> float:
        """Return the time to issue the loop over the time to move its bytes at a rate. Above 1 the kernel
        cannot reach the rate."""
        issue_s = max(self.clocks.values()) / (MULTIPROCESSORS * CLOCK)
        return issue_s / (32 * self.moved_bytes / bytes_per_s)


def bound_of(sass: str) -> Bound:
    """Return the bound of the kernel's main loop, the loop that moves the most bytes."""
    code, labels = _parse(sass)
    first, last = _main_loop(code, labels)
    path = _shortest_path(code, labels, first, last)
    moved_bytes = sum(instruction.moved_bytes for instruction in path)
    if moved_bytes != sum(instruction.moved_bytes for instruction in code[first : last + 1]):
        raise ValueError(
            "the shortest path through the main loop does not contain all of its loads and stores"
        )
    clocks = defaultdict[str, float](float, issue=len(path) / ISSUED)
    for instruction in path:
        for pipe, pattern, rate in PIPES:
            if re.match(pattern, instruction.opcode):
                clocks[pipe] += 1 / rate
                break
    return Bound(len(path), moved_bytes, dict(clocks))


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return all instructions in order, and the index of the instruction after each label."""
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
    """Return the indices of the first and last instruction of the loop that moves the most bytes."""
    loops = [
        (labels[jump.target], last)
        for last, jump in enumerate(code)
        if jump.target and labels[jump.target] < last
    ]
    return max(loops, key=lambda loop: sum(each.moved_bytes for each in code[loop[0] : loop[1] + 1]))


def _shortest_path(
    code: Sequence[Instruction], labels: dict[str, int], first: int, last: int
) -> list[Instruction]:
    """Return the shortest path from first to last. Other instructions, such as the slow path of a division,
    need not be executed."""
    came_from, queue = {first: first}, deque([first])
    while last not in came_from:
        index = queue.popleft()
        for successor in _successors(code[index], index, labels):
            if successor not in came_from:
                came_from[successor] = index
                queue.append(successor)
    indices = [last]
    while indices[-1] != first:
        indices.append(came_from[indices[-1]])
    return [code[index] for index in reversed(indices)]


def _successors(instruction: Instruction, index: int, labels: dict[str, int]) -> list[int]:
    """Return the indices of the instructions that a thread may execute next."""
    jumps = [labels[instruction.target]] if instruction.target else []
    leaves = instruction.target is not None or instruction.opcode.startswith(("EXIT", "RET"))
    ends = not instruction.guarded and leaves
    return jumps if ends else [*jumps, index + 1]
