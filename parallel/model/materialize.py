"""Gives a sharded model its values: by its modules' own initialisers, or from tensors."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import copy_shard, free_gathered
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.sharded_model import ShardedModel

Initialiser = Callable[[nn.Module], object]
UNWRITTEN = -(2**31) + 7  # in integer buffers, as NaN in others
WAYS_OUT = (
    "pass initialise=..., a function of a module; or use load_weights with the values of a model that was "
    "built on a device"
)


@torch.no_grad()
def materialize(sharded: ShardedModel, seed: int, initialise: Initialiser | None = None) -> None:
    """Allocate the model's tensors, and initialise them to the same values on every mesh.

    Each module's own initialiser runs on whole tensors, of one FSDP unit's module at a time, seeded by (seed,
    name of the module): `initialise`, the model's `_init_weights` (transformers), or the module's
    `reset_parameters`. Each rank keeps its shard. Values depend on the type of the device.

    Raises PlanError that names a parameter or buffer that no initialiser wrote.
    """
    model, device = allocate(sharded), torch.device(_device_type(sharded))
    initialise = initialise or getattr(model, "_init_weights", None) or _reset
    done: set[str] = set()
    finished = [name for unit in sharded.plan.units for name in unit.modules if name]
    for root in (*finished, ""):
        modules = {
            name: module
            for name, module in model.get_submodule(root).named_modules(prefix=root)
            if name not in done
        }
        whole = {name: _whole_tensors(module, device) for name, module in modules.items()}
        with ExitStack() as stack, torch.random.fork_rng(_gpus(device)):
            for name, module in modules.items():
                stack.enter_context(_replaced(module, whole[name]))
            for name, module in reversed(modules.items()):  # children first, as their constructors run
                torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                initialise(module)
        for name, module in modules.items():
            _keep_shards(module, name, whole[name])
        done.update(modules)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def load_weights(
    sharded: ShardedModel, tensors: Mapping[str, Tensor] | None, *, from_rank0: bool = False
) -> None:
    """Allocate the model's tensors, and copy full tensors into them: parameters and buffers by name, on any
    device, such as `dict(model.named_parameters()) | dict(model.named_buffers())` of a model that was built.

    `from_rank0`: only rank 0 has tensors (None on the others), which it sends one by one. Raises PlanError
    for missing, unknown and wrongly shaped tensors.
    """
    model = allocate(sharded)
    wanted = _tensors_by_name(model)
    missing = _missing(wanted, tensors) if tensors is not None else ""
    if from_rank0:
        problem = [missing]
        dist.broadcast_object_list(problem, src=0)
        (missing,) = problem
    if missing:
        raise PlanError(missing)
    with torch.no_grad():
        for name, own in wanted.items():
            value = tensors[_stored_name(wanted, tensors, name)] if tensors is not None else own
            if from_rank0:
                whole = torch.empty(own.shape, dtype=own.dtype, device=_device_type(sharded))
                value = whole.copy_(value) if tensors is not None else whole
                dist.broadcast(value, src=0)
            copy_shard(own, value.to(own.device, own.dtype))


def _missing(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Return what is wrong with the tensors; "" for nothing."""
    unknown = [name for name in tensors if name not in wanted]
    missing = [name for name in wanted if _stored_name(wanted, tensors, name) not in tensors]
    shapes = [
        f"{name} has the shape {tuple(tensors[name].shape)}, but the model's is {tuple(own.shape)}"
        for name, own in wanted.items()
        if name in tensors and tensors[name].shape != own.shape
    ]
    if unknown:
        return f"load_weights: the model has no {unknown[0]}.{nearest(unknown[0], wanted)}"
    if missing:
        return f"load_weights: there is no value for {missing[0]}.{nearest(missing[0], tensors)}"
    return f"load_weights: {shapes[0]}" if shapes else ""


def _stored_name(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], name: str) -> str:
    """Return the name under which a tensor is given: of tied ones any."""
    same = [other for other, tensor in wanted.items() if tensor is wanted[name] and other in tensors]
    return name if name in tensors or not same else same[0]


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def allocate(sharded: ShardedModel) -> nn.Module:
    """Allocate this rank's tensors, filled with NaN; shared parameters stay shared. Returns the model."""
    model, plan = sharded.model, sharded.plan
    free_gathered(model)
    shared: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter, []).append(name)
    model.to_empty(device="cpu" if plan.cpu_offload else _device_type(sharded))
    allocated = dict(model.named_parameters(remove_duplicate=False))
    for names in shared.values():
        for name in names[1:]:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, allocated[names[0]])
    with torch.no_grad():
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(_device_type(sharded)))
        for tensor in _tensors_by_name(model).values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _fill_unwritten(local)
    return model


def _device_type(sharded: ShardedModel) -> str:
    return sharded.mesh.device_type


def _gpus(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []


def _fill_unwritten(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return (
        tensor if tensor.dtype == torch.bool else tensor.fill_(UNWRITTEN % (2 ** (8 * tensor.itemsize - 1)))
    )


def _is_unwritten(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:
        return True  # it has no third value: only an initialiser of the model's own can be trusted
    return tensor.numel() > 0 and bool((tensor == UNWRITTEN % (2 ** (8 * tensor.itemsize - 1))).all())


def _whole_tensors(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return whole tensors in place of the module's own parameters and buffers, filled with NaN."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {
        name: _fill_unwritten(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        for name, tensor in own.items()
    }


@contextmanager
def _replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the module's own tensors in the meantime. What an initialiser assigns anew is taken over."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for name, tensor in tensors.items():
        is_parameter = isinstance(own[name], nn.Parameter)
        setattr(module, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    try:
        yield
        for name, tensor in tensors.items():
            now = getattr(module, name)
            if now is not None and now.data_ptr() != tensor.data_ptr():
                tensor.copy_(now)
    finally:
        for name, tensor in own.items():
            setattr(module, name, tensor)


def _keep_shards(module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of whole tensors into the module. Raises PlanError for an unwritten one."""
    for key, whole in tensors.items():
        if _is_unwritten(whole):
            kind = type(module).__name__.removeprefix("FSDP")
            raise PlanError(f"{name}.{key} has no value: no initialiser of {kind} wrote it: {WAYS_OUT}")
        copy_shard(getattr(module, key), whole)
