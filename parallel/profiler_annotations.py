"""Names for what each FSDP unit computes, in a profile. What FSDP2 does itself (gather, wait, reduce) it
names itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.plan.schema import Plan


def name_units(model: nn.Module, plan: Plan) -> list[RemovableHandle]:
    """Record every unit's work as "UNIT forward" and "UNIT backward", compiled or not, until all handles are
    removed.

    The ranges begin behind the gathering that FSDP2's hooks wait for, and end before they reshard and reduce;
    each module of a unit has its own. They are made by hooks, which dynamo runs outside its graphs: nothing
    is compiled anew.
    """
    outside = torch.compiler.disable
    handles = []
    for unit in plan.units:
        for name in unit.modules:
            module, named = model.get_submodule(name), _Named(unit.name)
            handles += [
                module.register_forward_pre_hook(outside(named.before_forward)),
                # before FSDP2's
                module.register_forward_hook(outside(named.after_forward), prepend=True),
                module.register_forward_hook(outside(named.before_backward)),
            ]  # after it
    return handles


class _Named:
    """The hooks of one module."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._open: record_function | None = None
        self._ends: list[RemovableHandle] = []  # of the backwards to come; parameters would keep them

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """FSDP2 has gathered the parameters. The backward ends once the gradients of the inputs are there;
        those of the parameters, where no input has one, as of an embedding."""
        ends = _differentiable(inputs) or [p for p in module.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and ends:
            self._ends.append(register_multi_grad_hook(ends, self._end_backward))
        self._begin("forward")

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._end()

    def before_backward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Behind FSDP2's own hook on the output, which gathers."""
        for tensor in _differentiable(output):
            tensor.register_hook(lambda gradient: self._begin("backward"))

    def _end_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._end()
        self._ends.pop().remove()

    def _begin(self, phase: str) -> None:
        if self._open is None:
            self._open = record_function(f"{self._unit} {phase}")
            self._open.__enter__()

    def _end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]
