"""The values that a model's constructor makes: of the whole model, which one process of a node builds at a
time, and of which every rank keeps its shards; or of a few parameters, to compare with other initialisers.

Parameters can go to the meta device as soon as modules register them. What is left costs next to no memory,
and has all that is no parameter as the constructor made it: buffers, and tensors that are plain attributes.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from meshwright.parallel.errors import PlanError
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.model.inputs import kind_of
from meshwright.parallel.plan.schema import Plan

Build = Callable[[], nn.Module]
LARGE = 2**28  # elements
SAMPLE = 2**20  # values of which a spread is computed, at least
MODULES = "model.init=modules of train.main, or materialize(..., init='modules')"


def construct(build: Build, seed: int) -> nn.Module:
    """Return the model as `torch.manual_seed(seed)` and its constructor make it, on the CPU."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.device("cpu"):
        torch.manual_seed(seed)
        return build()


def construct_without(
    build: Callable[[], Any], seed: int = 0, kept: Iterable[int] = ()
) -> tuple[Any, list[nn.Parameter]]:
    """Return what `build` returns, with the parameters of its modules on the meta device, and all parameters
    in the order in which modules registered them. `kept`: the places in this order of those that stay on the
    CPU, with values."""
    order, stays = list[nn.Parameter](), frozenset(kept)

    def place(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        if len(order) not in stays and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        order.append(parameter)
        return parameter

    def built() -> Any:
        with _LargeToMeta():
            return build()

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(place).remove)
        return construct(built, seed), order


class _LargeToMeta(TorchFunctionMode):
    """Mode in which a large `torch.empty`, as which parameters begin, is on the meta device at once: it may
    be more than this machine has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = args[0] if args and isinstance(args[0], Sequence) else args
        large = func is torch.empty and math.prod(size) >= LARGE
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if large else {}))


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, shared ones by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def copy_constructed(build: Build, seed: int, size: int, copy: Callable[[nn.Module], None]) -> None:
    """Build the model on the CPU, in one process of a node at a time, and pass it to `copy`. Every rank calls
    it. `size`: of the model, in bytes.

    Raises PlanError on all ranks if a node has too little memory, and if ranks get different values.
    """
    place, values = int(os.environ.get("LOCAL_RANK", dist.get_rank())), dict[str, int]()
    for turn in range(max(_gathered(place)) + 1):
        problem = ""
        if turn == place:
            if size > (free := free_host_bytes()):
                problem = (
                    f"the constructor builds the whole model, {size / GIB:.1f} GiB, in host memory, of which "
                    f"{free / GIB:.1f} GiB are free: use {MODULES}"
                )
            else:
                model = construct(build, seed)
                copy(model)
                values = {name: checksum(tensor) for name, tensor in tensors_by_name(model).items()}
                del model
        raise_any(problem)
    of_rank0 = [values]
    dist.broadcast_object_list(of_rank0, src=0)
    others = [name for name, value in values.items() if of_rank0[0].get(name) != value]
    raise_any(
        f"the constructor gives {others[0]} other values on rank {dist.get_rank()} than on rank 0: let it "
        "draw only random numbers of torch, which have been seeded, and read the same files"
        if others
        else ""
    )


def raise_any(problem: str) -> None:
    """Raise a PlanError on every rank if any has a problem; every rank calls it."""
    for found in filter(None, _gathered(problem)):
        raise PlanError(found)


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def copy_attributes(built: nn.Module, model: nn.Module) -> None:
    """Give the modules of the model the tensors that are plain attributes of those of a built one."""
    for name, module in built.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(model.get_submodule(name))[key] = value


@dataclass(frozen=True)
class Spread:
    """How the values of a tensor are distributed."""

    count: int
    mean: float
    std: float

    def differs(self, other: "Spread") -> bool:
        """Whether samples of this size of one distribution would hardly differ so much."""
        std = max(self.std, other.std)
        error = 6 * std / max(1, self.count) ** 0.5 + 0.01 * abs(self.mean)
        one_is_constant = self.count > 1 and min(self.std, other.std) == 0 < std
        return one_is_constant or abs(self.mean - other.mean) > 2 * error or abs(self.std - other.std) > error


def spread(tensor: Tensor) -> Spread:
    """Return mean and standard deviation of a whole tensor, from some of its values."""
    values = tensor.detach().flatten()
    some = values[:: max(1, len(values) // SAMPLE)].double()
    return Spread(len(some), float(some.mean()), float(some.std(correction=0)))


def constructed_spreads(build: Build, seed: int, plan: Plan) -> Mapping[str, Spread]:
    """Return how the constructor spreads the parameters of the last of the units' modules of each kind, but
    not of more than LARGE elements, the same on every rank. Only these parameters get memory, on rank 0."""
    found: list[Mapping[str, Spread]] = [{}]
    if dist.get_rank() == 0:
        plain, order = construct_without(build, seed)
        last = {kind_of(plain.get_submodule(name)): f"{name}." for name in plan.modules if name}
        names = {name: p for name, p in plain.named_parameters() if name.startswith((*last.values(),))}
        places = [i for i, parameter in enumerate(order) if any(parameter is p for p in names.values())]
        built = dict(construct_without(build, seed, places)[0].named_parameters())
        found = [{name: spread(built[name]) for name in names if not built[name].is_meta}]
    dist.broadcast_object_list(found, src=0)
    return found[0]
