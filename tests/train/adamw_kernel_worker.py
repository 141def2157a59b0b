"""Compares the Triton kernel of AdamW with its reference, bit for bit, and prints what differs. Run by test_adamw.py, in Triton's
interpreter where there is no GPU: TRITON_INTERPRET=1 must be set before triton is imported."""

import dataclasses
import itertools

import numpy
import torch
from torch import Tensor

from train.kernels import adamw, adamw_triton

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
DTYPES = (torch.float32, torch.bfloat16)
PROGRAM = adamw_triton.BLOCK * adamw_triton.BLOCKS
# Elements, place of the first, columns, gap: less than a block, more than one, more than a program, beyond 32 bits, one.
PARTS = [(5, 0, 5, 0), (3000, 7, 100, 0), (PROGRAM + 17, 2**32 - 1000, 1000, 24), (1, 3, 1, 0), (64 * 33, 500, 33, 31)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_slices(parameter: torch.dtype, moment: torch.dtype) -> list[adamw.Slice]:
    """The same values at every call; one gradient is infinite."""
    generator, slices = torch.Generator().manual_seed(0), []
    for i, (n, first, columns, gap) in enumerate(PARTS):
        values = [torch.randn(n, generator=generator) * scale for scale in (0.1, 1.0, 0.1, 0.1)]
        if i == 2:
            values[1][0] = torch.inf
        tensors = [values[0].to(parameter), values[1].to(parameter), values[2].to(moment), values[3].square().to(moment)]
        slices.append(adamw.Slice(*(tensor.to(DEVICE) for tensor in tensors), 2**32 - 3 + i, first, columns, gap))
    return slices


def make_step(skip: float) -> adamw.Step:
    counts = torch.arange(1, len(PARTS) + 1).double()
    on_device = [counts, 1e-3 / (1 - 0.9**counts), (1 - 0.999**counts).sqrt(), torch.tensor(3.7), torch.tensor(skip)]
    return adamw.Step(0.9, 0.999, 1e-8, 1 - 1e-4, *(value.float().to(DEVICE) for value in on_device))


def bits(one: adamw.Slice) -> dict[str, Tensor]:
    """Of each tensor, every NaN the same."""
    tensors = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return {name: value.masked_fill(value.isnan(), torch.nan).view(BITS[value.dtype])
            for name, value in tensors.items() if isinstance(value, Tensor)}  # fmt: skip


def main() -> None:
    numpy.seterr(all="ignore")  # the interpreter's arithmetic: infinity by infinity is no reason to stop
    for parameter, moment, skip in itertools.product(DTYPES, DTYPES, (0.0, 1.0)):
        before, expected, got = (make_slices(parameter, moment) for _ in range(3))
        adamw.update(expected, make_step(skip))
        adamw_triton.update(got, make_step(skip))
        for number, slices in enumerate(zip(before, expected, got, strict=True)):
            was, wanted, has = map(bits, slices)
            different = [name for name in wanted if not torch.equal(wanted[name], has[name])]
            moved = [name for name in wanted if not torch.equal(was[name], has[name])]
            print(parameter, moment, skip, number, "differ:", *different, "moved:", *moved)


if __name__ == "__main__":
    main()
