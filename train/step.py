"""One optimizer step, without host synchronization.

Shapes: B sequences of a micro batch, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.models.loss import IGNORE_INDEX
from meshwright.parallel.grad_norm import clip_divisor, divide_gradients, gradient_norm
from meshwright.parallel.sharded_model import ShardedModel, summed
from meshwright.train.data.sequences import Batch
from meshwright.train.model.trained_model import LossOf
from meshwright.train.optim.optimizer import knows_scale


@dataclass(frozen=True)
class StepResult:
    """The results of a step, as scalars on the device: reading one waits for the device.

    `loss`: mean over the tokens of the global batch, in nats, before the update. `grad_norm`: before
    clipping. `skipped`: 1 if the loss or the norm was not finite and nothing was updated, else 0.
    `tokens`: targets of the global batch.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    tokens: Tensor


def train_step(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    grad_clip: float,
    loss_of: LossOf,
    before_optimizer: Callable[[], None] = lambda: None,
) -> StepResult:
    """Accumulate the gradient of the global batch's mean loss, clip it, and update the weights unless the
    loss or the gradient norm is not finite.

    `loss_of` divides the loss of each micro batch by the number of tokens of the global batch (in
    models/head.py, models/loss.py), so the result does not depend on how sequences and padding are divided
    into micro batches and ranks. `before_optimizer` is called with complete gradients, which are not clipped.
    """
    global_tokens = sharded.global_count(micro_batches, count_targets)
    loss = torch.zeros_like(global_tokens)
    for batch in sharded.accumulate(micro_batches):
        micro_loss = loss_of(sharded.model, batch, global_tokens)
        micro_loss.backward()
        loss += micro_loss.detach()
    before_optimizer()
    grad_norm = gradient_norm(list(sharded.model.parameters()), loss)
    skipped = 1 - grad_norm.isfinite().float()
    update(optimizer, clip_divisor(grad_norm, grad_clip), skipped)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(summed(loss, sharded.data_group), grad_norm, skipped, global_tokens)


def update(optimizer: torch.optim.Optimizer, divisor: Tensor | None, skipped: Tensor) -> None:
    """Divide the gradients and do the optimizer's step, unless `skipped` is 1: weights, state and step count
    then do not change. An optimizer that knows neither waits for the device once."""
    if knows_scale(optimizer):
        optimizer.grad_scale, optimizer.found_inf = divisor, skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        divide_gradients([p for group in optimizer.param_groups for p in group["params"]], divisor)
        optimizer.step()


def count_targets(batch: Batch) -> Tensor:
    """Number of targets that count in the loss, a scalar on the device."""
    return (batch.targets != IGNORE_INDEX).sum()
