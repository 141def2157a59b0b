"""Gradient norms of the full model and of each FSDP unit, over any combination of mesh axes, and the divisor
for clipping."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.fsdp import local_part, parameters_by_module
from meshwright.parallel.plan.schema import Plan


def unit_parameters(model: nn.Module, plan: Plan) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of each unit, by its name in the plan. A shared parameter belongs to the
    first unit that contains it. Units without trained parameters are left out."""
    assigned: set[nn.Parameter] = set()
    units, parameters_of = {}, parameters_by_module(model, plan.modules)
    for unit in plan.units:
        trained = [p for name in unit.modules for p in parameters_of[name].values() if p.requires_grad]
        if remaining := [p for p in dict.fromkeys(trained) if p not in assigned]:
            units[unit.name] = remaining
            assigned.update(remaining)
    return units


def unit_gradient_norms(units: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the norm of each unit's gradient, float32 [units], the same on every rank, by one all-reduce.

    The root of the sum of their squares is `gradient_norm` of all parameters. Every rank must call it, after
    the backward of the last micro batch and before the optimizer step, which may change gradients in place.
    """
    squares = torch.stack([local_square(parameters) for parameters in units])
    dist.all_reduce(squares)
    return squares.sqrt()


CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def gradient_norm(parameters: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Return the norm of the full model's gradient, a plain scalar, the same on every rank; non-finite on all
    ranks if a gradient or `loss` is non-finite on one.

    Reads gradients once and calls one all-reduce: each rank sums the squares of its shards, each divided by
    the number of ranks with the same shard. This works for any sharding; torch's own function supports
    gradients of one mesh only and reduces each separately. Norms of bfloat16 gradients are float32, because
    bfloat16 has 8 significant bits.
    """
    square = local_square(parameters)
    square += 0 * loss.to(square.device)  # 0, or NaN for a non-finite loss
    dist.all_reduce(square)
    return square.sqrt()


def local_square(parameters: Sequence[Tensor]) -> Tensor:
    """Return this rank's summand of the squared norm of the parameters' gradient, a float32 scalar."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_part(grad) for grad in grads]
    norms = torch._foreach_norm(shards, 2, torch.float32)
    torch._foreach_mul_(norms, [_copies(grad) ** -0.5 for grad in grads])
    return torch.stack(norms).square().sum()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return the divisor that clips gradients to a global norm of at most `max_norm`: 1 for smaller norms;
    None (no clipping) if `max_norm` is 0."""
    return ((norm + CLIP_EPS) / max_norm).clamp(min=1.0) if max_norm > 0 else None


def _copies(grad: Tensor) -> int:
    """Return the number of ranks with the same shard of this gradient."""
    if not isinstance(grad, DTensor):
        return dist.get_world_size()
    mesh = grad.device_mesh
    shards = [
        mesh.size(axis) for axis, placement in enumerate(grad.placements) if not placement.is_replicate()
    ]
    return dist.get_world_size() // math.prod(shards)


def divide_gradients(parameters: Sequence[Tensor], divisor: Tensor | None) -> None:
    """Divide the parameters' gradients in place, by what `clip_divisor` returned."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if divisor is not None and gradients:
        torch._foreach_div_(gradients, divisor.to(gradients[0].device))
