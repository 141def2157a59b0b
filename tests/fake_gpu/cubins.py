"""Read a kernel's resource usage from its cubin (machine code) with the tools in Triton's wheel."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Per multiprocessor of an H100. CUDA C++ Programming Guide, technical specifications of compute capability
# 9.0.
REGISTERS, WARPS, BLOCKS, SHARED_BYTES = 65536, 64, 32, 233472
RESERVED_BYTES = 1024  # shared memory that the system reserves for every block


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Args:
        registers: per thread
        spilled_bytes: the stack frame of each thread; a Triton kernel has one only for spilled registers
        warps: per block
        shared_bytes: shared memory per block
    """

    name: str
    registers: int
    spilled_bytes: int
    warps: int
    shared_bytes: int

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor of an H100 runs at the same time, of 64 at most."""
        allocated = -(-self.registers // 8) * 8 * 32  # a warp's registers are allocated in units of 256
        # the four schedulers have equal numbers of warps
        by_registers = REGISTERS // allocated // 4 * 4
        by_shared = SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES)
        return self.warps * min(by_registers // self.warps, WARPS // self.warps, BLOCKS, by_shared)


def read_cubin(path: Path) -> Cubin:
    """Read the kernel in a file of Triton's cache, NAME.cubin with NAME.json next to it."""
    usage = dict(
        re.findall(r"(\w+):(\d+)", _run("cuobjdump", "-res-usage", str(path)).split("Function", 1)[1])
    )
    metadata = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return Cubin(
        metadata["name"],
        int(usage["REG"]),
        int(usage["STACK"]) + int(usage["LOCAL"]),
        metadata["num_warps"],
        metadata["shared"],
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
