"""A stand-in for torchao's float8 product, to trace a module's memory on a machine without torchao.

As torchao's matmul_with_hp_or_float8_args it saves both operands in their own dtype and casts them to float8
in the forward and again in the backward, so the compiler's partitioner recomputes an operand that it can
compute from other saved tensors. Only for tracing: it multiplies with one scale per tensor in every recipe.
"""

import fnmatch
from collections.abc import Collection
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

PRODUCT = (
    "aten._scaled_mm"  # what selective activation checkpointing sees; of torchao's product it sees aten.mm
)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class _Float8Product(torch.autograd.Function):
    """x[..., K] · weight[N, K] -> [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return _product(rows, weight).unflatten(0, x.shape[:-1]), _product(rows.t(), x.flatten(0, -2))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left[M, K] · right[K, N]: _scaled_mm wants the first in row-major, the second in column-major order."""
    (a, scale_a), (b, scale_b) = _cast(left), _cast(right.t())
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=left.dtype)


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = LARGEST / x.abs().amax().float()
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(
        torch.float8_e4m3fn
    ).contiguous(), scale.reciprocal()


def multiply_in_float8(block: nn.Module, patterns: Collection[str]) -> None:
    """Let the linears of a block that match a pattern of fqns multiply by the stand-in, in place."""
    for name, module in block.named_modules():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            module.product = _Float8Product.apply  # of parallel.tensor_parallel's forwards
            if not hasattr(module, "tensor_axis"):
                module.forward = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    return _Float8Product.apply(x, module.weight)
