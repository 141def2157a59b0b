"""Where a training step is while its operations run: which unit, which module, which phase.

FSDP2 says what it does, for which unit, in the labels that a profiler shows; modules say when their forward
begins and ends; autograd numbers its nodes in the order in which the forward makes them. Nothing of FSDP2 is
changed or replaced.
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

# as in "FSDP::all_gather (layers.3)"; of several modules, the first
UNIT_LABEL = re.compile(r"FSDP::\w+ \(([\w.]+)")
OPTIMIZER_LABEL = "Optimizer.step"


class ModuleTracker:
    """Follows the steps of one model.

    `labels`: those that are open, innermost last. `phase`: forward, backward, recompute (an
    activation-checkpointed module's forward within the backward) or optimizer (everything after a backward
    that is none of the others).
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.labels: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
        self._running: list[str] = []
        self._backward_seen = False
        # Autograd's count of nodes whenever another module began to run, and which: whose node is whose.
        self._counts, self._modules = [0], [""]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Listen to modules as long as the context lasts."""
        # Global hooks run before a module's own, so a unit has begun before FSDP2 gathers it. A recomputation
        # that has what it needs leaves its modules by an exception: always_call hears of that too.
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read_label(self, op: Any, args: tuple[Any, ...]) -> str:
        """Take in an operation of the namespace `profiler`, which opens or closes a label. Returns one that
        it closed."""
        if "enter" in op.__name__:
            self.labels.append(args[0])
            return ""
        return self.labels.pop() if self.labels else ""  # one opened before we listened

    @property
    def label(self) -> str:
        """The innermost open label, "" outside."""
        return self.labels[-1] if self.labels else ""

    @property
    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    @property
    def phase(self) -> str:
        if self.in_backward:
            self._backward_seen = True
            return "recompute" if self._running else "backward"
        return "optimizer" if self._backward_seen and not self._running else "forward"

    @property
    def module(self) -> str:
        """fqn of the module that runs, or whose backward runs; "" for the model itself and outside."""
        if self._running or not self.in_backward:
            return self._running[-1] if self._running else ""
        node = torch._C._current_autograd_node()
        return (
            self._modules[bisect.bisect_right(self._counts, node._sequence_nr()) - 1]
            if node is not None
            else ""
        )

    @property
    def unit(self) -> str:
        """The unit whose parameters are gathered or whose gradients are reduced, else the one that runs; ""
        outside."""
        # A unit that starts the all-gather of another is itself not in the innermost label: the other is.
        if unit := self.unit_in(self.label):
            return unit
        module = self.module
        while module and module not in self._unit_of:
            module = module.rpartition(".")[0]
        return self._unit_of.get(module, "")

    def unit_in(self, label: str) -> str:
        """The unit that a label names, "" if none."""
        match = UNIT_LABEL.match(label)
        return self._unit_of[match[1]] if match else ""

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
