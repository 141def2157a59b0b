"""Triton kernels of `cross_entropy.py`: one program per row, which reads the row block by block.

Shapes: n tokens, v logits per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program loads at a time
WARPS = 16
FUSE = True  # fused multiply-add: Triton's default up to 3.9, which warns that 3.10 changes it


def read_rows(logits_nv: Tensor, ids_n: Tensor) -> Tensor:
    """Compute `cross_entropy.plain_rows` by online log-sum-exp (arXiv 1805.02867), one read per logit."""
    rows_3n = torch.empty(3, len(ids_n), device=ids_n.device)
    _read[(len(ids_n),)](
        logits_nv,
        logits_nv.stride(0),
        ids_n,
        rows_3n,
        len(ids_n),
        logits_nv.shape[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=FUSE,
    )
    return rows_3n


def write_gradient(
    logits_nv: Tensor, ids_n: Tensor, log_sum_n: Tensor, scale_n: Tensor, weight_n: Tensor
) -> None:
    """Overwrite the logits with their gradient on the GPU, as `cross_entropy.plain_gradient` does."""
    _write[(len(ids_n),)](
        logits_nv,
        logits_nv.stride(0),
        ids_n,
        log_sum_n,
        scale_n,
        weight_n,
        logits_nv.shape[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=FUSE,
    )


@triton.jit
def _read(logits, row_stride, ids, rows, n, v: tl.constexpr, BLOCK: tl.constexpr):
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
    target = tl.load(ids + row)
    is_local = (target >= 0) & (target < v)
    tl.store(rows + row, highest)
    tl.store(rows + n + row, total)
    tl.store(rows + 2 * n + row, tl.load(logits + target, mask=is_local, other=0.0).to(tl.float32))


@triton.jit
def _write(logits, row_stride, ids, log_sum, scale, weight, v: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(ids + row)
    shift = tl.load(log_sum + row)
    factor = tl.load(scale + row)
    counted = tl.load(weight + row)
    for first in range(0, v, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < v, other=0.0).to(tl.float32)
        gradient = tl.exp(values - shift) * factor
        gradient = counted * tl.where(columns == target, gradient - 1.0, gradient)
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < v)
