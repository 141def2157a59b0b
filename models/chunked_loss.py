"""Cross entropy of next-token prediction, computed from hidden states in chunks, without storing all logits.

Shapes: n tokens, D dim, v the vocabulary size, or one rank's share of it.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.models.kernels.cross_entropy import read_rows, write_gradient
from meshwright.models.loss import IGNORE_INDEX, join_rows


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
    h_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of `cross_entropy_sum` and its gradients with respect to h[n, D] and weight[v, D].

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
    loss = torch.zeros((), device=h_nD.device)
    buffer = h_nD.new_empty(min(chunk_tokens, n), len(weight_vD))
    for first in range(0, n, chunk_tokens):
        h = h_nD[first : first + chunk_tokens]
        logits = torch.mm(h, weight_vD.t(), out=buffer[: len(h)])
        loss += _chunk_sum(
            logits, targets_n[first : first + chunk_tokens], first_id, group_name, z_loss, with_gradient
        )
        if h_gradient:
            torch.mm(logits, weight_vD, out=dh[first : first + chunk_tokens])
        if weight_gradient:
            torch.addmm(dweight, logits.t(), h, beta=min(first, 1), out=dweight)
    return loss, dh, dweight


@linear_cross_entropy.register_fake
def _(
    h_nD: Tensor,
    weight_vD: Tensor,
    targets_n: Tensor,
    first_id: int,
    group_name: str,
    chunk_tokens: int,
    z_loss: float,
    learning: Tensor,
    h_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty((), device=h_nD.device), *_empty_gradients(
        h_nD, weight_vD, h_gradient, weight_gradient
    )


def _empty_gradients(h: Tensor, weight: Tensor, of_h: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h if of_h else h[:0]), torch.empty_like(weight if of_weight else weight[:0])


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    dh, dweight = ctx.saved_tensors
    scaled = ((x * grad).to(x.dtype) if len(x) else None for x in (dh, dweight))
    return *scaled, *[None] * 8


linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _chunk_sum(
    logits: Tensor, targets: Tensor, first_id: int, group_name: str, z_loss: float, with_gradient: bool
) -> Tensor:
    """Return the loss of one chunk's logits[n, v]; if `with_gradient`, overwrite them with their gradient."""
    counts, ids = (targets != IGNORE_INDEX).float(), targets - first_id
    log_sum, target = join_rows(read_rows(logits, ids), group_name)
    if with_gradient:
        write_gradient(logits, ids, log_sum, 1 + 2 * z_loss * log_sum, counts)
    return ((log_sum - target + z_loss * log_sum.square()) * counts).sum()
