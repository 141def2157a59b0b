"""The norm of the gradient over any mix of mesh axes, of the whole model and of each FSDP unit, and what
clipping divides by."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.fsdp import local_part
from meshwright.parallel.plan.schema import Plan


def unit_parameters(model: nn.Module, plan: Plan) -> dict[str, list[nn.Parameter]]:
    """The trained parameters of each unit, by its name in the plan, each once: one that several modules share
    belongs to the first unit that has it. A unit of which nothing is trained is left out."""
    taken: set[nn.Parameter] = set()
    units = {}
    for unit in plan.units:
        held = [p for name in unit.modules for p in model.get_submodule(name).parameters() if p.requires_grad]
        if mine := [p for p in dict.fromkeys(held) if p not in taken]:
            units[unit.name] = mine
            taken.update(mine)
    return units


def unit_gradient_norms(units: Sequence[Sequence[Tensor]]) -> Tensor:
    """The norm of each unit's gradient, float32 [units], the same on every rank, from one all-reduce of that
    many numbers. The root of the sum of their squares is `fsdp.gradient_norm` of all parameters. Every rank
    calls it, after the backward of the last micro batch and before the optimizer, which may change gradients
    in place."""
    squares = torch.stack([square_held(parameters) for parameters in units])
    dist.all_reduce(squares)
    return squares.sqrt()


CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def gradient_norm(parameters: Sequence[Tensor], loss: Tensor) -> Tensor:
    """The norm of the whole model's gradient, a plain scalar, the same on every rank; not finite on all of
    them if a gradient or `loss` is not finite on one.

    From one reading and one all-reduce: each rank adds up the squares of what it holds, each divided by how
    many ranks hold the same. So it does not matter which axes shard a gradient, where torch's own function
    takes gradients of one mesh only and reduces each apart. Norms of bfloat16 gradients are float32: in their
    own dtype they would keep 8 bits.
    """
    square = square_held(parameters)
    square += 0 * loss.to(square.device)  # 0, or not a number
    dist.all_reduce(square)
    return square.sqrt()


def square_held(parameters: Sequence[Tensor]) -> Tensor:
    """What this rank adds to the square of the norm of the parameters' gradient, a float32 scalar: summed
    over all ranks it is that square."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = [local_part(grad) for grad in grads]
    norms = torch._foreach_norm(held, 2, torch.float32)
    torch._foreach_mul_(norms, [_copies(grad) ** -0.5 for grad in grads])
    return torch.stack(norms).square().sum()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """What gradients are to be divided by for a global norm of at most `max_norm`: 1 below it; None where
    that is 0, never."""
    return ((norm + CLIP_EPS) / max_norm).clamp(min=1.0) if max_norm > 0 else None


def _copies(grad: Tensor) -> int:
    """How many ranks of the run hold the same part of this gradient."""
    if not isinstance(grad, DTensor):
        return dist.get_world_size()
    mesh = grad.device_mesh
    shards = [
        mesh.size(axis) for axis, placement in enumerate(grad.placements) if not placement.is_replicate()
    ]
    return dist.get_world_size() // math.prod(shards)
