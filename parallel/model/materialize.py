"""Gives a sharded model its values: as its constructor makes them, by its modules' own initialisers, or from
tensors."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import copy_shard, free_gathered, local_part, names_by_parameter
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.model.constructor import (
    Build,
    construct_on_meta,
    copy_attributes,
    copy_constructed,
    no_parameters,
    size_bytes,
    tensors_by_name,
)
from meshwright.parallel.model.inputs import kind_of
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import Plan, join
from meshwright.parallel.sharded_model import ShardedModel, own_random_state

Init = Literal["auto", "constructor", "modules"]
Initialiser = Callable[[nn.Module], object]
SAMPLE = 2**20  # values, at least, of which a spread is computed
# methods that write values which differ by their place
BY_PLACE = re.compile(
    "(normal|uniform|random|bernoulli|exponential|cauchy|geometric)_$|^copy_$|^__setitem__$"
)
DeviceLike = str | torch.device
LARGEST_BUILT = 4 * GIB  # bytes of parameters up to which init=auto builds the whole model
WAYS_OUT = (
    "use model.init=constructor of train.main, or build=FUNCTION of materialize and load_weights, which "
    "builds the model with values; or load_weights with all tensors"
)


@torch.no_grad()
def materialize(
    sharded: ShardedModel,
    seed: int,
    initialise: Initialiser | None = None,
    *,
    build: Build | None = None,
    init: Init = "auto",
) -> None:
    """Allocate the model's tensors, and initialise them to the same values on every mesh. What has values
    already although the model has none, as buffers of a model whose parameters alone are on the meta device,
    keeps them.

    Args:
        build: returns the model as it was before `apply_plan`, on the CPU
        init: "constructor": what `build` returns after `torch.manual_seed(seed)`, bitwise. One process of a
            node at a time holds it in host memory. "modules": the modules' own initialisers, on whole tensors
            of one FSDP unit's module at a time, seeded by (seed, name of the module): `initialise`, or
            `reset_parameters` and then the model's `_init_weights` (transformers). With `build`, their mean
            and spread in one module of each kind must be those of the constructor. Values depend on the type
            of the device. "auto": constructor with `build` and below 4 GiB of parameters, else modules

    Raises PlanError that names a parameter or buffer that no initialiser wrote, or that has another spread.
    """
    constructed = is_constructed(init, sharded.model, None if initialise else build)
    empty = _empty_buffers(sharded.model)
    model = allocate(sharded)
    if constructed:
        if build is None:
            raise PlanError("materialize: init='constructor' needs build=FUNCTION, which builds the model")
        copy_constructed(model, build, seed)
    else:
        expected = _constructed_spreads(build, seed, sharded.plan) if build else {}
        if build:
            empty = _fill_from_constructor(sharded.model, empty, build)
        for name, whole in _initialised(sharded, seed, initialise, empty):
            if name in expected and (found := Spread.of(whole)).differs(expected[name]):
                raise PlanError(
                    f"{name}: its initialiser gives a mean of {found.mean:.3g} and a standard deviation of "
                    f"{found.std:.3g}, but the model's constructor {expected[name].mean:.3g} and "
                    f"{expected[name].std:.3g}: {WAYS_OUT}"
                )
        _refuse_empty_attributes(model)


def is_constructed(init: Init, model: nn.Module, build: Build | None) -> bool:
    """Whether the values of a model, on any device and mesh, are those of its constructor."""
    small = build is not None and size_bytes(model) < LARGEST_BUILT
    return init == "constructor" or (init == "auto" and small)


@dataclass(frozen=True)
class Spread:
    """How the values of a whole tensor are distributed."""

    count: int
    mean: float
    std: float

    @staticmethod
    def of(tensor: Tensor) -> "Spread":
        """Return that of a tensor, from some of its values."""
        values = tensor.detach().flatten()
        some = values[:: max(1, len(values) // SAMPLE)].double()
        return Spread(len(some), float(some.mean()), float(some.std(correction=0)))

    def differs(self, other: "Spread") -> bool:
        """Whether samples of this size of one distribution would hardly differ so much."""
        std = max(self.std, other.std)
        error = 6 * std / max(1, self.count) ** 0.5 + 0.01 * abs(self.mean)
        one_is_constant = self.count > 1 and min(self.std, other.std) == 0 < std
        return one_is_constant or abs(self.mean - other.mean) > 2 * error or abs(self.std - other.std) > error


def _constructed_spreads(build: Build, seed: int, plan: Plan) -> Mapping[str, Spread]:
    """Return how the constructor spreads the parameters of the last of the units' modules of each kind, but
    not of LARGE ones, the same on every rank. Only these parameters get memory, on rank 0."""
    found: list[Mapping[str, Spread]] = [{}]
    if dist.get_rank() == 0:
        plain, order = construct_on_meta(build, seed)
        last = {kind_of(plain.get_submodule(name)): f"{name}." for name in plan.modules if name}
        names = {name: p for name, p in plain.named_parameters() if name.startswith((*last.values(),))}
        places = [i for i, parameter in enumerate(order) if any(parameter is p for p in names.values())]
        built = dict(construct_on_meta(build, seed, places)[0].named_parameters())
        found = [{name: Spread.of(built[name]) for name in names if not built[name].is_meta}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _initialised(
    sharded: ShardedModel,
    seed: int,
    initialise: Initialiser | None,
    empty: Set[str],
    only: Set[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Run the modules' initialisers, and yield each parameter as a whole, of which this rank has kept its
    shard. `empty`: buffers that they must write; others have values. `only`: the modules, of which nothing
    else must be written; None: all, with all parameters."""
    model, device = sharded.model, torch.device(sharded.mesh.device_type)
    passes = [initialise] if initialise else [_reset, _of_model(model)]
    mode = _OnlyOwn(model) if only is None else nullcontext()
    done: set[str] = set()
    finished = [name for unit in sharded.plan.units for name in unit.modules if name]
    for root in (*finished, ""):
        modules = {
            name: module
            for name, module in model.get_submodule(root).named_modules(prefix=root)
            if name not in done and (only is None or name in only)
        }
        whole = {name: _WholeTensors(name, module, device, empty) for name, module in modules.items()}
        with ExitStack() as stack, own_random_state():
            for tensors in whole.values():
                stack.enter_context(tensors.in_place())
            for initialiser in passes:
                for name, module in reversed(modules.items()):  # children first, as their constructors run
                    torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                    _run_alone(initialiser, module, name, mode)
        for tensors in whole.values():
            yield from tensors.keep_shards(None if only is None else empty)
        done.update(modules)


