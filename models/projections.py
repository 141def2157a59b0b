"""Linears whose weight others may multiply with, and several of them as one product.

Shapes: B batch, T tokens, D dim, O the outputs of all the linears together.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """x[B, T, D] -> x · weight[outputs, D], without a bias."""

    def matrix(self) -> Tensor:
        """The weight as a plain tensor: a sharding puts a rank's own share in its place."""
        return self.weight


def project_as_one(x: Tensor, projections: tuple[Projection, ...]) -> tuple[Tensor, ...]:
    """What each of `projections` makes of x[B, T, D], by one product.

    The results are parts of one tensor: whoever keeps one of them for the backward keeps all of them.
    """
    weights = [projection.matrix() for projection in projections]
    return _OneProduct.apply(x, *weights).split([len(weight) for weight in weights], dim=-1)


@torch.library.custom_op("meshwright::join_weights", mutates_args=())
def _join_weights(weights: list[Tensor], grad: Tensor) -> Tensor:
    """The weights one below the other, once there is a `grad`: else the compiler would keep the forward's
    joined copy instead."""
    return torch.cat(weights)


@_join_weights.register_fake
def _(weights: list[Tensor], grad: Tensor) -> Tensor:
    return torch.cat(weights)


class _OneProduct(torch.autograd.Function):
    """x[B, T, D] · the weights one below the other[O, D] -> [B, T, O].

    They are joined for the product alone and once more for the backward's. Autograd would keep the joined
    copy of every block, where FSDP frees the weights themselves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        of_x, *of_weights = ctx.needs_input_grad
        dx = grad @ _join_weights(weights, grad) if of_x else None
        if not any(of_weights):
            return dx, *[None] * len(weights)
        joined = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        parts = joined.split([len(weight) for weight in weights])
        return dx, *(part if wanted else None for part, wanted in zip(parts, of_weights, strict=True))
