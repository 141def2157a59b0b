"""The norm of each FSDP unit's gradient, on request."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.fsdp import square_held
from meshwright.parallel.plan import Plan


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
