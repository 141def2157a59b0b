"""Profiler annotations for the forward and backward of each FSDP unit. FSDP2 itself annotates its
all-gathers, waits and reductions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.plan.schema import Plan, without_containers


def name_units(model: nn.Module, plan: Plan) -> list[RemovableHandle]:
    """Annotate every unit's work as "UNIT forward" and "UNIT backward", compiled or not, until the returned
    handles are removed.

    The ranges begin after the all-gather that FSDP2's hooks wait for, and end before those reshard and
    reduce; each module of a unit has its own ranges, without those that contain others. Hooks record them
    outside of dynamo's graphs, so nothing recompiles.
    """
    untraced = torch.compiler.disable
    handles = []
    unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
    for name in without_containers(plan.modules):
        module, hooks = model.get_submodule(name), _ModuleHooks(unit_of[name])
        handles += [
            module.register_forward_pre_hook(untraced(hooks.before_forward)),
            # runs before FSDP2's hook
            module.register_forward_hook(untraced(hooks.after_forward), prepend=True),
            # runs after it
            module.register_forward_hook(untraced(hooks.before_backward)),
        ]
    return handles


class _ModuleHooks:
    """The hooks of one module."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._open: record_function | None = None
        self._ends: list[RemovableHandle] = []  # of pending backwards; removed, as parameters would keep them

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Begin the forward range, after FSDP2's all-gather. The backward range ends when the gradients of
        the inputs are computed, or those of the parameters if no input needs one, as for an embedding."""
        ends = _differentiable(inputs) or [p for p in module.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and ends:
            self._ends.append(register_multi_grad_hook(ends, self._end_backward))
        self._begin("forward")

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """End the forward range, before FSDP2 reshards."""
        self._end()

    def before_backward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Begin the backward range in a hook on the output, after FSDP2's own hook, which gathers."""
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
