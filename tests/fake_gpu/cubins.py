"""Read a kernel's registers, spills and instructions from its cubin (machine code) with the tools in Triton's
wheel."""

import re
import subprocess
from functools import cache
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# A label, or an instruction: its predicate, opcode with suffixes, operands, and the label that it jumps to.
LINE = re.compile(r"(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(@\S+)?\s*([A-Z][\w.]*)([^;`]*)(?:`\((.*?)\))?.*;")
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # of a load or store, by suffix; 4 without


def read_usage(path: Path) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack frame: a Triton kernel has one only for
    spilled registers."""
    text = _run("cuobjdump", "-res-usage", str(path)).split("Function", 1)[1]
    usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


@cache
def main_loop(path: Path) -> tuple[int, int]:
    """Return the instructions of a thread in the loop that moves the most bytes, and these bytes (of global
    memory), on the shortest way through it: without the slow paths of divisions."""
    code, labels = list[tuple[str, str, str]](), dict[str, int]()
    for label, predicate, opcode, operands, target in LINE.findall(_run("nvdisasm", "-c", str(path))):
        if label:
            labels[label] = len(code)
        else:
            code.append((opcode, predicate + operands.strip(), target if opcode == "BRA" else ""))
    moved = [_moved_bytes(opcode) for opcode, *_ in code]
    loops = [(labels[target], i) for i, (*_, target) in enumerate(code) if target and labels[target] < i]
    first, last = max(loops, key=lambda loop: sum(moved[slice(*loop)]))
    to_end = {last: 1}  # instructions from each one on
    for i in range(last - 1, first - 1, -1):
        opcode, condition, target = code[i]
        falls = bool(condition) or not opcode.startswith(("BRA", "EXIT", "RET"))
        ways = [to_end.get(i + 1)] * falls + [to_end.get(labels.get(target, -1))]
        if reached := [way for way in ways if way is not None]:
            to_end[i] = 1 + min(reached)
    return to_end[first], sum(moved[first:last])


def _moved_bytes(opcode: str) -> int:
    name, *suffixes = opcode.split(".")
    return next((BYTES[x] for x in suffixes if x in BYTES), 4) if name in ("LDG", "STG") else 0


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
