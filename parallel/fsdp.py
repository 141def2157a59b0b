"""FSDP2: units, precision, resharding, gradient reduction and the prefetch schedule."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal

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
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.parallel.errors import PlanError
from meshwright.parallel.mesh import fsdp_mesh, mesh_of_own_groups
from meshwright.parallel.plan.schema import (
    Plan,
    UnitPlan,
    innermost,
    leaves_parameters,
    prefetch_schedule,
    reduced_in,
)

Gradients = Literal["sum", "mean_of_ranks"]  # over the data-parallel ranks


def apply_fsdp(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, gradients: Gradients, group_timeout: timedelta | None
) -> None:
    """Shard each unit in place, at last the model itself, also if no parameters are left for it.

    Applies to one process too, so that code, precision policy and parameter names are the same everywhere;
    if FSDP2 would only copy its parameters (`leaves_parameters`), the units have none.
    `group_timeout`: of the smaller groups of reshard_after_forward=INT; None: torch's default.
    """
    data_mesh, ignored = fsdp_mesh(mesh, plan.mesh), _leave(model, plan, mesh)
    before = dict(model.named_parameters(remove_duplicate=False))
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.cpu_offload else OffloadPolicy()
    with _same_groups_for_all_units(group_timeout):
        for unit in plan.units:
            modules = [model.get_submodule(name) for name in unit.modules]
            of_unit = {parameter for module in modules for parameter in module.parameters()}
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=data_mesh,
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=getattr(torch, unit.param_dtype),
                    reduce_dtype=getattr(torch, reduced_in(unit, plan)),
                    output_dtype=None if unit.output_dtype == "same" else getattr(torch, unit.output_dtype),
                    cast_forward_inputs=False,  # _cast_inputs does
                ),
                offload_policy=offload,
                ignored_params=ignored,
            )
            ignored |= of_unit  # those of other modules have the same, which are not sharded twice
            _fsdp_module(model, unit).set_unshard_in_backward(unit.unshard_in_backward)
            for name, module in zip(unit.modules, modules, strict=True):
                cast = partial(_cast_inputs, getattr(torch, unit.param_dtype), name == plan.modules[0])
                # not compiled: it runs before the compiled forward, and would be a graph of its own
                module.register_forward_pre_hook(torch.compiler.disable(cast), with_kwargs=True)
                if len(modules) > 1:
                    hook = partial(_gather_for_backward, _fsdp_module(model, unit))
                    module.register_forward_hook(torch.compiler.disable(hook))
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=data_mesh, offload_policy=offload, ignored_params=ignored)
    _share_again(model, before)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Reduce by sums. FSDP2 divides by any other factor twice if its group of shards has one rank, and
            # if that is the only rank it need not be told.
            if data_mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if gradients == "mean_of_ranks":
                module.set_all_reduce_hook(partial(_divide, data_mesh.size()))
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
                # else the ranks' different parameters are added, if they use others of one unit
                module.set_reduce_scatter_unused_params(True, recurse=False)
    model.register_forward_hook(_free_without_backward)


def _leave(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 leaves alone: those that the plan does not shard, or all."""
    if not leaves_parameters(plan):
        return keep_whole(model, plan.unsharded, fsdp_mesh(mesh, plan.mesh))
    if plan.mesh.tp > 1:  # optimizers need DTensors beside those that are split
        named = model.named_parameters(remove_duplicate=False)
        keep_whole(model, [name for name, p in named if not isinstance(p, DTensor)], mesh["tp"])
    return set(model.parameters())


def refuse_planned(model: nn.Module) -> None:
    """Raise PlanError for a model that has a plan, or a part that has."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError("the model has a plan already: build it again for another")


def _gather_for_backward(unit: FSDPModule, _: nn.Module, _inputs: Any, outputs: Any) -> None:
    """Forward hook of each module of a unit of several: the first gradient of an output gathers the unit.

    FSDP2 waits for that of the module that ran last, which may have none: its weights are frozen, or the loss
    does not depend on it.
    """
    state: Any = unit._get_fsdp_state()

    def gather(_gradient: Tensor) -> None:
        state._register_root_post_backward_final_callback()  # reduces the gradients, also of this unit alone
        if state._fsdp_param_group:  # None without parameters of its own
            state._fsdp_param_group.pre_backward(default_prefetch=False)

    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(gather)


def _free_without_backward(model: nn.Module, _inputs: Any, _outputs: Any) -> None:
    """After a forward: FSDP2 keeps the last unit gathered for a backward, also where none will follow."""
    if not torch.is_grad_enabled():
        free_gathered(model)


def _divide(ranks: int, reduced: Tensor) -> None:
    reduced.div_(ranks)


def free_gathered(model: nn.Module) -> None:
    """Free the gathered parameters of all units: what reads or changes parameters must see the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _share_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Give modules outside of units, which are never called, the sharded parameter that they share."""
    after = dict(model.named_parameters(remove_duplicate=False))
    sharded = {before[name]: after[name] for name in before if after[name] is not before[name]}
    for name, parameter in before.items():
        if after[name] is parameter in sharded:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, sharded[parameter])


def keep_whole(model: nn.Module, names: Sequence[str], mesh: DeviceMesh) -> set[nn.Parameter]:
    """Make parameters that are not sharded replicated DTensors, as optimizers need beside sharded ones, and
    let their modules read them as plain tensors. Returns them. Those with a style are both already."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters[key]
        assert parameter is not None, name
        if parameter not in whole and not isinstance(parameter, DTensor):
            copies = distribute_tensor(
                parameter.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None
            )
            whole[parameter] = nn.Parameter(copies, parameter.requires_grad)
        if parameter in whole:
            module._parameters[key] = whole[parameter]
            kind: Any = type(module)
            module.__class__ = _reading_locally(kind, key)
        else:
            whole[parameter] = parameter
    return set(whole.values())


