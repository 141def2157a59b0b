"""FSDP2's order of work in one optimizer step, told to a sink: the only place that knows FSDP2's rules
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py, torch 2.11 to 2.13); and rows of
equal blocks: what a step needs follows from a step with a few blocks of each row."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from math import lcm
from typing import NamedTuple

from meshwright.parallel.plan.schema import (
    MicroBatch,
    ModelUnits,
    Plan,
    UnitPlan,
    keeps_parameters,
    last_places,
    leaves_parameters,
    micro_batch_kinds,
    prefetch_schedule,
    sums_whole_gradients,
    without_containers,
)


class StepSink:
    """What happens in a step, in the order in which the host launches it; a sink overrides what it
    needs.

    `phase`: forward or backward.
    """

    def enter(self, unit: UnitPlan, phase: str) -> None:
        """FSDP2's hook before a unit's first module runs."""

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """The all-gather of a unit starts. `again`: the forward of this micro batch has resharded it."""

    def copy_out(self, unit: UnitPlan, phase: str) -> None:
        """The all-gather is waited for and copied out."""

    def compute(self, module: str, phase: str) -> None:
        """A module's forward or backward."""

    def reshard(self, unit: UnitPlan, phase: str) -> None:
        """A unit's gathered parameters, or what the forward has left of them, are freed."""

    def leave(self, unit: UnitPlan) -> None:
        """FSDP2's hook after a unit's backward."""

    def sum(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """The whole gradients of a unit become its sums, or are added to them: by FSDP2, or by autograd if
        FSDP2 leaves the parameters alone."""

    def reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """The gradients of a unit, or their sums, are reduced."""

    def end(self, phase: str, micro_batch: MicroBatch) -> None:
        """A forward or a backward has ended. At the end of a backward FSDP2 waits for all collectives and
        drops all-gathers that no backward has used."""


class StepWalk:
    """A walk through the micro batches of a step.

    The modules before the first trained one have no backward: FSDP2's hooks before a unit's backward are on
    outputs that need a gradient, those after it on inputs that do. Where the inputs need none, in the units
    up to the first trained module, what follows a unit's backward happens in the final callback instead, in
    the order of the model's modules, here that of the forward
    (`FSDPState._root_post_backward_final_callback`).

    Attributes:
        sink: told what happens from now on
        gathered: units that are gathered now; some plans keep them from one micro batch to the next
    """

    def __init__(self, plan: Plan, sink: StepSink, has_backward: Callable[[Iterable[str]], bool]) -> None:
        """`has_backward`: whether any of these modules has a backward."""
        self.sink = sink
        self._plan, self._has_backward = plan, has_backward
        self._leaves = leaves_parameters(plan)
        self._computing = set(without_containers(plan.modules))
        place, last = {name: i for i, name in enumerate(plan.modules)}, last_places(plan.modules)
        self._begun: dict[str, UnitPlan] = {}  # by the module with which the forward begins with the unit
        self._finished: dict[str, list[UnitPlan]] = {name: [] for name in plan.modules}
        for unit in plan.units:
            self._begun[min(unit.modules, key=place.__getitem__)] = unit
            self._finished[plan.modules[max(last[name] for name in unit.modules)]].append(unit)
        self._ahead = {phase: prefetch_schedule(plan, phase) for phase in ("forward", "backward")}
        trained = (name for name in plan.modules if name in self._computing and has_backward((name,)))
        without_gradient = plan.modules[: place[next(trained)] + 1]  # modules whose inputs need none
        self._left_last = [self._begun[name] for name in without_gradient if name in self._begun]
        self.gathered, self._in_flight, self._resharded = set[str](), set[str](), set[str]()

    def step(self) -> None:
        """Walk through all micro batches."""
        for micro_batch, count in micro_batch_kinds(self._plan):
            for _ in range(count):
                self.forward(micro_batch)
                self.backward(micro_batch)

    def forward(self, micro_batch: MicroBatch) -> None:
        """Walk through a forward: gather each unit before its first module, reshard it after its last."""
        for module in self._plan.modules:
            if module in self._begun:
                self._enter(self._begun[module], "forward")
            if module in self._computing:
                self.sink.compute(module, "forward")
            for unit in self._finished[module]:
                if unit.reshard_after_forward is not False and not self._leaves:
                    self.gathered.discard(unit.name)
                    self._resharded.add(unit.name)
                    self.sink.reshard(unit, "forward")
        self.sink.end("forward", micro_batch)

    def backward(self, micro_batch: MicroBatch) -> None:
        """Walk through a backward: gather each unit before its last module, leave it after its first."""
        for module in reversed(self._plan.modules):
            if self._has_backward((module,)):
                for unit in self._finished[module]:  # their hooks are on one output, the inner's first
                    self._enter(unit, "backward")
                if module in self._computing:
                    self.sink.compute(module, "backward")
                if module in self._begun and self._begun[module] not in self._left_last:
                    self._leave(self._begun[module], micro_batch)
        for unit in self._left_last:
            self._leave(unit, micro_batch)
        self.sink.end("backward", micro_batch)
        self._in_flight.clear()
        self._resharded.clear()

    def _enter(self, unit: UnitPlan, phase: str) -> None:
        """Gather a unit unless it was prefetched, copy it out, and prefetch the next ones."""
        self.sink.enter(unit, phase)
        self._gather(unit, phase)
        if unit.name in self._in_flight:
            self._in_flight.remove(unit.name)
            self.gathered.add(unit.name)
            self.sink.copy_out(unit, phase)
        for other in self._ahead[phase][unit.name]:
            self._gather(other, phase)

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        """Start an all-gather unless the unit is gathered, in flight, or not needed by the backward."""
        unneeded = self._leaves or (phase == "backward" and not unit.unshard_in_backward)
        if not (unneeded or unit.name in self._in_flight or unit.name in self.gathered):
            self._in_flight.add(unit.name)
            self.sink.gather(unit, phase, unit.name in self._resharded)

    def _leave(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """After a unit's backward, or without one: begin its sums or add to them, free its parameters unless
        they are kept, and reduce its gradients or the sums. FSDP2 adds before it frees, and casts the first
        gradients after."""
        has_backward = self._has_backward(unit.modules)
        sums = has_backward and (self._leaves or sums_whole_gradients(unit, self._plan))
        if has_backward:
            self.sink.leave(unit)
        if sums and not micro_batch.first:
            self.sink.sum(unit, micro_batch)
        if micro_batch.last or not keeps_parameters(unit, self._plan):
            self.gathered.discard(unit.name)
            self.sink.reshard(unit, "backward")
        if sums and micro_batch.first:
            self.sink.sum(unit, micro_batch)
        if has_backward and not self._leaves and (micro_batch.last or not sums):
            self.sink.reduce(unit, micro_batch)


class InnerBlocks(NamedTuple):
    """The inner blocks of a row, which are equal to the one before them and to the one after them.

    All-gathers use their buffers in turn, so the number of blocks is a multiple of the `period`.
    """

    before: str
    blocks: tuple[str, ...]
    after: str
    period: int


def inner_blocks(plan: Plan, kind: Callable[[str], object], edge: int) -> list[InnerBlocks]:
    """Return the inner blocks of each row of neighboring modules of the same `kind`, with a unit of its own
    each and the same settings. A plan with lists of prefetched units, which can name any block, has none.

    `edge`: blocks at each end of a row that are not inner ones, besides those that are prefetched.
    """
    unit_of = {module: unit for unit in plan.units for module in unit.modules}

    def full_kind(name: str) -> object:
        unit = unit_of[name]
        return (kind(name), unit.settings) if unit.modules == (name,) else name

    rows = list[InnerBlocks]()
    for _, row in groupby(plan.modules, full_kind):
        names = list(row)
        forward, backward = unit_of[names[0]].forward_prefetch, unit_of[names[0]].backward_prefetch
        if isinstance(forward, tuple) or isinstance(backward, tuple):
            return []
        begin, period = edge + max(forward, backward), lcm(forward + 1, max(1, backward))
        inner = max(0, len(names) - 2 * begin)
        if count := inner - inner % period:
            blocks = tuple(names[begin : begin + count])
            rows.append(InnerBlocks(names[begin - 1], blocks, names[begin + count], period))
    return rows


def shortened(model: ModelUnits, blocks: frozenset[str]) -> ModelUnits:
    """Return the model without some blocks, each of which is a unit of its own."""
    return replace(
        model,
        modules={name: size for name, size in model.modules.items() if name not in blocks},
        units=[modules for modules in model.units if blocks.isdisjoint(modules)],
        compiled=model.compiled - blocks,
        checkpointed=model.checkpointed - blocks,
    )


def without(plan: Plan, blocks: frozenset[str]) -> Plan:
    """Return the plan without some blocks."""
    modules = tuple(name for name in plan.modules if name not in blocks)
    return replace(plan, modules=modules, units=tuple(unit for unit in plan.units if unit.name not in blocks))
