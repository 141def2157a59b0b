"""Triton kernels of `cross_entropy.py`: one program per row, which reads the row block by block; and of the
product of its gradients with that of the loss.

Shapes: n tokens, v logits per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.models.loss import IGNORE_INDEX

BLOCK = 4096  # logits, or elements to multiply, that a program loads at a time
PROGRAMS = 1024  # of a multiplication, at most, so that a launch with factor 1 takes no time
# of the kernels of rows. Fused multiply-add: Triton's default up to 3.9, which warns that 3.10 changes it
LAUNCH = {"BLOCK": BLOCK, "num_warps": 16, "enable_fp_fusion": True}


def read_rows(logits_nv: Tensor, targets_n: Tensor, first_id: int) -> Tensor:
    """Compute `cross_entropy.plain_rows` by online log-sum-exp (arXiv 1805.02867), one read per logit."""
    n, v = logits_nv.shape
    rows_3n = torch.empty(3, n, device=targets_n.device)
    _read[(n,)](logits_nv, logits_nv.stride(0), targets_n, first_id, rows_3n, n, v, **LAUNCH)
    return rows_3n


def write_losses(
    logits_nv: Tensor,
    targets_n: Tensor,
    first_id: int,
    rows_3n: Tensor,
    z_loss: float,
    divisor: Tensor,
    losses_n: Tensor,
    with_gradient: bool,
) -> None:
    """Write losses, and overwrite the logits with their gradient, as `cross_entropy.plain_losses` does."""
    assert rows_3n.is_contiguous()
    assert losses_n.is_contiguous()
    n, v = logits_nv.shape
    rows = logits_nv, logits_nv.stride(0), targets_n, first_id, rows_3n
    constants = {"IGNORED": IGNORE_INDEX, "GRADIENT": with_gradient, **LAUNCH}
    _write[(n,)](*rows, divisor, losses_n, n, z_loss, v, **constants)


@triton.jit
def _read(logits, row_stride, targets, first_id, rows, n, v: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    highest = -float("inf")
    total = 0.0
    for first in range(0, v, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < v, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), 0)
        highest = higher
    target = tl.load(targets + row) - first_id
    is_local = (target >= 0) & (target < v)
    tl.store(rows + row, highest)
    tl.store(rows + n + row, total)
    tl.store(rows + 2 * n + row, tl.load(logits + target, mask=is_local, other=0.0).to(tl.float32))


@triton.jit
def _write(
    logits,
    row_stride,
    targets,
    first_id,
    rows,
    divisor,
    losses,
    n,
    z_loss,
    v: tl.constexpr,
    IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    log_sum = tl.load(rows + row) + tl.log(tl.load(rows + n + row))
    loss = log_sum - tl.load(rows + 2 * n + row) + z_loss * log_sum * log_sum
    counted = tl.where(target == IGNORED, 0.0, 1.0)
    tl.store(losses + row, counted * loss)
    if GRADIENT:
        factor = 1.0 + 2.0 * z_loss * log_sum
        counted = tl.math.div_rn(counted, tl.load(divisor))
        target -= first_id
        for first in range(0, v, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            values = tl.load(logits + columns, mask=columns < v, other=0.0).to(tl.float32)
            gradient = tl.exp(values - log_sum) * factor
            gradient = counted * tl.where(columns == target, gradient - 1.0, gradient)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < v)


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
