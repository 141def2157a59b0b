"""FSDP2's order of work in one optimizer step, told to a sink: the only place that knows FSDP2's rules
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py, torch 2.11 to 2.13)."""

from collections.abc import Callable, Iterable
from typing import Protocol

from meshwright.parallel.plan.schema import (
    MicroBatch,
    Plan,
    UnitPlan,
    keeps_parameters,
    prefetch_schedule,
    sums_whole_gradients,
)


class StepSink(Protocol):
    """What happens in a step, in the order in which the host launches it. `phase`: forward or backward."""

    def enter(self, unit: UnitPlan, phase: str) -> None:
        """FSDP2's hook before a unit's first module runs."""

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """The all-gather of a unit starts. `again`: the forward of this micro batch has resharded it."""

    def copy_out(self, unit: UnitPlan, phase: str) -> None:
        """The all-gather is waited for and copied out."""

    def compute(self, module: str, phase: str) -> None:
        """A module's forward or backward."""

    def reshard(self, unit: UnitPlan, phase: str) -> None:
        """A unit's gathered parameters are freed."""

    def leave(self, unit: UnitPlan, micro_batch: MicroBatch, sums: bool, reduces: bool) -> None:
        """A unit's backward ends. `sums`: its whole gradients are summed; `reduces`: they, or the sums, are
        reduced."""

    def end(self, phase: str, micro_batch: MicroBatch) -> None:
        """A forward or a backward has ended."""


class StepWalk:
    """A walk through the micro batches of a step.

    Args:
        gathered: units that are gathered now; some plans keep them from one micro batch to the next
    """

    def __init__(self, plan: Plan, sink: StepSink, has_backward: Callable[[Iterable[str]], bool]) -> None:
        """`has_backward`: whether any of these modules has a backward."""
        self.plan, self.sink, self.has_backward = plan, sink, has_backward
        self.unit_of = {module: unit for unit in plan.units for module in unit.modules}
        self.modules: dict[str, list[str]] = {}  # by unit, in the order of the forward
        for module in plan.modules:
            self.modules.setdefault(self.unit_of[module].name, []).append(module)
        self.ahead = {phase: prefetch_schedule(plan, phase) for phase in ("forward", "backward")}
        self.gathered, self.in_flight, self.resharded = set[str](), set[str](), set[str]()

    def forward(self, micro_batch: MicroBatch) -> None:
        """Walk through a forward: gather each unit before its first module, reshard it after its last."""
        for module in self.plan.modules:
            unit = self.unit_of[module]
            if module == self.modules[unit.name][0]:
                self._enter(unit, "forward")
            self.sink.compute(module, "forward")
            if module == self.modules[unit.name][-1] and unit.reshard_after_forward is not False:
                self.gathered.discard(unit.name)
                self.resharded.add(unit.name)
                self.sink.reshard(unit, "forward")
        self.sink.end("forward", micro_batch)

    def backward(self, micro_batch: MicroBatch) -> None:
        """Walk through a backward: gather each unit before its last module, reduce it after its first."""
        for module in reversed(self.plan.modules):
            unit = self.unit_of[module]
            if module == self.modules[unit.name][-1]:
                self._enter(unit, "backward")
            self.sink.compute(module, "backward")
            if module == self.modules[unit.name][0]:
                self._leave(unit, micro_batch)
        self.sink.end("backward", micro_batch)
        if micro_batch.last:
            self.gathered.clear()
        self.in_flight.clear()
        self.resharded.clear()

    def _enter(self, unit: UnitPlan, phase: str) -> None:
        """Gather a unit unless it was prefetched, copy it out, and prefetch the next ones."""
        self.sink.enter(unit, phase)
        self._gather(unit, phase)
        if unit.name in self.in_flight:
            self.in_flight.remove(unit.name)
            self.gathered.add(unit.name)
            self.sink.copy_out(unit, phase)
        for other in self.ahead[phase][unit.name]:
            self._gather(other, phase)

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        """Start an all-gather unless the unit is gathered, in flight, or not needed by the backward."""
        unneeded = phase == "backward" and not unit.unshard_in_backward
        if not (unneeded or unit.name in self.in_flight or unit.name in self.gathered):
            self.in_flight.add(unit.name)
            self.sink.gather(unit, phase, unit.name in self.resharded)

    def _leave(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Free a unit's parameters unless they are kept, and sum or reduce its gradients."""
        sums = sums_whole_gradients(unit, self.plan)
        keeps = keeps_parameters(unit, self.plan) and (
            self.has_backward(unit.modules) or unit.reshard_after_forward is False
        )
        if micro_batch.last or not keeps:
            self.gathered.discard(unit.name)
            self.sink.reshard(unit, "backward")
        self.sink.leave(unit, micro_batch, sums, micro_batch.last or not sums)
