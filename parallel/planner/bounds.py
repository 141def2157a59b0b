"""Bounds of plans, by their choices: seconds of a step that waits for nothing, and the memory of two moments.

They are those of a model with few of its equal blocks, each of which counts as many as it stands for, and are
traced with one sequence, whose graph has no more copies than that of several.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.planner.cost_model import StepTimes, step_times
from meshwright.parallel.planner.hardware import HostMemory, Machines
from meshwright.parallel.planner.memory_model import LeastMemory, host_memory, least_step_memory
from meshwright.parallel.planner.search_space import GATHERING, Choices, with_choices, with_gathering
from meshwright.parallel.planner.step_time import Load, step_load
from meshwright.parallel.planner.walk import inner_blocks, shortened
from meshwright.parallel.planner.workload import ModelWorkload

T = TypeVar("T")
EDGE = 1  # blocks at each end of a row of equal ones that a shortened model has, besides prefetched ones


def make_chosen(config: ParallelConfig, model: ModelUnits, shape: RunShape, choices: Choices) -> Plan:
    """Return the complete plan of the choices. Raises PlanError if they are not legal."""
    chosen, sizes = with_choices(config, shape, choices)
    return with_gathering(make_plan(chosen, model, sizes), config, choices)


class _Short(NamedTuple):
    """A config and a model with few of its equal blocks; each counts as often as `repeats` says."""

    config: ParallelConfig
    model: ModelUnits
    repeats: dict[str, int]


class Bounds:
    """What is known of choices without a prediction; each part is computed once for all choices that it does
    not depend on."""

    def __init__(
        self,
        config: ParallelConfig,
        model: ModelUnits,
        shape: RunShape,
        machines: Machines,
        trace: Callable[[Plan], ModelWorkload],
    ) -> None:
        self._config, self._model, self._shape = config, model, shape
        self._machines, self._trace = machines, trace
        self._shorts = dict[str, _Short]()  # by mode of activation checkpointing
        self._made = _once_for_all(self._make)
        self._work = _once_for_all(self._traced)
        self._times = _once_for_all(self._timed, "reshard_after_forward")
        self.host: Callable[[Choices], HostMemory] = _once_for_all(
            lambda choices: host_memory(self._made(choices), self._work(choices))
        )
        self.load: Callable[[Choices], Load] = _once_for_all(
            lambda choices: step_load(self.plan(choices), self._times(choices), self._work(choices).repeats),
            *(key for key in GATHERING if key != "prefetch"),
        )
        self.memory: Callable[[Choices], LeastMemory] = cache(
            lambda choices: least_step_memory(self.plan(choices), self._work(choices))
        )

    def plan(self, choices: Choices) -> Plan:
        """Return the plan of the shortened model. Raises PlanError if the choices are not legal: when units
        gather and reduce makes no plan illegal, so of those that differ in nothing else one is checked."""
        return with_gathering(self._made(choices), self._config, choices)

    def has_equal_blocks(self, choices: Choices) -> bool:
        """Whether all units that use activation checkpointing compute the same."""
        work, checkpointed = self._work(choices), self._model.checkpointed
        units = (unit.modules for unit in self._made(choices).units if checkpointed.issuperset(unit.modules))
        return len({tuple(map(work.kind, modules)) for modules in units}) == 1

    def _make(self, choices: Choices) -> Plan:
        mode = choices.activation_checkpoint
        if mode not in self._shorts:
            self._shorts[mode] = self._shorten(choices)
        config, model, _ = self._shorts[mode]
        chosen, sizes = with_choices(config, self._shape, choices)
        return make_plan(chosen, model, sizes)

    def _shorten(self, choices: Choices) -> _Short:
        """Leave out the inner ones of equal blocks."""
        plan = make_chosen(self._config, self._model, self._shape, choices)
        rows = inner_blocks(plan, self._trace(of_one_sequence(plan)).kind, EDGE)
        left_out = frozenset[str]().union(*(row.blocks for row in rows))
        config, requested = self._config, choices.activation_checkpoint_blocks
        if requested:
            blocks = [unit for unit in plan.units if self._model.checkpointed.issuperset(unit.modules)]
            left = sum(left_out.isdisjoint(unit.modules) for unit in blocks[:requested])
            config = replace(config, activation_checkpoint_blocks=left)
        repeats = {row.before: 1 + len(row.blocks) for row in rows}
        return _Short(config, shortened(self._model, left_out), repeats)

    def _traced(self, choices: Choices) -> ModelWorkload:
        work = self._trace(of_one_sequence(self._made(choices)))
        return replace(work, repeats=self._shorts[choices.activation_checkpoint].repeats)

    def _timed(self, choices: Choices) -> StepTimes:
        machines = self._machines
        return step_times(self.plan(choices), self._work(choices), machines.kind, machines.per_node)


def of_one_sequence(plan: Plan) -> Plan:
    """Return the plan with micro batches of one sequence, otherwise as it is."""
    return replace(plan, micro_batch_size=1)


def _once_for_all(find: Callable[[Choices], T], *also: str) -> Callable[[Choices], T]:
    """Cache a function of what is computed, and of these choices: the first of all choices that are equal in
    both stands for them."""
    cached, first = cache(find), dict[Any, Choices]()

    def find_once(choices: Choices) -> T:
        key = (choices.computed, *(choices[name] for name in also))
        return cached(first.setdefault(key, choices))

    return find_once
