"""The output head: final norm, projection to logits, loss.

Shapes: B batch, T tokens, D dim, V vocabulary, v = V/tp one rank's share of it.
"""

import torch
from torch import Tensor, nn

from meshwright.models.chunked_loss import linear_cross_entropy
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
        """Set the process group that splits the vocabulary; `output` then computes the `rank`-th share of the
        logits."""
        self.group_name, self.rank = group_name, rank

    def forward(self, h_BTD: Tensor, output: Projection, targets_BT: Tensor) -> Tensor:
        """h[B, T, D], targets[B, T] -> loss summed over all tokens, a float32 scalar, the same on every rank
        of the group."""
        training = torch.is_grad_enabled()
        z_loss = self.z_loss if training else 0.0
        if self.chunk_tokens:
            h, weight = h_BTD.flatten(0, 1), output.matrix()
            needs_gradient = (training and h.requires_grad, training and weight.requires_grad)
            return linear_cross_entropy(
                h,
                weight,
                targets_BT.flatten(),
                self.rank * weight.shape[0],
                self.group_name,
                self.chunk_tokens,
                z_loss,
                self.learning,
                *needs_gradient,
            )[0]
        logits = output(h_BTD)
        if not self.group_name:
            return cross_entropy_sum(logits, targets_BT, z_loss, self.learning)
        logits, first_id = logits.flatten(0, 1), self.rank * logits.shape[-1]
        return SplitCrossEntropySum.apply(
            logits, targets_BT.flatten(), first_id, self.group_name, z_loss, self.learning
        )


class Head(nn.Module):
    """Final norm and output projection; with targets also the loss, so that the logits stay inside this
    module."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = Projection(dim, vocab_size, bias=False)
        self.loss = LinearCrossEntropySum()

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        return self.output(h) if targets_BT is None else self.loss(h, self.output, targets_BT)
