"""Cross entropy of next-token prediction, from logits.

Shapes: B batch, T tokens, n = B T, V vocabulary, v = V/tp one rank's share of it.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

IGNORE_INDEX = -100  # target of a padding token, which adds no loss


def cross_entropy_sum(
    logits_BTV: Tensor, targets_BT: Tensor, z_loss: float = 0.0, learning: Tensor | float = 1.0
) -> Tensor:
    """Return the sum over tokens of -log p(target) + z_loss * log_sum_exp(logits)^2, in nats: float32 scalar.

    Targets of IGNORE_INDEX add nothing. `learning` 0 (evaluation) leaves out the z-loss, which keeps the
    logits from drifting (PaLM, arXiv 2204.02311, section 5). A sum, not a mean: the caller divides it once by
    the number of tokens of the global batch.
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    if not z_loss:
        return loss
    return loss + learning * (z_loss * (logits.logsumexp(1).square() * (targets != IGNORE_INDEX)).sum())


class LogitsLoss(nn.Module):
    """`cross_entropy_sum` of logits[B, T, V] and targets[B, T], divided by `divisor`, a scalar on the device.

    `learning`: 1 in training, 0 in an evaluation, which then adds no z-loss (as in
    `head.LinearCrossEntropySum`).
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss
        self.learning = torch.ones((), device="cpu")

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor, divisor: Tensor) -> Tensor:
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        return cross_entropy_sum(logits_BTV, targets_BT, z_loss, self.learning) / divisor


def join_rows(rows_3n: Tensor, group_name: str) -> Tensor:
    """Return the rows over all ranks: largest logit, sum of exp(logit - largest), target's logit. Two small
    all-reduces: the largest logit of each token, then the two sums together."""
    if not group_name:
        return rows_3n
    own_largest, exp_sum, target = rows_3n.unbind()
    largest = _all_reduce(own_largest, "max", group_name)
    sums = torch.stack((exp_sum * (own_largest - largest).exp(), target))
    return torch.cat((largest[None], _all_reduce(sums, "sum", group_name)))


class SplitCrossEntropySum(torch.autograd.Function):
    """`cross_entropy_sum` of logits[n, v] of the ids from `first_id` on; every rank returns the full sum."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first_id: int,
        group_name: str,
        z_loss: float,
        learning: Tensor,
    ) -> Tensor:
        values, ids, counts = logits.float(), targets - first_id, targets != IGNORE_INDEX
        is_local = (ids >= 0) & (ids < values.shape[1])
        ids = ids.where(is_local, 0)
        largest = values.amax(1)
        exp_sum = (values - largest[:, None]).exp().sum(1)
        target = values.gather(1, ids[:, None])[:, 0].where(is_local, 0.0)
        largest, exp_sum, target = join_rows(torch.stack((largest, exp_sum, target)), group_name).unbind()
        log_sum = largest + exp_sum.log()
        ctx.save_for_backward(logits, ids, is_local, log_sum, counts)
        ctx.z_loss = z_loss
        loss = log_sum - target
        if z_loss:
            loss = loss + learning * (z_loss * log_sum.square())
        return loss.where(counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, ids, is_local, log_sum, counts = ctx.saved_tensors
        p = (logits.float() - log_sum[:, None]).exp() * (1 + 2 * ctx.z_loss * log_sum)[:, None]
        p = p.scatter_add(1, ids[:, None], -is_local[:, None].float())
        return (p * (counts * grad)[:, None]).to(logits.dtype), None, None, None, None, None


def _all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group_name))
