"""Tracks the current unit, module and phase of a training step while its operations run.

Sources: the profiler labels of FSDP2, which name the action and the unit; forward hooks of modules; and
autograd, which numbers its nodes in the order in which the forward creates them. FSDP2 is not changed.
"""

import bisect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.parallel.plan.schema import Plan

# such as "FSDP::all_gather (layers.3)"; the first module if the unit has several, none for the model itself
UNIT_LABEL = re.compile(r"FSDP::\w+(?: \(([\w.]*)|$)")
OPTIMIZER_LABEL = "Optimizer.step"


class ModuleTracker:
    """Tracks the steps of one model.

    `labels`: the open labels, innermost last.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.labels: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
        self._running: list[str] = []
        self._backward_seen = False
        # Autograd's node count at each change of the running module, and the module: they map nodes to
        # modules.
        self._counts, self._modules = [0], [""]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track modules within the context."""
        # Global hooks run before a module's own, so a unit has begun before FSDP2 gathers it. A recompute
        # that stops early leaves its modules by an exception; always_call calls the hook then too.
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def follow_label(self, op: Any, args: tuple[Any, ...]) -> str:
        """Process an operation of the namespace `profiler`, which opens or closes a label. Returns the label
        that it closed, else ""."""
        if "enter" in op.__name__:
            self.labels.append(args[0])
            return ""
        return self.labels.pop() if self.labels else ""  # it was opened before tracking began

    @property
    def label(self) -> str:
        """The innermost open label; "" if none is open."""
        return self.labels[-1] if self.labels else ""

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs a backward."""
        return torch._C._current_graph_task_id() != -1

    @property
    def phase(self) -> str:
        """forward, backward, recompute (the forward of an activation-checkpointed module within the backward)
        or optimizer (after a backward, outside of modules)."""
        if self.in_backward:
            self._backward_seen = True
            return "recompute" if self._running else "backward"
        return "optimizer" if self._backward_seen and not self._running else "forward"

    @property
    def module(self) -> str:
        """The fqn of the module whose forward or backward runs; "" for the model itself and outside."""
        if self._running or not self.in_backward:
            return self._running[-1] if self._running else ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._modules[bisect.bisect_right(self._counts, node._sequence_nr()) - 1]

    @property
    def unit(self) -> str:
        """The unit whose parameters are gathered or whose gradients are reduced, else the unit that runs; ""
        outside of units."""
        # If a unit prefetches another, the innermost label names the other.
        if unit := self.unit_in(self.label):
            return unit
        module = self.module
        while module and module not in self._unit_of:
            module = module.rpartition(".")[0]
        return self._unit_of.get(module, "") if module else ""

    def unit_in(self, label: str) -> str:
        """Return the unit that a label names; "" if none."""
        match = UNIT_LABEL.match(label)
        return self._unit_of.get(match[1] or "", "") if match else ""

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module in self._names:
            self._running.append(self._names[module])
            self._count()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module in self._names and self._names[module] in self._running:
            while self._running.pop() != self._names[module]:
                pass
            self._count()

    def _count(self) -> None:
        self._counts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(self._running[-1] if self._running else "")
