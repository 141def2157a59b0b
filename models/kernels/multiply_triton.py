"""The Triton kernel of `multiply.py`."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements that a program multiplies at a time
PROGRAMS = 1024  # at most, so that a launch with factor 1 takes no time


def multiply_unless_one(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous x by a float32 scalar; if the scalar is 1, read nothing else."""
    assert x.is_contiguous()
    programs = min(PROGRAMS, triton.cdiv(x.numel(), BLOCK))
    _multiply[(programs,)](x, factor, x.numel(), programs, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False)


@triton.jit
def _multiply(x, factor, size, programs, BLOCK: tl.constexpr):
    scalar = tl.load(factor)
    if scalar != 1.0:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(begin, size, programs * BLOCK):
            offset = first + tl.arange(0, BLOCK)
            value = tl.load(x + offset, mask=offset < size, other=0.0).to(tl.float32)
            tl.store(x + offset, (value * scalar).to(x.dtype.element_ty), mask=offset < size)
