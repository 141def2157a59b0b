"""The Triton kernel for `adamw_kernel.py`: divides by the clip factor, updates and rounds in one pass, with
one launch for all slices."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.train.optim.adamw_kernel import AdamWStep, Slice

# Not tuned by measurement. A thread holds 4 elements at a time, with 16 loads in flight. With 8 elements it
# needs up to 168 registers, so that 12 of an H100's 64 warps fit; with 16 up to 255, and it spills (python -m
# tests.fake_gpu.kernel_table). The time to find a program's slice is negligible.
BLOCK = 512  # elements that a program holds at a time
BLOCKS = 32  # blocks that a program processes in sequence
COLUMNS = 10  # of the table: index of the first part, four pointers, elements, first, columns, gap, key
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def update(slices: Sequence[Slice], step: AdamWStep) -> None:
    """Do the same as `adamw_kernel.update`, bit for bit. All parameters and gradients must have one dtype,
    and all moments one dtype."""
    table, parts = _make_table(slices)
    first = slices[0]
    _update[(parts,)](
        table,
        step.counts,
        step.rates,
        step.roots,
        step.divisor,
        step.skip,
        step.beta1,
        1 - step.beta1,
        step.beta2,
        1 - step.beta2,
        step.eps,
        step.decay,
        len(slices),
        PARAMETER=DTYPES[first.parameter.dtype],
        MOMENT=DTYPES[first.exp_avg.dtype],
        SLICES=triton.next_power_of_2(len(slices)),
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
        # a fused multiply-add would round differently from the reference
        num_warps=4,
        enable_fp_fusion=False,
    )


def _make_table(slices: Sequence[Slice]) -> tuple[Tensor, int]:
    """Return a table on the device with a row per slice, copied without waiting, and the number of parts."""
    rows, parts = [], 0
    for shard in slices:
        assert shard.parameter.dtype == shard.gradient.dtype == slices[0].parameter.dtype
        assert shard.exp_avg.dtype == shard.exp_avg_sq.dtype == slices[0].exp_avg.dtype
        tensors = (shard.parameter, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
        assert all(tensor.is_contiguous() for tensor in tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        rows.append(
            [parts, *pointers, shard.parameter.numel(), shard.first, shard.columns, shard.gap, shard.key]
        )
        parts += triton.cdiv(shard.parameter.numel(), BLOCK * BLOCKS)
    table, device = torch.tensor(rows), slices[0].parameter.device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table, parts


@triton.jit
def _mix(value):
    """lowbias32 in uint32."""
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _rounded(value, bits, STREAM: tl.constexpr, DTYPE: tl.constexpr):
    """Round float32 to the stored dtype."""
    if value.dtype != DTYPE:
        raw = value.to(tl.uint32, bitcast=True)
        raised = (raw + (_mix(bits + STREAM) & 0xFFFF)) & 0xFFFF0000
        kept = (raw & 0x7F800000) == 0x7F800000  # not finite
        value = tl.where(kept, raw, raised).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def _update(
    table,
    counts,
    rates,
    roots,
    divisor,
    skip,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    slices,
    PARAMETER: tl.constexpr,
    MOMENT: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    part = tl.program_id(0)
    numbers = tl.arange(0, SLICES)
    firsts = tl.load(table + numbers * COLUMNS, mask=numbers < slices, other=0x7FFFFFFF)
    number = tl.sum((firsts <= part).to(tl.int32), 0) - 1  # the last slice whose first part is at most `part`
    row = table + number * COLUMNS
    parameters = tl.load(row + 1).to(tl.pointer_type(PARAMETER))
    gradients = tl.load(row + 2).to(tl.pointer_type(PARAMETER))
    exp_avgs = tl.load(row + 3).to(tl.pointer_type(MOMENT))
    exp_avg_sqs = tl.load(row + 4).to(tl.pointer_type(MOMENT))
    # a skipped step neither reads nor writes
    size = tl.where(tl.load(skip) == 0, tl.load(row + 5), 0)
    first = tl.load(row + 6)
    columns = tl.load(row + 7)
    gap = tl.load(row + 8)
    key = _mix((tl.load(row + 9) + tl.load(counts + number).to(tl.int64)).to(tl.uint32))
    rate = tl.load(rates + number)
    root = tl.load(roots + number)
    scale = tl.load(divisor)
    begin = (part - tl.load(row)) * (BLOCK * BLOCKS)
    for block in range(BLOCKS):
        start = begin + block * BLOCK
        offset = start + tl.arange(0, BLOCK)
        inside = offset < size
        gradient = tl.math.div_rn(tl.load(gradients + offset, mask=inside, other=0.0).to(tl.float32), scale)
        parameter = tl.load(parameters + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avgs + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sqs + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg = exp_avg * beta1 + gradient * rest1
        exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * rest2
        denominator = tl.math.div_rn(tl.math.sqrt_rn(exp_avg_sq), root) + eps
        parameter = parameter * decay - tl.math.div_rn(exp_avg, denominator) * rate
        index = first + offset
        if gap != 0:  # only if the shard has a part of the columns: full rows need no division
            # a 32-bit division for the row within this block: a 64-bit one takes longer than all the rest
            first_row = start // columns
            rows = first_row + (
                (start - first_row * columns).to(tl.int32) + tl.arange(0, BLOCK)
            ) // columns.to(tl.int32)
            index += rows * gap
        bits = _mix(index.to(tl.uint32) ^ key) + (index >> 32).to(tl.uint32)
        tl.store(parameters + offset, _rounded(parameter, bits, 0, PARAMETER), mask=inside)
        tl.store(exp_avgs + offset, _rounded(exp_avg, bits, 0x9E3779B9, MOMENT), mask=inside)
        # 2 * 0x9E3779B9 in 32 bits
        tl.store(exp_avg_sqs + offset, _rounded(exp_avg_sq, bits, 0x3C6EF372, MOMENT), mask=inside)
