"""The Triton kernel for `adamw_kernel.py`: scales the gradient, updates and rounds in one pass, with one
launch for all slices."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.train.optim.adamw_kernel import AdamWStep, Slice

# Not tuned by measurement. A thread holds 4 elements at a time, 8 or 16 bytes of each tensor in one load
# (python -m tests.fake_gpu.kernel_table). The time to find a program's slice is negligible.
BLOCK = 512  # elements that a program holds at a time
BLOCKS = 32  # blocks that a program processes in sequence
COLUMNS = 10  # of the table: index of the first part, four pointers, elements, first, columns, gap, key
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def update(slices: Sequence[Slice], step: AdamWStep) -> None:
    """Do the same as `adamw_kernel.update`, bit for bit. All parameters and gradients must have one dtype,
    and all moments one dtype."""
    table, parts, multiple = _make_table(slices)
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
        MULTIPLE=multiple,
        # a fused multiply-add would round differently from the reference
        num_warps=4,
        enable_fp_fusion=False,
    )


def _make_table(slices: Sequence[Slice]) -> tuple[Tensor, int, int]:
    """Return a table on the device with a row per slice, copied without waiting; the number of parts; and 16
    if it divides all addresses and sizes, so that one load may read several elements, or 1."""
    rows, parts, multiple = [], 0, 16
    for shard in slices:
        assert shard.parameter.dtype == shard.gradient.dtype == slices[0].parameter.dtype
        assert shard.exp_avg.dtype == shard.exp_avg_sq.dtype == slices[0].exp_avg.dtype
        tensors = (shard.parameter, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
        assert all(tensor.is_contiguous() for tensor in tensors)
        pointers, size = [tensor.data_ptr() for tensor in tensors], shard.parameter.numel()
        rows.append([parts, *pointers, size, shard.first, shard.columns, shard.gap, shard.key])
        parts += triton.cdiv(size, BLOCK * BLOCKS)
        multiple = multiple if math.gcd(*pointers, size, 16) == 16 else 1
    table, device = torch.tensor(rows), slices[0].parameter.device
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    return table, parts, multiple


@triton.jit
def _random_bits(key, count, index):
    """Philox2x32 with 7 rounds, as in the reference."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32) ^ (count << 8)
    for _ in tl.static_range(7):
        product = low.to(tl.uint64) * 0xD256D193
        low, high = (product >> 32).to(tl.uint32) ^ key ^ high, product.to(tl.uint32)
        key += 0x9E3779B9
    # as one value: Triton would move two to another layout through shared memory
    return high.to(tl.uint64) << 32 | low


@triton.jit
def _rounded(value, bits, DTYPE: tl.constexpr):
    """Round float32 to the stored dtype."""
    if value.dtype != DTYPE:
        raised = value.to(tl.uint32, bitcast=True) + (bits & 0xFFFF).to(tl.uint32)
        value = (raised >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return value


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
    MULTIPLE: tl.constexpr,
):
    part = tl.program_id(0)
    numbers = tl.arange(0, SLICES)
    firsts = tl.load(table + numbers * COLUMNS, mask=numbers < slices, other=0x7FFFFFFF)
    number = tl.sum((firsts <= part).to(tl.int32), 0) - 1  # the last slice whose first part is at most `part`
    row = table + number * COLUMNS
    begin = (part - tl.load(row)) * (BLOCK * BLOCKS)
    parameters = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(PARAMETER)), MULTIPLE) + begin
    gradients = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(PARAMETER)), MULTIPLE) + begin
    exp_avgs = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(MOMENT)), MULTIPLE) + begin
    exp_avg_sqs = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(MOMENT)), MULTIPLE) + begin
    # a skipped step neither reads nor writes
    size = tl.where(tl.load(skip) == 0, tl.minimum(tl.load(row + 5) - begin, BLOCK * BLOCKS), 0)
    size = tl.multiple_of(size.to(tl.int32), MULTIPLE)
    columns = tl.load(row + 7)
    gap = tl.load(row + 8)
    first_row = begin // columns
    first_column = (begin - first_row * columns).to(tl.int32)
    first = tl.load(row + 6) + begin + first_row * gap
    key = tl.load(row + 9).to(tl.uint32)
    count = tl.load(counts + number).to(tl.uint32)
    root = tl.load(roots + number)
    eps = root * eps
    rate = root * tl.load(rates + number)
    scale = tl.math.div_rn(1.0, tl.load(divisor))
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < size
        gradient = tl.load(gradients + offset, mask=inside, other=0.0).to(tl.float32) * scale
        parameter = tl.load(parameters + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avgs + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sqs + offset, mask=inside, other=0.0).to(tl.float32)
        exp_avg = exp_avg * beta1 + gradient * rest1
        exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * rest2
        denominator = tl.math.sqrt_rn(exp_avg_sq) + eps
        parameter = parameter * decay - tl.math.div_rn(exp_avg, denominator) * rate
        index = first + offset
        if gap != 0:  # only if the shard has a part of the columns: full rows need no division
            index += (first_column + offset) // columns.to(tl.int32) * gap
        bits = tl.where(parameter == parameter, _random_bits(key, count, index), 0)  # 0 for a NaN
        tl.store(parameters + offset, _rounded(parameter, bits, PARAMETER), mask=inside)
        tl.store(exp_avgs + offset, _rounded(exp_avg, bits >> 16, MOMENT), mask=inside)
        tl.store(exp_avg_sqs + offset, _rounded(exp_avg_sq, bits >> 32, MOMENT), mask=inside)
