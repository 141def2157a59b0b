"""The output head: final norm, projection to logits, loss.

Shapes: B batch, T tokens, D dim, V vocabulary, v = V/tp one rank's share of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.chunked_loss import LinearCrossEntropy
from meshwright.models.loss import SplitCrossEntropySum, cross_entropy_sum
from meshwright.models.projections import Projection


class LinearCrossEntropySum(nn.Module):
    """Output projection and `cross_entropy_sum`, as a module that a sharding plan can name.

    `chunk_tokens`: number of tokens per chunk of logits; each chunk's gradients are computed immediately and
    overwrite its logits; 0 computes all logits and leaves the gradient to autograd. `z_loss`: coefficient,
    applied in training only. `learning`: 1 in training; 0 in an evaluation with autograd enabled, which then
    adds no z-loss and computes no gradients. It is a tensor because a Python number would make the compiler
    build a second graph, and it is on the CPU so that reading it does not synchronize with a GPU.
    """

    chunk_tokens = 0
    z_loss = 0.0
    group_name = ""
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.learning = torch.ones((), device="cpu")

    def split_vocabulary(self, group_name: str, rank: int) -> None:
        """Set the group that splits the vocabulary; `output` then computes its `rank`-th share of logits."""
        self.group_name, self.rank = group_name, rank

    def forward(
        self, h_BTD: Tensor, output: Projection, targets_BT: Tensor, divisor: Tensor | None = None
    ) -> Tensor:
        """h[B, T, D], targets[B, T] -> loss summed over all tokens and divided by `divisor` (None: 1), a
        float32 scalar, the same on every rank of the group."""
        if divisor is None:
            divisor = torch.ones((), device=h_BTD.device)
        training = torch.is_grad_enabled()
        z_loss = self.z_loss if training else 0.0
        if self.chunk_tokens:
            h, weight = h_BTD.flatten(0, 1), output.matrix()
            needs_gradient = (training and h.requires_grad, training and weight.requires_grad)
            return LinearCrossEntropy.apply(  # type: ignore[no-any-return]
                h,
                weight,
                targets_BT.flatten(),
                self.rank * weight.shape[0],
                self.group_name,
                self.chunk_tokens,
                z_loss,
                self.learning,
                divisor,
                *needs_gradient,
            )
        logits = output(h_BTD)
        if not self.group_name:
            return cross_entropy_sum(logits, targets_BT, z_loss, self.learning) / divisor
        logits, first_id = logits.flatten(0, 1), self.rank * logits.shape[-1]
        loss = SplitCrossEntropySum.apply(
            logits, targets_BT.flatten(), first_id, self.group_name, z_loss, self.learning
        )
        return loss / divisor


class HeadNorm(nn.RMSNorm):
    """RMSNorm that can be compiled alone: dynamo skips the forwards of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Head(nn.Module):
    """Final norm and output projection; with targets also the loss, so that the logits stay inside."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = HeadNorm(dim, norm_eps)
        self.output = Projection(dim, vocab_size, bias=False)
        self.loss = LinearCrossEntropySum()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module in place; with a loss in chunks only the norm.

        Such a loss is one operator for the compiler, which gains nothing, and which would copy the head's
        entire weight gradient before the operator multiplies it in place (inductor, torch 2.11 to 2.13).
        """
        if self.loss.chunk_tokens:
            self.norm.compile(*args, **kwargs)
        else:
            super().compile(*args, **kwargs)

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        return self.output(h) if targets_BT is None else self.loss(h, self.output, targets_BT, divisor)
