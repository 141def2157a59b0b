"""FSDP2: units, precision, resharding, gradient reduction and the prefetch schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.parallel.plan.schema import Plan, UnitPlan, prefetch_schedule


def apply_fsdp(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard each unit, then the root (which is left with no parameters of its own), in place.

    Also with one process: the same code, the same precision policy and the same names everywhere.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.cpu_offload else OffloadPolicy()
    with _same_groups_for_all_units():
        for unit in plan.units:
            modules = [model.get_submodule(name) for name in unit.modules]
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=_precision(unit),
                offload_policy=offload,
            )
    fully_shard(model, mesh=mesh, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is already divided, once, by the tokens of the global batch. A
            # plain sum also spares gloo PREMUL_SUM, which it does not have and FSDP2 uses for other divisors.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def _same_groups_for_all_units() -> Iterator[None]:
    """With reshard_after_forward=INT, FSDP2 (torch 2.11 to 2.13) makes a mesh for the smaller groups anew for
    every unit: two process groups each, with their sockets, threads and, on GPUs, a communicator's memory.
    Here units share one."""
    fsdp: Any = _fully_shard
    make_mesh, made = fsdp._get_post_forward_mesh_info, dict[tuple[int, DeviceMesh], Any]()

    def shared(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make_mesh(reshard_after_forward, mesh_info)
        key = (reshard_after_forward, mesh_info.mesh)
        if key not in made:
            made[key] = make_mesh(reshard_after_forward, mesh_info)
        return made[key]

    fsdp._get_post_forward_mesh_info = shared
    try:
        yield
    finally:
        fsdp._get_post_forward_mesh_info = make_mesh


def _precision(unit: UnitPlan) -> MixedPrecisionPolicy:
    # Inputs are not cast: hidden states come out of the unit before in this one's dtype (the plan is checked
    # for it), and RoPE's tables stay float32.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, unit.param_dtype),
        reduce_dtype=getattr(torch, unit.reduce_dtype),
        output_dtype=None if unit.output_dtype == "same" else getattr(torch, unit.output_dtype),
        cast_forward_inputs=False,
    )


def apply_prefetch(model: nn.Module, plan: Plan) -> None:
    """Set which units' all-gathers each unit starts ahead of need, forward and backward.

    A unit of several modules is addressed through its first. A backward list is never left empty, because
    FSDP2 would then choose for itself: a unit that names itself prefetches nothing.
    """
    forward, backward = prefetch_schedule(plan, "forward"), prefetch_schedule(plan, "backward")
    for unit in plan.units:
        module = _fsdp_module(model, unit)
        module.set_modules_to_forward_prefetch([_fsdp_module(model, u) for u in forward[unit.name]])
        ahead = [_fsdp_module(model, u) for u in backward[unit.name]]
        module.set_modules_to_backward_prefetch(ahead or [module])


def _fsdp_module(model: nn.Module, unit: UnitPlan) -> FSDPModule:
    module = model.get_submodule(unit.modules[0])
    assert isinstance(module, FSDPModule)
    return module


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before a backward whether the optimizer step follows it.

    Every micro batch reduces into the sharded gradients, so no rank ever keeps whole ones; the all-reduce of
    HSDP runs in the last one only.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last)


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter with its part of a whole tensor that every rank has computed; nothing is sent."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, also of a weight that is wrapped to be sent in float8."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)
