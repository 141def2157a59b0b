"""AdamW with stochastic rounding of bfloat16 parameters and moments, in plain torch: the reference of
`adamw_triton.py`.

A value is rounded up or down with the probabilities that preserve its mean. Rounding to nearest would lose
every change smaller than about 1/256 of the value: with beta2 0.999 the second moment would never decrease.
The random bits are Philox's for the parameter's key (from run.seed and its name), the step count and the
element's index in the full parameter, so they are identical on every mesh and after a resume.

Shapes: n elements of this rank's shard of a parameter, in row-major order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# Philox2x32 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011)
ROUNDS, MULTIPLIER, KEY_STEP = 7, 0xD256D193, 0x9E3779B9
PART = 2**18  # elements processed at a time: temporaries take at most about 20 MB


@dataclass(frozen=True)
class Slice:
    """This rank's shard of one parameter, with gradient and moments: flat tensors, float32 or bfloat16 [n].

    Args:
        key: 32-bit key of the random bits
        first: index of the shard's first element in the full parameter
        columns: elements in a row of the shard
        gap: elements of the full parameter between the end of a shard row and the start of the next
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
    """The scalars of one step of a parameter group.

    Args:
        beta1, beta2, eps: as in AdamW
        decay: factor of the parameters, 1 - lr x weight decay
        counts, rates, roots: one value per slice, float32 on the device: the step count, from 1; lr / (1 -
            beta1 ** count); and the square root of 1 - beta2 ** count
        divisor: divisor of the gradients, float32 on the device
        skip: 1 if nothing may change, else 0, float32 on the device
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
    """Do one AdamW step of every slice in place, computed in float32 and rounded when stored."""
    for number, shard in enumerate(slices):
        for begin in range(0, shard.parameter.numel(), PART):
            _update_part(shard, slice(begin, begin + PART), step, number)


def _update_part(shard: Slice, part: slice, step: AdamWStep, number: int) -> None:
    stored = [tensor[part] for tensor in (shard.parameter, shard.exp_avg, shard.exp_avg_sq)]
    parameter, exp_avg, exp_avg_sq = (tensor.float() for tensor in stored)
    gradient = shard.gradient[part].float() * (1 / step.divisor)
    exp_avg = exp_avg * step.beta1 + gradient * (1 - step.beta1)
    exp_avg_sq = exp_avg_sq * step.beta2 + gradient * gradient * (1 - step.beta2)
    # in double: the float32 square root of a CPU (MKL) is not always correctly rounded
    deviation = exp_avg_sq.double().sqrt().float()
    root = step.roots[number]  # of the bias correction; in eps and rate it costs no operation of an element
    change = exp_avg / (deviation + root * step.eps) * (root * step.rates[number])
    parameter = parameter * step.decay - change
    index = torch.arange(part.start, part.start + len(parameter), device=parameter.device)
    index = shard.first + index + index // shard.columns * shard.gap
    bits = random_bits(shard.key, step.counts[number].to(torch.int64), index)
    # if a moment is NaN, the parameter is too; bits could turn a NaN into another value
    bits = torch.where(parameter.isnan(), 0, bits)
    for stream, (old, new) in enumerate(zip(stored, (parameter, exp_avg, exp_avg_sq), strict=True)):
        if old.dtype == torch.bfloat16:
            new = round_stochastically(new, bits >> 16 * stream)
        old.copy_(torch.where(step.skip != 0, old, new))


def random_bits(key: int, count: Tensor, index: Tensor) -> Tensor:
    """64 random bits of each element, int64 [n], from its index in the full parameter, int64 [n], and the
    step count, int64 below 2**24."""
    low, high = index & MASK, (index >> 32) ^ (count << 8)
    for _ in range(ROUNDS):
        product = low * MULTIPLIER  # of 64 bits, although int64 wraps around
        low, high = ((product >> 32) & MASK) ^ key ^ high, product & MASK
        key = (key + KEY_STEP) & MASK
    return high << 32 | low


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two neighboring bfloat16 values: up in magnitude if the sum of the lower 16
    random bits and the 16 discarded bits overflows 16 bits. Exact bfloat16 values and infinities do not
    change."""
    raised = value.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (raised & -0x10000).view(torch.float32).to(torch.bfloat16)
