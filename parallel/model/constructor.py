"""The values that a model's constructor gives it: of the whole model, of what is no parameter, or how they are
spread."""

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import copy_shard
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.model.inputs import kind_of
from meshwright.parallel.plan.schema import Plan

T = TypeVar("T")
Build = Callable[[], nn.Module]
LARGE = 2**28  # elements of a tensor
SAMPLE = 2**20  # values, at least, of which a spread is computed


def construct(build: Callable[[], T], seed: int) -> T:
    """Return the model as `torch.manual_seed(seed)` and its constructor make it, on the CPU."""
    with own_random_state(), torch.device("cpu"):
        torch.manual_seed(seed)
        return build()


def construct_without(
    build: Callable[[], T], seed: int = 0, kept: Collection[int] = ()
) -> tuple[T, list[nn.Parameter]]:
    """Return what `build` returns, with the parameters of its modules on the meta device, where they go as
    soon as modules register them, and all parameters in this order. `kept`: the places in it of those that
    stay on the CPU, with values. What is no parameter is as the constructor made it: buffers, and tensors
    that are plain attributes."""
    order, made = list[nn.Parameter](), WeakIdKeyDictionary()  # a tied one is replaced once

    def place(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        if len(order) not in kept and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter = made[parameter]
        order.append(parameter)
        return parameter

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(place).remove)
        stack.enter_context(_LargeToMeta())
        return construct(build, seed), order


class _LargeToMeta(TorchFunctionMode):
    """Mode in which a large `torch.empty`, as which parameters begin, is on the meta device at once: it may
    be more than this machine has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = args[0] if args and isinstance(args[0], Sequence) else args
        large = func is torch.empty and math.prod(size) >= LARGE
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if large else {}))


def draws_buffers(build: Build) -> bool:
    """Whether the constructor draws random numbers for tensors that are no parameters."""
    one, other = (_no_parameters(construct_without(build, seed)[0]) for seed in (0, 1))
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _no_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield buffers, and tensors that are plain attributes, with values."""
    for module in model.modules():
        for value in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, Tensor) and not value.is_meta:
                yield value


def copy_attributes(built: nn.Module, model: nn.Module) -> None:
    """Give the modules of the model the tensors that are plain attributes of those of a built one."""
    for name, module in built.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(model.get_submodule(name))[key] = value


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, shared ones by all of their names."""
    tensors = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def copy_constructed(model: nn.Module, build: Build, seed: int, size: int) -> None:
    """Build the model, of `size` bytes, in one process of a node at a time, which copies this rank's shards.
    Every rank calls it.

    Raises PlanError on all ranks if a node has too little memory, and if ranks get different values.
    """
    place, values = int(os.environ.get("LOCAL_RANK", dist.get_rank())), dict[str, int]()
    for turn in range(max(gathered(place)) + 1):
        problem = ""
        if turn == place and size > (free := free_host_bytes()):
            problem = (
                f"the constructor builds the whole model, {size / GIB:.1f} GiB, in host memory, of which "
                f"{free / GIB:.1f} GiB are free: use model.init=modules of train.main, or "
                "materialize(..., init='modules')"
            )
        elif turn == place:
            built = construct(build, seed)
            tensors = tensors_by_name(built)
            if without := [name for name, tensor in tensors.items() if tensor.is_meta]:
                problem = (
                    f"the constructor leaves {without[0]} on the meta device, without values: build it on "
                    "the CPU, or use model.init=modules of train.main, or materialize(..., init='modules')"
                )
            else:
                for own, name in {own: name for name, own in tensors_by_name(model).items()}.items():
                    copy_shard(own, tensors[name].to(own.device))
                copy_attributes(built, model)
                values = {name: _checksum(tensor) for name, tensor in tensors.items()}
            del built, tensors
        _raise_any(problem)
    of_rank0 = [values]
    dist.broadcast_object_list(of_rank0, src=0)
    others = [name for name, value in values.items() if of_rank0[0].get(name) != value]
    _raise_any(
        f"the constructor gives {others[0]} other values on rank {dist.get_rank()} than on rank 0: let it "
        "draw only random numbers of torch, which have been seeded, and read the same files"
        if others
        else ""
    )


def _raise_any(problem: str) -> None:
    """Raise a PlanError on every rank if any has a problem; every rank calls it."""
    for found in filter(None, gathered(problem)):
        raise PlanError(found)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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


def constructed_spreads(build: Build, seed: int, plan: Plan) -> Mapping[str, Spread]:
    """Return how the constructor spreads the parameters of the last of the units' modules of each kind, but
    not of LARGE ones, the same on every rank. Only these parameters get memory, on rank 0."""
    found: list[Mapping[str, Spread]] = [{}]
    if dist.get_rank() == 0:
        plain, order = construct_without(build, seed)
        last = {kind_of(plain.get_submodule(name)): f"{name}." for name in plan.modules if name}
        names = {name: p for name, p in plain.named_parameters() if name.startswith((*last.values(),))}
        places = [i for i, parameter in enumerate(order) if any(parameter is p for p in names.values())]
        built = dict(construct_without(build, seed, places)[0].named_parameters())
        found = [{name: Spread.of(built[name]) for name in names if not built[name].is_meta}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def own_random_state() -> AbstractContextManager[None]:
    """Context after which the random state is as before."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
