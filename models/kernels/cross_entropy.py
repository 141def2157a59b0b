"""Cross entropy of rows of logits, whose gradient overwrites them: in plain torch on a CPU, by Triton
kernels on a GPU; and the multiplication of a gradient by a scalar on its device.

Shapes: n tokens, v logits per token: the full vocabulary, or the ids from `first_id` on that one rank has.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.models.loss import IGNORE_INDEX

# float32 logits that plain torch processes at a time on a CPU: they fit into a core's cache
BLOCK_BYTES = 2**20


@torch.library.custom_op("meshwright::cross_entropy_rows_kernel", mutates_args=())
def read_rows(logits_nv: Tensor, targets_n: Tensor, first_id: int) -> Tensor:
    """Return the largest logit of every row, the sum of exp(logit - largest) and the target's logit (0 for an
    id of another rank): float32 [3, n]. The GPU kernel reads each logit once."""
    if logits_nv.is_cuda:
        from meshwright.models.kernels.cross_entropy_triton import read_rows as on_gpu

        return on_gpu(logits_nv, targets_n, first_id)
    return plain_rows(logits_nv, targets_n, first_id)


@read_rows.register_fake
def _(logits_nv: Tensor, targets_n: Tensor, first_id: int) -> Tensor:
    return logits_nv.new_empty((3, len(targets_n)), dtype=torch.float32)


@torch.library.custom_op("meshwright::cross_entropy_losses_kernel", mutates_args=("logits_nv", "losses_n"))
def write_losses(
    logits_nv: Tensor,
    targets_n: Tensor,
    first_id: int,
    rows_3n: Tensor,
    z_loss: float,
    divisor: Tensor,
    losses_n: Tensor,
    with_gradient: bool,
) -> None:
    """Write the loss of every row, with z-loss; if `with_gradient`, overwrite the logits with their gradient,
    computed in float32 and divided by `divisor`.

    `rows_3n`: as of `read_rows`, over all ranks. Targets of IGNORE_INDEX have neither loss nor gradient.
    """
    if logits_nv.is_cuda:
        from meshwright.models.kernels.cross_entropy_triton import write_losses as on_gpu

        on_gpu(logits_nv, targets_n, first_id, rows_3n, z_loss, divisor, losses_n, with_gradient)
    else:
        plain_losses(logits_nv, targets_n, first_id, rows_3n, z_loss, divisor, losses_n, with_gradient)


@write_losses.register_fake
def _(*arguments: Any) -> None:
    return None


def plain_rows(logits_nv: Tensor, targets_n: Tensor, first_id: int) -> Tensor:
    """Compute `read_rows` in plain torch: the reference of the Triton kernel."""
    rows_3n = torch.empty(3, len(targets_n), device=targets_n.device)
    largest, exp_sum, target = rows_3n
    ids_n, is_local_n = _local_ids(targets_n, first_id, logits_nv)
    for at in _blocks(logits_nv):
        values = logits_nv[at].float()
        torch.amax(values, 1, out=largest[at])
        target[at] = values.gather(1, ids_n[at][:, None])[:, 0].where(is_local_n[at], 0.0)
        torch.sum((values - largest[at][:, None]).exp_(), 1, out=exp_sum[at])
    return rows_3n


def plain_losses(
    logits_nv: Tensor,
    targets_n: Tensor,
    first_id: int,
    rows_3n: Tensor,
    z_loss: float,
    divisor: Tensor,
    losses_n: Tensor,
    with_gradient: bool,
) -> None:
    """Compute `write_losses` in plain torch: the reference of the Triton kernel."""
    largest, exp_sum, target = rows_3n
    log_sum, counts = largest + exp_sum.log(), (targets_n != IGNORE_INDEX).float()
    losses_n.copy_((log_sum - target + z_loss * log_sum.square()) * counts)
    ids_n, is_local_n = _local_ids(targets_n, first_id, logits_nv)
    scale, weight = 1 + 2 * z_loss * log_sum, counts / divisor
    for at in _blocks(logits_nv) if with_gradient else ():
        p = (logits_nv[at].float() - log_sum[at][:, None]).exp_().mul_(scale[at][:, None])
        p.scatter_add_(1, ids_n[at][:, None], -is_local_n[at][:, None].float())
        logits_nv[at] = p.mul_(weight[at][:, None])


def _local_ids(targets_n: Tensor, first_id: int, logits_nv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of every target, 0 for those of other ranks, and whether it is on this rank."""
    ids_n = targets_n - first_id
    is_local_n = (ids_n >= 0) & (ids_n < logits_nv.shape[1])
    return ids_n.where(is_local_n, 0), is_local_n


def _blocks(logits_nv: Tensor) -> list[slice]:
    """Return slices of rows with at most BLOCK_BYTES of float32 logits each, but at least one row."""
    rows = max(1, BLOCK_BYTES // (4 * logits_nv.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(logits_nv), rows)]


@torch.library.custom_op("meshwright::multiply_unless_one_kernel", mutates_args=("x",))
def multiply_unless_one(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous x by a float32 scalar, without a pass over x if it is 1. A GPU reads the scalar
    itself: the host does not wait."""
    if x.is_cuda:
        from meshwright.models.kernels.cross_entropy_triton import multiply_unless_one as on_gpu

        on_gpu(x, factor)
    elif factor != 1:
        x.copy_(x.float() * factor)


@multiply_unless_one.register_fake
def _(x: Tensor, factor: Tensor) -> None:
    return None
