"""Cross entropy of rows of logits, whose gradient overwrites them: in plain torch on a CPU, by a Triton
kernel on a GPU.

Shapes: n tokens, v logits per token: the full vocabulary, or one rank's share of it.
"""

import torch
from torch import Tensor

# float32 logits that plain torch processes at a time on a CPU: they fit into a core's cache
BLOCK_BYTES = 2**20


@torch.library.custom_op("meshwright::cross_entropy_rows_kernel", mutates_args=())
def read_rows(logits_nv: Tensor, ids_n: Tensor) -> Tensor:
    """Return the largest logit of every row, the sum of exp(logit - largest) and the target's logit (0 for an
    id outside 0 .. v-1): float32 [3, n]. The GPU kernel reads each logit once."""
    if logits_nv.is_cuda:
        from meshwright.models.kernels.cross_entropy_triton import read_rows as on_gpu

        return on_gpu(logits_nv, ids_n)
    return plain_rows(logits_nv, ids_n)


@read_rows.register_fake
def _(logits_nv: Tensor, ids_n: Tensor) -> Tensor:
    return logits_nv.new_empty((3, len(ids_n)), dtype=torch.float32)


@torch.library.custom_op("meshwright::cross_entropy_gradient_kernel", mutates_args=("logits_nv",))
def write_gradient(
    logits_nv: Tensor, ids_n: Tensor, log_sum_n: Tensor, scale_n: Tensor, weight_n: Tensor
) -> None:
    """Overwrite logits with weight * (scale * exp(logit - log_sum) - [id is the target]), computed in
    float32."""
    if logits_nv.is_cuda:
        from meshwright.models.kernels.cross_entropy_triton import write_gradient as on_gpu

        on_gpu(logits_nv, ids_n, log_sum_n, scale_n, weight_n)
    else:
        plain_gradient(logits_nv, ids_n, log_sum_n, scale_n, weight_n)


@write_gradient.register_fake
def _(logits_nv: Tensor, ids_n: Tensor, log_sum_n: Tensor, scale_n: Tensor, weight_n: Tensor) -> None:
    return None


def plain_rows(logits_nv: Tensor, ids_n: Tensor) -> Tensor:
    """Compute `read_rows` in plain torch: the reference of the Triton kernel."""
    rows_3n = torch.empty(3, len(ids_n), device=ids_n.device)
    largest, exp_sum, target = rows_3n
    is_local_n = _is_local(ids_n, logits_nv)
    for at in _blocks(logits_nv):
        values = logits_nv[at].float()
        torch.amax(values, 1, out=largest[at])
        target[at] = values.gather(1, ids_n[at].where(is_local_n[at], 0)[:, None])[:, 0].where(
            is_local_n[at], 0.0
        )
        torch.sum((values - largest[at][:, None]).exp_(), 1, out=exp_sum[at])
    return rows_3n


def plain_gradient(
    logits_nv: Tensor, ids_n: Tensor, log_sum_n: Tensor, scale_n: Tensor, weight_n: Tensor
) -> None:
    """Compute `write_gradient` in plain torch: the reference of the Triton kernel."""
    is_local_n = _is_local(ids_n, logits_nv)
    for at in _blocks(logits_nv):
        p = (logits_nv[at].float() - log_sum_n[at][:, None]).exp_().mul_(scale_n[at][:, None])
        p.scatter_add_(1, ids_n[at].where(is_local_n[at], 0)[:, None], -is_local_n[at][:, None].float())
        logits_nv[at] = p.mul_(weight_n[at][:, None])


def _is_local(ids_n: Tensor, logits_nv: Tensor) -> Tensor:
    return (ids_n >= 0) & (ids_n < logits_nv.shape[1])


def _blocks(logits_nv: Tensor) -> list[slice]:
    """Return slices of rows with at most BLOCK_BYTES of float32 logits each, but at least one row."""
    rows = max(1, BLOCK_BYTES // (4 * logits_nv.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(logits_nv), rows)]
