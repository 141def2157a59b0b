"""What a model's constructor gives: the values of the whole model, or only what is no parameter."""

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import copy_shard
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.mesh import gather_from_all, raise_any
from meshwright.parallel.plan.schema import join
from meshwright.parallel.sharded_model import own_random_state

T = TypeVar("T")
Build = Callable[[], nn.Module]
LARGE = 2**28  # elements of a tensor


def construct(build: Callable[[], T], seed: int) -> T:
    """Return the model as `torch.manual_seed(seed)` and its constructor make it, on the CPU."""
    with own_random_state(), torch.device("cpu"):
        torch.manual_seed(seed)
        return build()


def construct_on_meta(
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
        large = func is torch.empty and math.prod(n for n in size if isinstance(n, int)) >= LARGE
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if large else {}))


def is_constant(build: Build, built: nn.Module) -> bool:
    """Whether what is no parameter is the same in every model that `build` makes: it depends on no parameter
    and on no random number. `built`: as `construct_on_meta` returns it."""
    one = [tensor for _, tensor in no_parameters(built)]
    if any(tensor.is_meta for tensor in one):
        return False
    other = (tensor for _, tensor in no_parameters(construct_on_meta(build, seed=1)[0]))
    return all(map(torch.equal, one, other))


def no_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors in attributes, also in lists and mappings, with the names of the attributes;
    not those that have gradients, which a forward computes."""
    for name, module in model.named_modules():
        for key, value in {**vars(module), **vars(module)["_buffers"]}.items():
            for leaf in tree_leaves(value) if key not in ("_buffers", "_parameters", "_modules") else ():
                if is_computed_once(leaf):
                    yield join(name, key), leaf


def copy_attributes(built: nn.Module, model: nn.Module) -> None:
    """Give the modules of the model the attributes of those of a built one that are tensors, or lists and
    mappings with tensors."""
    for name, module in built.named_modules():
        own = vars(model.get_submodule(name))
        for key in vars(module).keys() - vars(nn.Module()).keys():
            made = vars(module)[key]  # which a model on the meta device may lack, as a mark of initial values
            new, (old, structure) = tree_leaves(made), tree_flatten(own.get(key, made))
            if any(map(is_computed_once, new)):  # others, such as modules in a list with them, are its own
                chosen = [a if is_computed_once(a) else b for a, b in zip(new, old, strict=True)]
                own[key] = tree_unflatten(chosen, structure)


def is_computed_once(value: object) -> bool:
    """Whether a value is a tensor that no training and no forward changes: no parameter, and without
    gradients."""
    return isinstance(value, Tensor) and not (value.requires_grad or isinstance(value, nn.Parameter))


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, shared ones by all of their names."""
    tensors = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def size_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters, unsharded."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def copy_constructed(model: nn.Module, build: Build, seed: int) -> None:
    """Build the model in one process of a node at a time, which copies this rank's shards.
    Every rank calls it.

    Raises PlanError on all ranks if a node has too little memory, and if ranks get different values.
    """
    size = size_bytes(model)
    place, values = int(os.environ.get("LOCAL_RANK", dist.get_rank())), dict[str, int]()
    for turn in range(max(gather_from_all(place)) + 1):
        problem = ""
        if turn == place and size > (free := free_host_bytes()):
            problem = (
                f"the constructor builds the whole model, {size / GIB:.1f} GiB, in host memory, of which "
                f"{free / GIB:.1f} GiB are free: use model.init=modules of train.main, or "
                "materialize(..., init='modules')"
            )
        elif turn == place:
            try:
                values = _copy_values(model, construct(build, seed))
            except Exception as error:  # the other ranks wait
                problem = f"the constructor fails on rank {dist.get_rank()}: {type(error).__name__}: {error}"
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


def _copy_values(model: nn.Module, built: nn.Module) -> dict[str, int]:
    """Copy this rank's shards of a built model, and return a checksum of each of its tensors by name."""
    tensors = tensors_by_name(built)
    if without := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise PlanError(
            f"it leaves {without[0]} on the meta device, without values: build it on the CPU, or use "
            "model.init=modules of train.main, or materialize(..., init='modules')"
        )
    for own, name in {own: name for name, own in tensors_by_name(model).items()}.items():
        copy_shard(own, tensors[name].to(own.device))
    copy_attributes(built, model)
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
