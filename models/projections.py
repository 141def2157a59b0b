"""Linear layers whose weight other modules can read, and several of them fused into one matrix product.

Shapes: B batch, T tokens, D dim, O the outputs of all fused linears.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """x[B, T, D] -> x · weight[outputs, D], without a bias."""

    def matrix(self) -> Tensor:
        """Return the weight as a plain tensor; tensor parallelism overrides this with the rank's shard."""
        return self.weight


def project_as_one(x: Tensor, projections: tuple[Projection, ...]) -> tuple[Tensor, ...]:
    """Return the output of each of `projections` for x[B, T, D], computed by one matrix product.

    The outputs are views of one tensor: saving one of them for the backward keeps all of them in memory.
    """
    weights = [projection.matrix() for projection in projections]
    # torch 2.13 cannot compile a Function that needs no gradient, as in frozen blocks
    trained = any(tensor.requires_grad for tensor in (x, *weights))
    product = _OneProduct.apply(x, *weights) if trained else F.linear(x, torch.cat(weights))
    return product.split([len(weight) for weight in weights], dim=-1)


@torch.library.custom_op("meshwright::join_weights", mutates_args=())
def _join_weights(weights: list[Tensor], grad: Tensor) -> Tensor:
    """Concatenate the weights along dim 0. The unused `grad` makes this depend on the backward; otherwise the
    compiler would save the forward's concatenated copy instead."""
    return torch.cat(weights)


@_join_weights.register_fake
def _(weights: list[Tensor], grad: Tensor) -> Tensor:
    return torch.cat(weights)


class _OneProduct(torch.autograd.Function):
    """x[B, T, D] · concatenated weights[O, D] -> [B, T, O].

    The weights are concatenated for the forward and again for the backward. Autograd would save the
    concatenated copy of every block, although FSDP frees the weights themselves.
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
        return dx, *(part if needed else None for part, needed in zip(parts, of_weights, strict=True))
