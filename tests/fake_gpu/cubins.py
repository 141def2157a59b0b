"""Reads what a kernel needs of a GPU from its cubin (machine code), by the tools that Triton's wheel
brings."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Of one multiprocessor of an H100. CUDA C++ Programming Guide, technical specifications of compute capability
# 9.0.
REGISTERS, WARPS, BLOCKS, SHARED_BYTES = 65536, 64, 32, 233472
RESERVED_BYTES = 1024  # of shared memory, that every block takes besides its own


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Args:
        registers: of each thread
        spilled_bytes: of each thread's stack frame. A Triton kernel has one only for values that found no
            register
        warps: of each block
        shared_bytes: of each block's shared memory
    """

    name: str
    registers: int
    spilled_bytes: int
    warps: int
    shared_bytes: int

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor of an H100, which has room for 64, runs at once."""
        allocated = -(-self.registers // 8) * 8 * 32  # a warp gets registers by the 256
        # and each of the four schedulers as many warps as the others
        by_registers = REGISTERS // allocated // 4 * 4
        by_shared = SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES)
        return self.warps * min(by_registers // self.warps, WARPS // self.warps, BLOCKS, by_shared)


def read_cubin(path: Path) -> Cubin:
    """The kernel in a file of Triton's cache, NAME.cubin beside NAME.json."""
    used = dict(
        re.findall(r"(\w+):(\d+)", _run("cuobjdump", "-res-usage", str(path)).split("Function", 1)[1])
    )
    made = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return Cubin(
        made["name"],
        int(used["REG"]),
        int(used["STACK"]) + int(used["LOCAL"]),
        made["num_warps"],
        made["shared"],
    )


def disassemble(path: Path) -> str:
    """The kernel's machine code as text (SASS)."""
    return _run("nvdisasm", "-c", str(path))


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
