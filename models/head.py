"""The last part of the model: final norm, projection to logits, loss.

Shapes: B batch, T tokens, D dim, V vocabulary, v = V/tp one rank's share of it.
"""

import torch
from torch import Tensor, nn

from meshwright.models.chunked_loss import linear_cross_entropy
from meshwright.models.loss import SplitCrossEntropySum, cross_entropy_sum
from meshwright.models.projections import Projection


class LinearCrossEntropySum(nn.Module):
    """The output projection and `cross_entropy_sum` in one, as a module that a sharding can name.

    `chunk_tokens`: how many tokens' logits are there at a time, each chunk's gradients computed at once and
    its logits overwritten; 0 makes all logits and leaves their gradient to autograd. `z_loss`: of training,
    where gradients are wanted. `learning`: 1, or 0 in an evaluation that has autograd on, which counts no
    z-loss and makes no gradients. A tensor, and on the CPU: for a plain number the compiler would build a
    second graph, and nobody waits for its value.
    """

    chunk_tokens = 0
    z_loss = 0.0
    group_name = ""
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.learning = torch.ones((), device="cpu")

    def split_vocabulary(self, group_name: str, rank: int) -> None:
        """From now on the output makes the `rank`-th share of the logits of the process group's ranks."""
        self.group_name, self.rank = group_name, rank

    def forward(self, h_BTD: Tensor, output: Projection, targets_BT: Tensor) -> Tensor:
        """h[B, T, D], targets[B, T] -> the whole sum, a float32 scalar, the same on every rank of the
        group."""
        training = torch.is_grad_enabled()
        z_loss = self.z_loss if training else 0.0
        if self.chunk_tokens:
            h, weight = h_BTD.flatten(0, 1), output.matrix()
            wanted = (training and h.requires_grad, training and weight.requires_grad)
            return linear_cross_entropy(
                h,
                weight,
                targets_BT.flatten(),
                self.rank * weight.shape[0],
                self.group_name,
                self.chunk_tokens,
                z_loss,
                self.learning,
                *wanted,
            )[0]
        logits = output(h_BTD)
        if not self.group_name:
            return cross_entropy_sum(logits, targets_BT, z_loss, self.learning)
        logits, first_id = logits.flatten(0, 1), self.rank * logits.shape[-1]
        return SplitCrossEntropySum.apply(
            logits, targets_BT.flatten(), first_id, self.group_name, z_loss, self.learning
        )


class Head(nn.Module):
    """Final norm and output projection; with targets also the loss, so that logits never leave this
    module."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = Projection(dim, vocab_size, bias=False)
        self.loss = LinearCrossEntropySum()

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        return self.output(h) if targets_BT is None else self.loss(h, self.output, targets_BT)
