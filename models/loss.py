"""Cross entropy of next-token prediction, from hidden states: the logits need never be there all at once.

Shapes: B batch, T tokens, n = B T, D dim, V vocabulary, v = V/tp one rank's share of it.
"""

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from models.kernels.cross_entropy import read_rows, write_gradient

IGNORE_INDEX = -100  # a target that counts for nothing: padding


class Output(Protocol):
    """A projection to logits, of the whole vocabulary or of one rank's share: h[B, T, D] -> logits[B, T, v]."""

    def __call__(self, h: Tensor) -> Tensor: ...

    def matrix(self) -> Tensor:
        """Its weight, [v, D], as a plain tensor."""


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum over tokens of -log p(target) + z_loss * log_sum_exp(logits)^2, in nats: float32 scalar. Targets of IGNORE_INDEX add
    nothing.

    A sum, not a mean: whoever knows the whole global batch divides by its number of tokens, once. The z-loss keeps the logits
    from drifting (PaLM, arXiv 2204.02311, section 5).
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss + z_loss * (logits.logsumexp(1).square() * (targets != IGNORE_INDEX)).sum() if z_loss else loss


class LinearCrossEntropySum(nn.Module):
    """The output projection and `cross_entropy_sum` in one, as a module that a sharding can name.

    `chunk_tokens`: how many tokens' logits are there at a time, each chunk's gradients computed at once and its logits
    overwritten; 0 makes all logits and leaves their gradient to autograd. `z_loss`: of training, where gradients are wanted.
    """

    chunk_tokens = 0
    z_loss = 0.0
    group_name = ""
    rank = 0

    def split_vocabulary(self, group_name: str, rank: int) -> None:
        """From now on the output makes the `rank`-th share of the logits of the process group's ranks."""
        self.group_name, self.rank = group_name, rank

    def forward(self, h_BTD: Tensor, output: Output, targets_BT: Tensor) -> Tensor:
        """h[B, T, D], targets[B, T] -> the whole sum, a float32 scalar, the same on every rank of the group."""
        training = torch.is_grad_enabled()
        z_loss = self.z_loss if training else 0.0
        if self.chunk_tokens:
            h, weight = h_BTD.flatten(0, 1), output.matrix()
            wanted = (training and h.requires_grad, training and weight.requires_grad)
            return linear_cross_entropy(h, weight, targets_BT.flatten(), self.rank * weight.shape[0], self.group_name,
                                        self.chunk_tokens, z_loss, *wanted)[0]  # fmt: skip
        logits = output(h_BTD)
        if not self.group_name:
            return cross_entropy_sum(logits, targets_BT, z_loss)
        first_id = self.rank * logits.shape[-1]
        return _SplitCrossEntropySum.apply(logits.flatten(0, 1), targets_BT.flatten(), first_id, self.group_name, z_loss)


@torch.library.custom_op("meshwright::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    h_nD: Tensor, weight_vD: Tensor, targets_n: Tensor, first_id: int, group_name: str, chunk_tokens: int, z_loss: float,
    h_gradient: bool, weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum as in `cross_entropy_sum`, and its gradients by h[n, D] and weight[v, D], each empty where it is not wanted.

    weight holds the ids from `first_id` on; the ranks of the process group named `group_name` hold the others ("": none). By h
    it is then this rank's summand of the gradient. One operation for the compiler, which can so neither keep the logits nor
    compute them again; products and the weight's gradient, which is added up chunk by chunk, are in the dtype of h.
    """
    n, wanted = len(h_nD), h_gradient or weight_gradient
    loss = torch.zeros((), device=h_nD.device)
    dh, dweight = _empty_gradients(h_nD, weight_vD, h_gradient, weight_gradient)
    buffer = h_nD.new_empty(min(chunk_tokens, n), len(weight_vD))
    for first in range(0, n, chunk_tokens):
        h = h_nD[first : first + chunk_tokens]
        logits = torch.mm(h, weight_vD.t(), out=buffer[: len(h)])
        loss += _chunk_sum(logits, targets_n[first : first + chunk_tokens], first_id, group_name, z_loss, wanted)
        if h_gradient:
            torch.mm(logits, weight_vD, out=dh[first : first + chunk_tokens])
        if weight_gradient:
            torch.addmm(dweight, logits.t(), h, beta=min(first, 1), out=dweight)
    return loss, dh, dweight


@linear_cross_entropy.register_fake
def _(h_nD: Tensor, weight_vD: Tensor, targets_n: Tensor, first_id: int, group_name: str, chunk_tokens: int, z_loss: float,
      h_gradient: bool, weight_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty((), device=h_nD.device), *_empty_gradients(h_nD, weight_vD, h_gradient, weight_gradient)


def _empty_gradients(h: Tensor, weight: Tensor, of_h: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h if of_h else h[:0]), torch.empty_like(weight if of_weight else weight[:0])


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    dh, dweight = ctx.saved_tensors
    scaled = ((x * grad).to(x.dtype) if len(x) else None for x in (dh, dweight))
    return *scaled, *[None] * 7


linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _chunk_sum(logits: Tensor, targets: Tensor, first_id: int, group_name: str, z_loss: float, wanted: bool) -> Tensor:
    """The sum over logits[n, v], which their gradient replaces if it is `wanted`."""
    counts, ids = (targets != IGNORE_INDEX).float(), targets - first_id
    log_sum, target = _join(read_rows(logits, ids), group_name)
    if wanted:
        write_gradient(logits, ids, log_sum, 1 + 2 * z_loss * log_sum, counts)
    return ((log_sum - target + z_loss * log_sum.square()) * counts).sum()


def _join(rows_3n: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """log-sum-exp and target of every row over all ranks. Two small all-reduces: the largest logit of each token, then
    the sum of exponentials with the target's logit."""
    own_largest, exp_sum, target = rows_3n.unbind()
    if not group_name:
        return own_largest + exp_sum.log(), target
    largest = _all_reduce(own_largest, "max", group_name)
    exp_sum = exp_sum * (own_largest - largest).exp()
    exp_sum, target = _all_reduce(torch.stack((exp_sum, target)), "sum", group_name).unbind()
    return largest + exp_sum.log(), target


class _SplitCrossEntropySum(torch.autograd.Function):
    """`cross_entropy_sum` of logits[n, v] that hold the ids from `first_id` on; every rank of the group returns all of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_id: int, group_name: str, z_loss: float) -> Tensor:
        values, ids, counts = logits.float(), targets - first_id, targets != IGNORE_INDEX
        mine = (ids >= 0) & (ids < values.shape[1])
        ids = ids.where(mine, 0)
        largest = values.amax(1)
        exp_sum = (values - largest[:, None]).exp().sum(1)
        target = values.gather(1, ids[:, None])[:, 0].where(mine, 0.0)
        log_sum, target = _join(torch.stack((largest, exp_sum, target)), group_name)
        ctx.save_for_backward(logits, ids, mine, log_sum, counts)
        ctx.z_loss = z_loss
        return (log_sum - target + z_loss * log_sum.square()).where(counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, ids, mine, log_sum, counts = ctx.saved_tensors
        p = (logits.float() - log_sum[:, None]).exp() * (1 + 2 * ctx.z_loss * log_sum)[:, None]
        p = p.scatter_add(1, ids[:, None], -mine[:, None].float())
        return (p * (counts * grad)[:, None]).to(logits.dtype), None, None, None, None


def _all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group_name))
