"""The output head: final norm, projection to logits, loss.

Shapes: B batch, T tokens, n = B T, D dim, V vocabulary, v = V/tp one rank's share of it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.models.kernels.cross_entropy import multiply_unless_one, read_rows, write_losses
from meshwright.models.loss import SplitCrossEntropySum, cross_entropy_sum, join_rows
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