class _OnlyOwn(TorchFunctionMode):
    """Mode in which no parameter of another unit gets values that differ by their place: each rank would
    write the same ones into its shard."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = set(map(_address, model.parameters()))  # in place of this unit's are whole tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(iter((*args, *(kwargs or {}).values())), None)
        by_place = BY_PLACE.search(name := getattr(func, "__name__", ""))
        if by_place and isinstance(first, Tensor) and _address(first) in self._held:
            raise RuntimeError(f"{name} would write a parameter of another unit")
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _run_alone(
    initialiser: Initialiser, module: nn.Module, name: str, mode: AbstractContextManager[Any]
) -> None:
    try:
        with mode:
            initialiser(module)
    except RuntimeError as error:  # it writes what another unit has
        kind = _kind(module)
        raise PlanError(
            f"{name or kind}: the initialiser of {kind} does not run alone: {error}: {WAYS_OUT}"
        ) from error


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _of_model(model: nn.Module) -> Initialiser:
    """Return what calls `_init_weights` of the innermost model around a module, as transformers' do."""
    initialisers: dict[nn.Module, Initialiser] = {}
    for around in model.modules():  # the outer ones first
        if callable(own := getattr(around, "_init_weights", None)):
            initialisers |= dict.fromkeys(around.modules(), own)
    return lambda module: initialisers[module](module) if module in initialisers else None


def load_weights(
    sharded: ShardedModel,
    tensors: Mapping[str, Tensor] | None,
    *,
    from_rank0: bool = False,
    build: Build | None = None,
) -> None:
    """Allocate the model's tensors, and copy full tensors into them, on any device: `model.state_dict()` of a
    model that was built, or its parameters and buffers by name. Buffers that are not among them, as rotary
    tables, keep the values that they have, or get those of the constructor (`build`), or those that the
    modules' initialisers write.

    `from_rank0`: only rank 0 has tensors (None on the others), which it sends one by one. Raises PlanError
    for missing, unknown and wrongly shaped tensors.
    """
    if tensors is None and not (from_rank0 and dist.get_rank()):
        raise PlanError("load_weights: no tensors: give them, or from_rank0=True with those of rank 0")
    given = [_given(tensors_by_name(sharded.model), tensors) if tensors is not None else ("", {})]
    if from_rank0:
        dist.broadcast_object_list(given, src=0)
    ((problem, stored),) = given
    if problem:
        raise PlanError(problem)
    model = _allocate_for_loading(sharded, stored.keys(), build)
    with torch.no_grad():
        for name, own in tensors_by_name(model).items():
            if name in stored:
                value = tensors[stored[name]] if tensors is not None else own
                if from_rank0:
                    whole = torch.empty(own.shape, dtype=own.dtype, device=sharded.mesh.device_type)
                    value = whole.copy_(value) if tensors is not None else whole
                    dist.broadcast(value, src=0)
                copy_shard(own, value.to(own.device, own.dtype))


def _given(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, str]]:
    """Return what is wrong with given tensors, "" for nothing; and under which name each is given, of tied
    ones under any."""
    by_tensor = {id(own): name for name, own in wanted.items() if name in tensors}
    stored = {name: by_tensor[id(own)] for name, own in wanted.items() if id(own) in by_tensor}
    for name in tensors:
        if name not in wanted:
            return f"load_weights: the model has no {name}.{nearest(name, wanted)}", {}
        if tensors[name].shape != wanted[name].shape:
            shapes = f"the shape {tuple(tensors[name].shape)}, but the model's is {tuple(wanted[name].shape)}"
            return f"load_weights: {name} has {shapes}", {}
    for name, own in wanted.items():
        if name not in stored and isinstance(own, nn.Parameter):
            return f"load_weights: there is no value for {name}.{nearest(name, tensors)}", {}
    return "", stored


