"""AdamW whose parameters and moments may be bfloat16, rounded stochastically: plain torch, the reference of
`adamw_triton.py`.

A value is rounded up or down with the probability that keeps its mean. Nearest rounding would lose every
change of less than half a step, 1/256 of the value or so: with beta2 0.999 the second moment would never
fall. The random bits are a hash of the parameter's key (of run.seed and its name), the step count and the
element's place in the whole parameter, so they are the same on any mesh and after a resume.

Shapes: n elements of this rank's part of a parameter, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# lowbias32 (https://nullprogram.com/blog/2018/07/31/), the second factor less 2**32: so no product leaves
# int64.
FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
STREAM_STEP = 0x9E3779B9  # 2**32 / golden ratio: keeps apart the bits of parameter (0) and moments (1, 2)
PART = 2**18  # elements at once, so that what is held beside them is some 20 MB at the most


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter, all of it flat: float32 or bfloat16 [n].

    Args:
        key: decides its random bits, 32 bits
        first: place of its first element in the whole parameter
        columns: elements of one of its rows
        gap: elements of the whole parameter from the end of a row to the beginning of the next
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    key: int
    first: int
    columns: int
    gap: int


@dataclass(frozen=True)
class AdamWStep:
    """What a step of a group needs besides.

    Args:
        beta1, beta2, eps: of AdamW
        decay: what parameters are multiplied by, 1 - lr x weight decay
        counts, rates, roots: of each slice, float32 on the device: the step count, from 1; lr / (1 - beta1 **
            count); and the square root of 1 - beta2 ** count
        divisor: what gradients are divided by, float32 on the device
        skip: 1 where nothing may change, else 0, float32 on the device
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    counts: Tensor
    rates: Tensor
    roots: Tensor
    divisor: Tensor
    skip: Tensor


def update(slices: Sequence[Slice], step: AdamWStep) -> None:
    """One step of AdamW of every slice, in place, all of it in float32 until it is stored."""
    for number, whole in enumerate(slices):
        key = mix((whole.key + step.counts[number].to(torch.int64)) & MASK)
        for begin in range(0, whole.parameter.numel(), PART):
            _update_part(whole, slice(begin, begin + PART), step, number, key)


def _update_part(whole: Slice, part: slice, step: AdamWStep, number: int, key: Tensor) -> None:
    stored = [tensor[part] for tensor in (whole.parameter, whole.exp_avg, whole.exp_avg_sq)]
    parameter, exp_avg, exp_avg_sq = (tensor.float() for tensor in stored)
    gradient = whole.gradient[part].float() / step.divisor
    exp_avg = exp_avg * step.beta1 + gradient * (1 - step.beta1)
    exp_avg_sq = exp_avg_sq * step.beta2 + gradient * gradient * (1 - step.beta2)
    # a CPU's square root of float32 (MKL's) is not always the nearest
    deviation = exp_avg_sq.double().sqrt().float()
    change = exp_avg / (deviation / step.roots[number] + step.eps) * step.rates[number]
    parameter = parameter * step.decay - change
    place = torch.arange(part.start, part.start + len(parameter), device=parameter.device)
    bits = element_bits(key, whole.first + place + place // whole.columns * whole.gap)
    for stream, (old, new) in enumerate(zip(stored, (parameter, exp_avg, exp_avg_sq), strict=True)):
        if old.dtype == torch.bfloat16:
            new = round_stochastically(new, stream_bits(bits, stream))
        old.copy_(torch.where(step.skip != 0, old, new))


def mix(value: Tensor) -> Tensor:
    """lowbias32: a hash of 32 bits, in int64, to 32 bits."""
    value = ((value ^ (value >> 16)) * FACTORS[0]) & MASK
    value = ((value ^ (value >> 15)) * FACTORS[1]) & MASK
    return value ^ (value >> 16)


def element_bits(key: Tensor, place: Tensor) -> Tensor:
    """32 bits of each element by its place in the whole parameter, int64[n]: all streams' bits come from
    them."""
    return mix((place & MASK) ^ key) + (place >> 32)


def stream_bits(bits: Tensor, stream: int) -> Tensor:
    """32 random bits of each element for one of the tensors that are rounded."""
    return mix((bits + stream * STREAM_STEP) & MASK)


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16, one of the two neighbours: up in magnitude if the lower 16 of the random bits and
    the 16 bits that are cut off add up to more than 16. What is bfloat16 already, or not finite, stays."""
    raised = value.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (raised & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)