@cache
def _reading_locally(kind: Any, key: str) -> Any:
    """Return a subclass of a module's class, whose parameter `key` reads as this rank's tensor."""

    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[key]
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, key: property(read)})


@contextmanager
def _same_groups_for_all_units(timeout: timedelta | None) -> Iterator[None]:
    """Make units with the same reshard_after_forward=INT share one mesh of this rank's own groups, which have
    `timeout`.

    FSDP2 (torch 2.11 to 2.13) makes a mesh for every unit: all of its groups on every rank, with torch's
    timeout, and each with sockets, threads and, on GPUs, a communicator's memory.
    """
    fsdp: Any = _fully_shard
    make_mesh, meshes = fsdp._get_post_forward_mesh_info, dict[tuple[int, DeviceMesh], HSDPMeshInfo]()

    def shared(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        size, mesh = reshard_after_forward, mesh_info.mesh
        if isinstance(size, bool) or size in (1, mesh_info.shard_mesh_size):
            return make_mesh(size, mesh_info)
        if (size, mesh) not in meshes:
            ranks = mesh.mesh.view(-1, size)
            small = mesh_of_own_groups(ranks, ("resharded_copies", "resharded"), mesh.device_type, timeout)
            meshes[size, mesh] = HSDPMeshInfo(small, shard_mesh_dim=1, replicate_mesh_dim=0)
        return meshes[size, mesh]

    fsdp._get_post_forward_mesh_info = shared
    try:
        yield
    finally:
        fsdp._get_post_forward_mesh_info = make_mesh


def _cast_inputs(dtype: torch.dtype, is_entrance: bool, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward pre-hook of a unit's module: cast its hidden state, the first floating-point tensor that it is
    called with, as FSDP2's default casts all: a float32 buffer may have been added to it. RoPE's tables after
    it stay float32. Of the model's first module all are cast: they are the model's inputs, such as images."""
    leaves, structure = tree_flatten((args, kwargs))
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for i in floats if is_entrance else floats[:1]:
        leaves[i] = leaves[i].to(dtype)
    return tree_unflatten(leaves, structure)


def apply_prefetch(model: nn.Module, plan: Plan) -> None:
    """Set the units whose all-gathers each unit starts ahead, in forward and backward.

    A unit of several modules is represented by its first. A unit without backward prefetch gets itself as
    list, because FSDP2 replaces an empty list by its own choice.
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


def set_last_micro_batch(model: nn.Module, units: Sequence[UnitPlan], last: bool) -> None:
    """Set before the backward of a micro batch whether it is the last before the optimizer step.

    In the last one every unit reduces its gradients, all-reduces them over replicas and frees its gathered
    parameters, which the optimizer step changes. In the others it does what the plan says: gradients are
    reduced or kept whole, parameters are freed or stay gathered, and nothing is all-reduced.
    """
    for unit in units:
        module = _fsdp_module(model, unit)
        reduces = last or unit.reduce_gradients == "every_micro_batch"
        module.set_requires_gradient_sync(reduces, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or unit.reshard_after_backward, recurse=False)


def names_by_parameter(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return each parameter with its names in the model: of a shared one several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def parameters_by_module(model: nn.Module, modules: Collection[str]) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters, by their names in the model, of each module of the units: those of one that
    contains others without theirs. A shared one is in each of its modules, once."""
    found: dict[str, dict[nn.Parameter, str]] = {name: {} for name in modules}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (module := innermost(name, found)) is not None:
            found[module].setdefault(parameter, name)
    return {module: {name: p for p, name in of_module.items()} for module, of_module in found.items()}


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of a full tensor, which every rank has, into a parameter."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a parameter or gradient whole, on every rank, differentiable. A collective if it is sharded: all
    its ranks call it. One data-parallel rank has plain tensors, without DTensor's method of this name."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, unwrapping a weight that is gathered in float8."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)
