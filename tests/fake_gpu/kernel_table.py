"""Compile the project's Triton kernels for an H100 without one and print their resource usage: `python -m
tests.fake_gpu.kernel_table -h`."""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import triton

from meshwright.parallel.planner.hardware import Hardware, load_hardware
from meshwright.tools.cli import format_table
from meshwright.train.optim.adamw_kernel import AdamWStep, Slice
from tests.fake_gpu.cubins import main_loop, read_usage
from tests.fake_gpu.triton_driver import Launch, load_copy, offline_triton

ROOT = Path(__file__).parents[2]
ADAMW = ROOT / "train" / "optim" / "adamw_triton.py"
LOSS = ROOT / "models" / "kernels" / "cross_entropy_triton.py"
DTYPES = (torch.float32, torch.bfloat16)
PAIRS = [(parameter, moment) for parameter in DTYPES for moment in DTYPES]
VOCABULARY = 128_256  # as in Llama 3
SLICES = 9
HARDWARE = {name: load_hardware()[name] for name in ("h100-sxm", "h200")}
DESCRIPTION = (
    "Compile the project's Triton kernels for sm_90 (H100, H200) and print for each: registers and spilled "
    "bytes of a thread; instructions of its main loop per element, without the slow paths of divisions; and "
    "two lower bounds of its time: to issue them, and to move the element's bytes at the planner's rate. "
    "Nothing is run, and no GPU is needed. All figures depend on the version of Triton, which is printed too."
)


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for some dtypes, and the bytes of global memory that it moves per element."""

    name: str
    dtypes: str
    element_bytes: int
    launch: Launch

    def instructions(self) -> float:
        """Return the instructions of a thread per element."""
        instructions, moved_bytes = main_loop(self.launch.cubin)
        return instructions * self.element_bytes / moved_bytes

    def times_ps(self, hardware: Hardware) -> tuple[float, float]:
        """Return the picoseconds to issue the instructions of an element, and to move its bytes.

        A multiprocessor issues an instruction for as many threads a clock (4 warps) as it has float32 lanes,
        and the peak counts two operations of each.
        """
        issued = hardware.peak_tflops["float32"] / 2
        moved = hardware.memory_gb_s * hardware.optimizer_efficiency / 1000
        return self.instructions() / issued, self.element_bytes / moved


def compile_kernels(cache: Path) -> Iterator[Compiled]:
    """Compile all kernels of the project for all dtypes."""
    adamw, loss = load_copy(ADAMW), load_copy(LOSS)
    for parameter, moment in PAIRS:
        launch = compile_adamw(cache, adamw, parameter, moment)
        moved_bytes = 3 * parameter.itemsize + 4 * moment.itemsize
        yield Compiled("AdamW", f"{short(parameter)}, moments {short(moment)}", moved_bytes, launch)
    for dtype in DTYPES:
        read, write = compile_loss(cache, loss, dtype)
        yield Compiled("cross entropy, read", short(dtype), dtype.itemsize, read)
        yield Compiled("cross entropy, write", short(dtype), 2 * dtype.itemsize, write)


def compile_adamw(
    cache: Path,
    kernels: ModuleType,
    parameter: torch.dtype,
    moment: torch.dtype,
    size: int = 16,
    first: int = 0,
) -> Launch:
    """Compile the AdamW kernel of `kernels`, adamw_triton or a changed copy, for tensors of a size that begin
    at an element of aligned memory."""
    with offline_triton(cache) as launches:
        dtypes = (parameter, parameter, moment, moment)
        piece = Slice(*(torch.zeros(first + size, dtype=dtype)[first:] for dtype in dtypes), 0, 0, size, 0)
        vector, scalar = torch.ones(SLICES), torch.ones(())
        step = AdamWStep(0.9, 0.95, 1e-8, 1.0, vector, vector, vector, scalar, scalar)
        kernels.update([piece] * SLICES, step)
    return launches[0]


def compile_loss(cache: Path, kernels: ModuleType, dtype: torch.dtype) -> list[Launch]:
    """Compile the two kernels of the loss, for rows of the full vocabulary."""
    with offline_triton(cache) as launches:
        logits, targets = torch.zeros(2, VOCABULARY, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        rows = kernels.read_rows(logits, targets, 0)
        kernels.write_losses(logits, targets, 0, rows, 0.0, torch.ones(()), torch.empty(2), True)
    return launches


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_row(compiled: Compiled) -> list[str]:
    figures = [*read_usage(compiled.launch.cubin), round(compiled.instructions())]
    times = [f"{time:.2f}" for hardware in HARDWARE.values() for time in compiled.times_ps(hardware)]
    return [compiled.name, compiled.dtypes, *map(str, figures), *times]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m tests.fake_gpu.kernel_table", description=DESCRIPTION
    ).parse_args()
    head = ["kernel", "dtypes", "registers", "spilled bytes", "instructions"]
    head += [f"{name}: {part}, ps" for name in HARDWARE for part in ("issue", "memory")]
    with tempfile.TemporaryDirectory() as cache:
        rows = [to_row(compiled) for compiled in compile_kernels(Path(cache))]
    print(f"Triton {triton.__version__}, sm_90; nothing was run\n{format_table(head, rows)}")


if __name__ == "__main__":
    main()
