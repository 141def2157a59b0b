"""Compares what an optimizer makes of the same gradients on a mesh and on one process: an update that is
computed from a rank's shard alone, where it needs the whole matrix, is no error of any gradient."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.check.kinds import NARROW, kind, relative_error
from meshwright.parallel.check.report import Mismatch
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import copy_shard, full_tensor
from meshwright.parallel.sharded_model import ShardedModel

Build = Callable[[ShardedModel], torch.optim.Optimizer]
STEPS = 2  # the second one with other gradients, and with what the first one left in the state
UPDATE_TOLERANCE = 1e-5  # of an update's size, for optimizers that add over a parameter: in another order
# those of torch that compute each element from that element of the gradients alone; not of classes derived
NAMES = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in NAMES)


def unfused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of which torch's fused kernels are off: on a CPU they round the last elements of a
    tensor, those that fill no vector, otherwise than the others, so a shard's otherwise than the whole's."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
    return optimizer


def update_tolerances(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, float], str]:
    """Return by how much of its size the update of each parameter may differ (0: by no bit), by name, and the
    rule in words. It is that of its optimizer, one of `optimizer.parts` if there are several: its attribute
    `update_tolerance`, or 0 for torch's element-wise ones, or UPDATE_TOLERANCE."""
    of: dict[Tensor, float] = {}
    rules = []
    for part in getattr(optimizer, "parts", (optimizer,)):
        default = 0.0 if type(part) in ELEMENTWISE else UPDATE_TOLERANCE
        tolerance = float(getattr(part, "update_tolerance", default))
        of |= {p: tolerance for group in part.param_groups for p in group["params"]}
        off = ", not fused" if any(group.get("fused") is False for group in part.param_groups) else ""
        how = f"to {tolerance:g} of their size" if tolerance else "bitwise"
        rules.append(f"of {type(part).__name__}{off}: {how}")
    named = model.named_parameters(remove_duplicate=False)
    return {name: of[p] for name, p in named if p in of}, f"updates {'; '.join(rules)}"


def rounding_of(value: Tensor, tolerance: float) -> float:
    """Return the norm of what rounding makes of a parameter's values, where its update may be rounded."""
    return 2**-22 * float(value.float().norm()) if tolerance else 0.0


def kind_of_update(error: float, tolerance: float) -> str:
    """Return what an update looks like that differs by more than its tolerance, and not by a factor."""
    if not tolerance:
        return "not bitwise the same, as an element-wise optimizer's is"
    narrow = "rounding of a narrower dtype, or " if error < NARROW else ""
    return f"{narrow}computed from each rank's shard alone?"


@torch.no_grad()
def compare_steps(
    sharded: ShardedModel, twin: nn.Module, gradients: Mapping[str, Tensor], build: Build
) -> tuple[list[Mismatch], int, float, str]:
    """Step a sharded model and its unsharded twin, which have the same values, with the same gradients, and
    compare by how much each parameter has changed. Every rank calls it. Returns what differs, the number of
    parameters, the largest difference, and the rule by which they were compared.

    Args:
        gradients: whole ones, of the first step; rank 0's count
    """
    sharded.settle()
    alone = dataclasses.replace(sharded, model=twin, mesh=None)  # type: ignore[arg-type]
    before = {name: p.double() for name, p in twin.named_parameters()}
    optimizers = [unfused(build(each)) for each in (sharded, alone)]
    generator = torch.Generator().manual_seed(0)
    parameters = [dict(each.model.named_parameters()) for each in (sharded, alone)]
    for step in range(STEPS):
        for name, first in gradients.items():
            noise = first.square().mean().sqrt() * torch.randn(first.shape, generator=generator)
            gradient = noise if step else first.clone(memory_format=torch.contiguous_format)
            dist.broadcast(gradient, src=0)  # ranks may have computed it in another order
            for p in (of[name] for of in parameters):
                p.grad = torch.zeros_like(p)
                copy_shard(p.grad, gradient)
        for optimizer in optimizers:
            optimizer.step()
    tolerances, rule = update_tolerances(twin, optimizers[1])
    differences, largest, changed = list[Mismatch](), 0.0, False
    for name, p in parameters[1].items():
        update, tolerance = p.double() - before[name], tolerances.get(name, 0.0)
        found = full_tensor(parameters[0][name]).double() - before[name]
        error, scale = relative_error(found, update, rounding=rounding_of(before[name], tolerance))
        largest, changed = max(largest, error), changed or bool(update.any())
        if not error <= tolerance:
            looks = kind(update, [found], None, sharded.plan.mesh) or kind_of_update(error, tolerance)
            differences.append(Mismatch("optimizer", f"update of {name}", error, scale, looks))
    if not changed:
        raise PlanError("check: the optimizer's steps changed no parameter: is its learning rate 0?")
    return differences, len(before), largest, rule
