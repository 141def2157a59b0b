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

from meshwright.tools.cli import format_table
from meshwright.train.optim.adamw_kernel import AdamWStep, Slice
from tests.fake_gpu.cubins import read_cubin
from tests.fake_gpu.triton_driver import Launch, load_copy, offline_triton

ROOT = Path(__file__).parents[2]
ADAMW = ROOT / "train" / "optim" / "adamw_triton.py"
LOSS = ROOT / "models" / "kernels" / "cross_entropy_triton.py"
DTYPES = (torch.float32, torch.bfloat16)
PAIRS = [(parameter, moment) for parameter in DTYPES for moment in DTYPES]
VOCABULARY = 128_256  # as in Llama 3
SLICES = 9
DESCRIPTION = (
    "Compile the project's Triton kernels for sm_90 (H100) and print for each: registers and spilled bytes "
    "of a thread, and resident warps of a multiprocessor (64 at most). They depend on the version of Triton, "
    "which is printed too. Nothing is run, and no GPU is needed."
)


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for some dtypes."""

    name: str
    dtypes: str
    launch: Launch


def compile_kernels(cache: Path) -> Iterator[Compiled]:
    """Compile all kernels of the project for all dtypes."""
    adamw, loss = load_copy(ADAMW), load_copy(LOSS)
    for parameter, moment in PAIRS:
        launch = compile_adamw(cache, adamw, parameter, moment)
        yield Compiled("AdamW", f"{short(parameter)}, moments {short(moment)}", launch)
    for dtype in DTYPES:
        read, write = compile_loss(cache, loss, dtype)
        yield Compiled("cross entropy, read", short(dtype), read)
        yield Compiled("cross entropy, write", short(dtype), write)


def compile_adamw(cache: Path, kernels: ModuleType, parameter: torch.dtype, moment: torch.dtype) -> Launch:
    """Compile the AdamW kernel of `kernels`: adamw_triton, or a changed copy."""
    with offline_triton(cache) as launches:
        piece = Slice(
            *(torch.zeros(16, dtype=dtype) for dtype in (parameter, parameter, moment, moment)), 0, 0, 16, 0
        )
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
    cubin = read_cubin(compiled.launch.cubin)
    resources = (cubin.registers, cubin.spilled_bytes, cubin.resident_warps)
    return [compiled.name, compiled.dtypes, *map(str, resources)]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m tests.fake_gpu.kernel_table", description=DESCRIPTION
    ).parse_args()
    head = ["kernel", "dtypes", "registers", "spilled bytes", "warps"]
    with tempfile.TemporaryDirectory() as cache:
        rows = [to_row(compiled) for compiled in compile_kernels(Path(cache))]
    print(f"Triton {triton.__version__}, sm_90; nothing was run\n{format_table(head, rows)}")


if __name__ == "__main__":
    main()
