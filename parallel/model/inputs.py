"""Records what the modules of a model are called with, in one forward on fake tensors, and builds one of
them alone with such arguments, to trace it.

The values of tensors are never known; only their shapes, their dtypes, and which modules share them.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallel.model.forward import Example, run_on_fakes

# attributes by which blocks count themselves: they differ in blocks that compute the same
NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `trained`: it has a gradient, because trained modules before made it; `key`: the
    same for arguments that are one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    key: int


@dataclass(frozen=True)
class ModuleCall:
    """The arguments of a module, with a TensorSpec in place of each tensor."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, TensorSpec)]

    def at(self, larger: "ModuleCall", sequences: int) -> "ModuleCall":
        """Return the call with another number of samples, given this one, of two, and one of three: sizes
        that differ between them grow with it."""
        shapes = {a.key: (a.shape, b.shape) for a, b in zip(self.tensors, larger.tensors, strict=True)}

        def resize(spec: TensorSpec) -> TensorSpec:
            pairs = zip(*shapes[spec.key], strict=True)
            return replace(spec, shape=tuple(a + (b - a) * (sequences - 2) for a, b in pairs))

        args, kwargs = tree_map_only(TensorSpec, resize, (self.args, dict(self.kwargs)))
        return ModuleCall(args, kwargs)

    def split(self, dim: int, parts: int) -> "ModuleCall":
        """Return the call with one of so many parts, along a dim, of the tensors that have a gradient."""

        def part(spec: TensorSpec) -> TensorSpec:
            size = spec.shape[dim] // parts if spec.trained else spec.shape[dim]
            return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))

        args, kwargs = tree_map_only(TensorSpec, part, (self.args, dict(self.kwargs)))
        return ModuleCall(args, kwargs)


@dataclass(frozen=True)
class Recorded:
    """The first call of each module, and the shapes of the results of the whole model."""

    calls: Mapping[str, ModuleCall]
    results: Any


def record_calls(
    model: nn.Module, example: Example, names: Iterable[str], dtype: torch.dtype | None = None
) -> Recorded:
    """Run a forward of the example on fake tensors, with parameters of `dtype` (None: their own), and return
    what the modules were called with. Raises PlanError if the model cannot run so."""
    calls: dict[str, ModuleCall] = {}
    seen: list[Tensor] = []  # kept, so that no two tensors have the same id

    def spec(tensor: Tensor) -> TensorSpec:
        seen.append(tensor)
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(tensor))

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in calls:
                calls[name] = ModuleCall(
                    tree_map_only(Tensor, spec, args), tree_map_only(Tensor, spec, kwargs)
                )

        return hook

    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(record(name), with_kwargs=True))
        result = run_on_fakes(model, example, dtype)
    return Recorded(calls, tree_map_only(Tensor, spec, result))


def with_sizes(example: Example, sequences: int, seq_len: int | None) -> Example:
    """Return an example with another number of samples, its tensors' first size, and, where they are tokens
    [samples, tokens], another length."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    samples, length = tensors[0].shape[0], tokens_of(example)

    def resize(tensor: Tensor) -> Tensor:
        sizes = list(tensor.shape)
        if sizes and sizes[0] == samples:
            sizes[0] = sequences
        if seq_len and length and sizes[1:2] == [length] and not tensor.is_floating_point():
            sizes[1] = seq_len
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")

    resized: Example = tree_map_only(Tensor, resize, example)
    return resized


def tokens_of(example: Example) -> int:
    """Return the length of the sequences of an example of tokens; 0 for any other."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    return next((t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()), 0)


def kind_of(module: nn.Module, call: ModuleCall | None = None) -> tuple[object, ...]:
    """Return what decides how a module computes: its classes, the sizes of its weights, its plain attributes,
    and the arguments of its call. Modules of one kind have one trace."""

    def plain(value: object) -> bool:
        return isinstance(value, bool | int | float | str | None) or (
            isinstance(value, tuple | list) and all(plain(each) for each in value)
        )

    parts = [
        (
            name,
            type(part),
            tuple((key, tuple(p.shape), p.dtype) for key, p in part.named_parameters(recurse=False)),
            tuple(
                (key, repr(value))
                for key, value in vars(part).items()
                if plain(value) and key not in NUMBERS and not key.startswith("_")
            ),
        )
        for name, part in module.named_modules()
    ]
    shapes = [] if call is None else [repr(tree_map_only(TensorSpec, _shape, (call.args, dict(call.kwargs))))]
    return (*parts, *shapes)


def _shape(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype


def alone_on_fakes(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module whose parameters are tensors of the current fake mode, in `dtype` as FSDP
    gathers them; its buffers, and tensors in attributes, also in lists and mappings, have their own."""
    made: dict[int, Any] = {}
    for parameter in module.parameters():
        kept = dtype if parameter.is_floating_point() else parameter.dtype
        value = torch.empty(parameter.shape, dtype=kept, device="cpu")
        made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    held = (leaf for part in module.modules() for leaf in tree_leaves(vars(part)))
    for tensor in (leaf for leaf in held if isinstance(leaf, Tensor) and id(leaf) not in made):
        made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.deepcopy(module, made)


def make_arguments(
    call: ModuleCall, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return a call's arguments on tensors of the current fake mode, those with gradients in `dtype`, and the
    tensors that the caller holds for all modules: those without gradients, if others have one."""
    made: dict[int, Tensor] = {}
    held: list[Tensor] = []
    any_trained = any(spec.trained for spec in call.tensors)

    def make(spec: TensorSpec) -> Tensor:
        if spec.key not in made:
            kept = dtype if spec.trained else spec.dtype
            tensor = torch.empty(spec.shape, dtype=kept, device="cpu", requires_grad=spec.trained)
            # not a leaf, which autograd would keep alive; in a run only operators that need the input do
            made[spec.key] = tensor.clone() if spec.trained else tensor
            if any_trained and not spec.trained:
                held.append(tensor)
        return made[spec.key]

    args = tree_map_only(TensorSpec, make, call.args)
    kwargs = tree_map_only(TensorSpec, make, dict(call.kwargs))
    return args, kwargs, held
