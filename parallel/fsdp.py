"""FSDP2: units, precision, resharding, gradient reduction and the prefetch schedule."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel.plan import Plan, UnitPlan


def apply_fsdp(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard each unit, then the root (which is left with no parameters of its own), in place.

    Also with one process: the same code, the same precision policy and the same names everywhere.
    """
    for unit in plan.units:
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_precision(unit),
        )
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is already divided, once, by the tokens of the global batch. A plain
            # sum also spares gloo PREMUL_SUM, which it does not have and FSDP2 uses for other divisors.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _precision(unit: UnitPlan) -> MixedPrecisionPolicy:
    # Inputs are not cast: hidden states come out of the embedding in param_dtype, and RoPE's tables stay float32.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, unit.param_dtype),
        reduce_dtype=getattr(torch, unit.reduce_dtype),
        cast_forward_inputs=False,
    )


def apply_prefetch(model: nn.Module, plan: Plan) -> None:
    """Set which units' all-gathers each unit starts ahead of need, forward and backward.

    A unit of several modules is addressed through its first. A backward list is never left empty, because FSDP2
    would then choose for itself: a unit that names itself prefetches nothing.
    """
    modules = [_fsdp_module(model, unit) for unit in plan.units]
    for i, unit in enumerate(plan.units):
        modules[i].set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + unit.forward_prefetch])
        ahead = modules[max(0, i - unit.backward_prefetch) : i][::-1]
        modules[i].set_modules_to_backward_prefetch(ahead or [modules[i]])


def _fsdp_module(model: nn.Module, unit: UnitPlan) -> FSDPModule:
    module = model.get_submodule(unit.modules[0])
    assert isinstance(module, FSDPModule)
    return module


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before a backward whether the optimizer step follows it.

    Every micro batch reduces into the sharded gradients, so no rank ever keeps whole ones; the all-reduce of HSDP
    runs in the last one only.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last)


def reshard_units(model: nn.Module) -> None:
    """Free every gathered parameter: a forward without a backward leaves those of the last unit behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter with its part of a whole tensor that every rank has computed; nothing is sent."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place to a global norm of at most `max_norm` (0: leave them). Returns the norm before.

    The norm is that of the whole model, a plain scalar on the device, the same on every rank. Gradients that live
    on different meshes are gathered mesh by mesh: torch's own function takes only one.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
