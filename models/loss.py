"""Cross entropy of next-token prediction. Shapes: B batch, T tokens, V vocabulary, v = V/tp one rank's share of it."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a target that counts for nothing: padding


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over tokens of -log p(target), in nats: float32 scalar. Targets of IGNORE_INDEX add nothing.

    A sum, not a mean: whoever knows the whole global batch divides by its number of tokens, once.
    """
    logits = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class CrossEntropySum(nn.Module):
    """`cross_entropy_sum` as a module, so that a sharding can name it: logits[B, T, V], targets[B, T] -> scalar."""

    group_name: str | None = None
    rank = 0

    def split_vocabulary(self, group_name: str, rank: int) -> None:
        """From now on take logits[B, T, v], the `rank`-th share of the vocabulary of the process group's ranks."""
        self.group_name, self.rank = group_name, rank

    def forward(self, logits: Tensor, targets_BT: Tensor) -> Tensor:
        """logits[B, T, V], or [B, T, v] once the vocabulary is split; targets[B, T] -> the whole sum, a float32 scalar."""
        if self.group_name is None:
            return cross_entropy_sum(logits, targets_BT)
        first_id = self.rank * logits.shape[-1]
        return _SplitCrossEntropySum.apply(logits.flatten(0, 1), targets_BT.flatten(), first_id, self.group_name)


class _SplitCrossEntropySum(torch.autograd.Function):
    """The same sum from logits[n, v] that hold the ids from `first_id` on; every rank of the group returns all of it.

    Two small all-reduces: the largest logit of each token, then the sum of exponentials with the target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_id: int, group_name: str) -> Tensor:
        values = logits.float()
        ids = targets - first_id
        mine = (ids >= 0) & (ids < values.shape[1])
        ids = ids.where(mine, 0)
        largest = _all_reduce(values.amax(1), "max", group_name)
        exp_sum = (values - largest[:, None]).exp().sum(1)
        target_logit = values.gather(1, ids[:, None])[:, 0].where(mine, 0.0)
        exp_sum, target_logit = _all_reduce(torch.stack((exp_sum, target_logit)), "sum", group_name).unbind()
        log_sum = largest + exp_sum.log()
        counts = targets != IGNORE_INDEX
        ctx.save_for_backward(logits, ids, mine, log_sum, counts)
        return (log_sum - target_logit).where(counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, ids, mine, log_sum, counts = ctx.saved_tensors
        p = (logits.float() - log_sum[:, None]).exp()
        p = p.scatter_add(1, ids[:, None], -mine[:, None].float())
        return (p * (counts * grad)[:, None]).to(logits.dtype), None, None, None


def _all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group_name))
