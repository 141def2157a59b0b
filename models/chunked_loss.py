"""Cross entropy of next-token prediction, computed from hidden states in chunks, without storing all logits.

Shapes: n tokens, D dim, v the vocabulary size, or one rank's share of it.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.models.kernels.cross_entropy import read_rows, write_losses
from meshwright.models.kernels.multiply import multiply_unless_one
from meshwright.models.loss import join_rows


class LinearCrossEntropy(torch.autograd.Function):
    """`cross_entropy_sum` of h[n, D] · weight[v, D], divided by `divisor`, with the arguments of
    `linear_cross_entropy`.

    The backward multiplies the gradients by that of the loss in place. It is 1, and nothing is read or
    written, if the loss is the root of the backward. Autograd refuses a second backward through the same
    graph.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, dh, dweight = linear_cross_entropy(*arguments)
        ctx.save_for_backward(dh, dweight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dh, dweight = ctx.saved_tensors
        of_h, of_weight, *others = ctx.needs_input_grad
        if of_h:
            multiply_unless_one(dh, grad)
        if of_weight:
            multiply_unless_one(dweight, grad)
        return dh if of_h else None, dweight if of_weight else None, *[None] * len(others)


@torch.library.custom_op("meshwright::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    h_nD: Tensor,
    weight_vD: Tensor,
    targets_n: Tensor,
    first_id: int,
    group_name: str,
    chunk_tokens: int,
    z_loss: float,
    learning: Tensor,
    divisor: Tensor,
    h_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `cross_entropy_sum` divided by `divisor`, and its gradients with respect to h[n, D] and
    weight[v, D].

    A gradient that is not requested is empty; with `learning` 0 both are undefined. weight contains the rows
    of the ids from `first_id` on, the other ranks of the process group `group_name` ("": none) those of the
    other ids; the gradient of h is then this rank's summand. The compiler sees one operation, so it can
    neither save nor recompute the logits. Matrix products and the weight's gradient, which accumulates over
    chunks, are in the dtype of h.
    """
    dh, dweight = _empty_gradients(h_nD, weight_vD, h_gradient, weight_gradient)
    # a fake tensor (simulation) has no value; otherwise `learning` is on the CPU and reading it costs nothing
    if not isinstance(h_nD, FakeTensor) and not learning:
        z_loss, h_gradient, weight_gradient = 0.0, False, False
    n, with_gradient = len(h_nD), h_gradient or weight_gradient
    losses_n = torch.empty(n, device=h_nD.device)
    buffer = h_nD.new_empty(min(chunk_tokens, n), len(weight_vD))
    for first in range(0, n, chunk_tokens):
        at = slice(first, first + chunk_tokens)
        h, targets = h_nD[at], targets_n[at]
        logits = torch.mm(h, weight_vD.t(), out=buffer[: len(h)])
        rows_3n = join_rows(read_rows(logits, targets, first_id), group_name)
        write_losses(logits, targets, first_id, rows_3n, z_loss, divisor, losses_n[at], with_gradient)
        if h_gradient:
            torch.mm(logits, weight_vD, out=dh[at])
        if weight_gradient:
            torch.addmm(dweight, logits.t(), h, beta=min(first, 1), out=dweight)
    return losses_n.sum() / divisor, dh, dweight


@linear_cross_entropy.register_fake
def _(h_nD: Tensor, weight_vD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    h_gradient, weight_gradient = others[-2:]
    gradients = _empty_gradients(h_nD, weight_vD, h_gradient, weight_gradient)
    return torch.empty((), device=h_nD.device), *gradients


def _empty_gradients(h: Tensor, weight: Tensor, of_h: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h if of_h else h[:0]), torch.empty_like(weight if of_weight else weight[:0])