def _empty_buffers(model: nn.Module) -> set[str]:
    return {name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}


@torch.no_grad()
def _allocate_for_loading(sharded: ShardedModel, loaded: Set[str], build: Build | None) -> nn.Module:
    """Allocate the model's tensors, of which these will be loaded. The other buffers get the values of the
    constructor (`build`), or those that the initialisers of their modules write. Returns the model."""
    empty = _empty_buffers(sharded.model) - loaded
    model = allocate(sharded)
    if build:
        empty = _fill_from_constructor(model, empty, build)
    if empty:
        for _ in _initialised(sharded, 0, None, empty, {name.rpartition(".")[0] for name in empty}):
            pass
    _refuse_empty_attributes(model)
    return model


def _refuse_empty_attributes(model: nn.Module) -> None:
    for name, tensor in no_parameters(model):
        if tensor.is_meta:
            raise PlanError(f"{name} has no value: it is an attribute that no initialiser writes: {WAYS_OUT}")


def _fill_from_constructor(model: nn.Module, names: Set[str], build: Build) -> set[str]:
    """Give buffers, and tensors that are plain attributes, the values of the constructor. Returns the names
    of buffers to which it gives none."""
    if not names:
        return set()
    plain, _ = construct_on_meta(build)
    values = {name: plain.get_buffer(name) for name in names}
    for name, value in values.items():
        if not value.is_meta:
            model.get_buffer(name).copy_(value)
    copy_attributes(plain, model)
    return {name for name, value in values.items() if value.is_meta}


def allocate(sharded: ShardedModel) -> nn.Module:
    """Allocate this rank's tensors, filled with NaN; shared parameters stay shared, and buffers that are not
    on the meta device keep their values. Returns the model."""
    free_gathered(sharded.model)
    device = sharded.mesh.device_type
    return allocate_on(sharded.model, device, "cpu" if sharded.plan.cpu_offload else device)


def allocate_on(model: nn.Module, device: DeviceLike, of_parameters: DeviceLike) -> nn.Module:
    """`allocate` for any model, on a device, with its parameters on the same or another one."""
    shared = names_by_parameter(model)
    kept = {
        name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if not buffer.is_meta
    }
    model.to_empty(device=of_parameters)
    allocated = dict(model.named_parameters(remove_duplicate=False))
    for names in shared.values():
        for name in names[1:]:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, allocated[names[0]])
    with torch.no_grad():
        for path, module in model.named_modules(remove_duplicate=False):
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, kept.get(join(path, key), buffer).to(device))
        for name, tensor in tensors_by_name(model).items():
            if name not in kept:
                _filled(local_part(tensor))
    return model


class _WholeTensors:
    """Whole tensors in the place of a module's own parameters and buffers, while initialisers run."""

    def __init__(self, name: str, module: nn.Module, device: torch.device, empty: Set[str]) -> None:
        self.name, self.module = name, module
        self.own = dict[str, Tensor](module.named_parameters(recurse=False))
        self.own |= module.named_buffers(recurse=False)
        self.unwritten = {
            key for key, own in self.own.items() if isinstance(own, nn.Parameter) or join(name, key) in empty
        }
        self.whole = {
            key: _filled(torch.empty(own.shape, dtype=own.dtype, device=device))
            if key in self.unwritten
            else own.to(device, copy=True)
            for key, own in self.own.items()
        }
        self.versions = {key: whole._version for key, whole in self.whole.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which they are the module's. What an initialiser assigns anew is taken over."""
        for key, whole in self.whole.items():
            is_parameter = isinstance(self.own[key], nn.Parameter)
            setattr(self.module, key, nn.Parameter(whole, requires_grad=False) if is_parameter else whole)
        try:
            yield
            for key, whole in self.whole.items():
                now = getattr(self.module, key)
                if now is not None and now.data_ptr() != whole.data_ptr():
                    whole.copy_(now)
        finally:
            for key, own in self.own.items():
                setattr(self.module, key, own)

    def keep_shards(self, needed: Set[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Copy this rank's shards into the module, and yield whole parameters by name. Raises PlanError for a
        tensor that no initialiser wrote, or only in part. `needed`: names of those that matter; None: all."""
        for key, whole in self.whole.items():
            name, numbers = join(self.name, key), whole.is_floating_point() or whole.is_complex()
            written = not bool(whole.isnan().any()) if numbers else whole._version > self.versions[key]
            if key in self.unwritten and not written and (needed is None or name in needed):
                kind = _kind(self.module)
                raise PlanError(f"{name} has no value: no initialiser of {kind} wrote it: {WAYS_OUT}")
            if key in self.unwritten:  # what has values keeps them
                copy_shard(self.own[key], whole)
            if isinstance(self.own[key], nn.Parameter):
                yield name, whole


def _filled(tensor: Tensor) -> Tensor:
    """Fill a tensor of numbers that can be NaN with NaN: an initialiser that writes a part of it is found."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() or tensor.is_complex() else tensor
