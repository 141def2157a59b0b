"""The search for the best plan: branch and bound over all legal plans, by predicted memory and step time.

Keys that have a value in the config keep it; keys at `auto` are searched.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from operator import attrgetter
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import PredictedMemory
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.mistakes import key_line
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.planner.cost_model import StepTimes, step_times
from meshwright.parallel.planner.devices import Devices
from meshwright.parallel.planner.host_memory import HostMemory, host_memory
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.parallel.planner.search_space import (
    CHECKPOINTING,
    CHOICES,
    Bounds,
    combinations,
    part_s,
    smallest,
    with_choices,
    with_gathering,
)
from meshwright.parallel.planner.step_time import simulate_step, step_seconds
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.unit_bytes import least_bytes, whole_gradient_bytes
from meshwright.parallel.planner.workload import ModelWorkload

PARTIAL_MODES = ("selective", "full", "offload")  # also tried for the fewest blocks that fit
EQUAL = 0.01  # rates that differ by less are a tie, which the simpler plan wins
MIN_TIMED = 12  # plans simulated before any is pruned, for the list of runners-up
NEAREST = 24  # plans whose memory is predicted in full if none fits, to find the smallest


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One legal plan.

    Args:
        choices: value by key: tp, cp, cp_exchange, dp_replicate, dp_shard, activation_checkpoint,
            activation_checkpoint_blocks (number of blocks; 0 with none), reshard_after_forward,
            reduce_gradients, reshard_after_backward, prefetch, micro_batch_size
        plan: the complete plan
        lower_bound_s: seconds of a step in which all FSDP communication is hidden
        needed_bytes: memory per rank including allocator overhead; if `memory` is None, a lower bound without
            that overhead
        host: host memory per rank
        memory: by kind; None if the bounds decided without it
        timeline: the simulated step; None for a plan that does not fit or was pruned
        at_least: the number of blocks is only a lower bound; the fewest that fit are still to be found
    """

    choices: Mapping[str, Any]
    plan: Plan
    lower_bound_s: float
    needed_bytes: int
    host: HostMemory = field(default_factory=HostMemory)
    memory: PredictedMemory | None = None
    timeline: Timeline | None = None
    at_least: bool = False

    def rate(self) -> float:
        """Return sequences per second of all ranks; an upper bound if the plan was not simulated."""
        return self.plan.global_batch_size / (self.timeline.step_s if self.timeline else self.lower_bound_s)


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        ranked: simulated plans that fit, the best first
        does_not_fit: plans that do not fit, the smallest first
        pruned: plans whose memory was not predicted, because a lower bound of their step, or their simulated
            step, is slower than the best plan
    """

    ranked: tuple[Candidate, ...]
    does_not_fit: tuple[Candidate, ...]
    pruned: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The chosen plan."""
        return self.ranked[0]


def search(
    config: ParallelConfig,
    model: ModelUnits,
    shape: RunShape,
    machines: Devices,
    trace: Callable[[Plan], ModelWorkload],
) -> SearchResult:
    """Search the legal plans by branch and bound. `ranked` of the result is empty if none fits.

    Raises:
        PlanError: no combination is legal, or has the host memory (the message is that of the simplest one),
            or `selective_policy` is invalid
    """
    if config.activation_checkpoint == "auto" and (
        mistakes := [*policy_mistakes(config.selective_policy, model.attention_ops)]
    ):
        raise PlanError("\n".join(map(key_line, mistakes)))
    state = _Search(config, model, shape, machines, trace)
    with _without_collector():
        for candidate in sorted(state.legal_candidates(), key=lambda c: (-c.rate(), _complexity(c))):
            state.classify(candidate)
    state.does_not_fit.sort(key=attrgetter("needed_bytes"))
    if not state.ranked:
        nearest = [
            candidate if candidate.memory else state.evaluate(candidate)
            for candidate in state.does_not_fit[:NEAREST]
        ]
        state.does_not_fit[:NEAREST] = sorted(nearest, key=attrgetter("needed_bytes"))
    return SearchResult(tuple(_ranked(state.ranked)), tuple(state.does_not_fit), tuple(state.pruned))


def check_legal(config: ParallelConfig, model: ModelUnits, shape: RunShape, gpus_per_node: int) -> None:
    """Raise the PlanError of the simplest combination if none is legal. Needs no machine and no traces."""
    mistakes: list[PlanError] = []
    for choices in combinations(config, shape, gpus_per_node):
        chosen, sizes = with_choices(config, shape, choices)
        try:
            make_plan(chosen, model, sizes)
        except PlanError as error:
            mistakes.append(error)
        else:
            return
    raise mistakes[0]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which would take a third of the search's time: it goes through the
    search's millions of small objects, which are not in cycles, again and again. The compiler's traces leave
    some cycles; they are collected afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def least_memory(config: ParallelConfig, shape: RunShape, blocks: int) -> tuple[ParallelConfig, RunShape]:
    """Return config and shape with all open keys except tp set to the values that need the least memory.
    `blocks` is the model's number of blocks."""
    least: dict[str, Any] = {
        "dp_replicate": 1,
        "activation_checkpoint": "full",
        "reshard_after_forward": True,
        "reduce_gradients": "every_micro_batch",
        "reshard_after_backward": True,
        "forward_prefetch": 1,
        "backward_prefetch": 1,
    }
    if config.activation_checkpoint != "none":
        least["activation_checkpoint_blocks"] = blocks
    closed: dict[str, Any] = {key: value for key, value in least.items() if getattr(config, key) == "auto"}
    micro_batch_size = 1 if shape.micro_batch_size == "auto" else shape.micro_batch_size
    return dataclasses.replace(config, **closed), dataclasses.replace(
        shape, micro_batch_size=micro_batch_size
    )


@dataclasses.dataclass(eq=False)
class _Search:
    """The state of a search: its input, the classified candidates, and caches."""

    config: ParallelConfig
    model: ModelUnits
    shape: RunShape
    machines: Devices
    trace: Callable[[Plan], ModelWorkload]
    ranked: list[Candidate] = field(default_factory=list)
    does_not_fit: list[Candidate] = field(default_factory=list)
    pruned: list[Candidate] = field(default_factory=list)
    # by all choices except resharding, reducing and prefetching, which `with_gathering` changes
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    # by all choices except resharding, reducing and prefetching, which do not change the bounds
    bounds: dict[tuple[Any, ...], Bounds] = field(default_factory=dict)
    # by the same choices as `plans`, which decide what is computed
    works: dict[tuple[Any, ...], ModelWorkload] = field(default_factory=dict)
    # by all choices
    memories: dict[tuple[Any, ...], PredictedMemory] = field(default_factory=dict)
    steps_s: dict[tuple[Any, ...], float] = field(default_factory=dict)
    # fewest blocks that fit, by the same choices without the number of blocks; the first resharding and
    # prefetching tried decides
    fewest: dict[tuple[Any, ...], int] = field(default_factory=dict)
    # choices with which the plan fits without activation checkpointing
    fits_with_none: set[tuple[Any, ...]] = field(default_factory=set)
    best_rate: float = 0.0

    def legal_candidates(self) -> Iterator[Candidate]:
        """Yield all legal plans: with activation checkpointing for all blocks (or the number in the config),
        and for the fewest blocks that could fit."""
        mistakes: list[PlanError] = []
        on_hosts: list[PlanError] = []
        any_legal = False
        for choices in combinations(self.config, self.shape, self.machines.gpus_per_node):
            try:
                plan = self._plan(choices)
            except PlanError as error:
                mistakes.append(error)
                continue
            for candidate in (self._with_all_blocks(choices, plan), self._with_fewest_blocks(choices, plan)):
                if candidate and (mistake := self._host_mistake(candidate)):
                    on_hosts.append(mistake)
                elif candidate:
                    any_legal = True
                    yield candidate
        if not any_legal:
            raise (on_hosts or mistakes)[0]

    def classify(self, candidate: Candidate) -> None:
        """Add a candidate to `ranked`, `does_not_fit` or `pruned`, and simulate it if it can be the best.
        Candidates must come in the order of their bounds, the fastest first."""
        if not candidate.at_least and not self._fits(candidate):
            self.does_not_fit.append(candidate)
        elif self._is_slower(candidate) or self._is_slower(
            candidate := self._with_simulated_bound(candidate)
        ):
            self.pruned.append(candidate)
        elif not candidate.at_least:
            evaluated = self.evaluate(candidate)
            (self.ranked if evaluated.timeline else self.does_not_fit).append(evaluated)
            self.best_rate = max(self.best_rate, evaluated.rate() if evaluated.timeline else 0.0)
            if evaluated.timeline and candidate.choices["activation_checkpoint"] == "none":
                self.fits_with_none.add(_without_checkpointing(candidate.choices))
        elif _without_checkpointing(candidate.choices) not in self.fits_with_none and (
            settled := self._settle_blocks(candidate)
        ):
            self.classify(settled)

    def evaluate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its memory and, if it fits, its simulated step."""
        memory = self._memory(candidate.choices, candidate.plan)
        needed = self.machines.needed_bytes(memory, candidate.host)
        evaluated = dataclasses.replace(candidate, memory=memory, needed_bytes=needed)
        if not self._fits(evaluated):
            return evaluated
        return dataclasses.replace(
            evaluated, timeline=simulate_step(*self._timed(candidate.choices, candidate.plan))
        )

    def _with_simulated_bound(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the simulated step as its lower bound, which costs less than its memory:
        with the fewest blocks that could fit, if they are still to be counted."""
        if len(self.ranked) < MIN_TIMED:
            return candidate
        plan = self._plan(candidate.choices) if candidate.at_least else candidate.plan
        return dataclasses.replace(candidate, lower_bound_s=self._step_s(candidate.choices, plan))

    def _is_slower(self, candidate: Candidate) -> bool:
        return candidate.rate() < self.best_rate * (1 - EQUAL) and len(self.ranked) >= MIN_TIMED

    def _plan(self, choices: Mapping[str, Any]) -> Plan:
        """Return the plan of the choices. When units gather and reduce makes no plan illegal: of the
        plans that differ in nothing else only one is made and checked."""
        key = _plan_key(choices)
        if key not in self.plans:
            config, shape = with_choices(self.config, self.shape, choices)
            self.plans[key] = make_plan(config, self.model, shape)
        return with_gathering(self.plans[key], self.config, choices)

    def _work(self, choices: Mapping[str, Any], plan: Plan) -> ModelWorkload:
        key = _plan_key(choices)
        if key not in self.works:
            self.works[key] = self.trace(plan)
        return self.works[key]

    def _memory(self, choices: Mapping[str, Any], plan: Plan) -> PredictedMemory:
        key = tuple(choices.values())
        if key not in self.memories:
            self.memories[key] = predict_step_memory(plan, self._work(choices, plan))
        return self.memories[key]

    def _step_s(self, choices: Mapping[str, Any], plan: Plan) -> float:
        key = tuple(choices.values())
        if key not in self.steps_s:
            self.steps_s[key] = step_seconds(*self._timed(choices, plan))
        return self.steps_s[key]

    def _timed(self, choices: Mapping[str, Any], plan: Plan) -> tuple[Plan, StepTimes]:
        kind, per_node = self.machines.kind, self.machines.gpus_per_node
        return plan, step_times(plan, self._work(choices, plan), kind, per_node)

    def _blocks(self, plan: Plan) -> int:
        """The number of units that can use activation checkpointing."""
        return sum(self.model.checkpointed.issuperset(unit.modules) for unit in plan.units)

    def _with_all_blocks(self, choices: Mapping[str, Any], plan: Plan) -> Candidate:
        """Return the candidate with activation checkpointing for all blocks, or the config's number."""
        requested, blocks = self.config.activation_checkpoint_blocks, self._blocks(plan)
        treated = (
            0
            if choices["activation_checkpoint"] == "none"
            else blocks
            if requested == "auto"
            else min(requested, blocks)
        )
        return self._candidate({**choices, "activation_checkpoint_blocks": treated}, plan)

    def _candidate(self, choices: Mapping[str, Any], plan: Plan) -> Candidate:
        bounds = self._bounds_of(choices, plan)
        in_order = {name: choices[name] for name in CHOICES}
        needed = bounds.needed_bytes + whole_gradient_bytes(plan, self._work(choices, plan))
        return Candidate(in_order, plan, bounds.lower_bound_s, needed, bounds.host)

    def _bounds_of(self, choices: Mapping[str, Any], plan: Plan) -> Bounds:
        key = _plan_key(choices)
        if key not in self.bounds:
            work, (_, times) = self._work(choices, plan), self._timed(choices, plan)
            self.bounds[key] = Bounds(
                times,
                times.step_lower_bound_s(plan.accumulation),
                least_bytes(plan, work),
                host_memory(plan, work),
            )
        return self.bounds[key]

    def _with_fewest_blocks(self, choices: Mapping[str, Any], plan: Plan) -> Candidate | None:
        """Return the candidate with a lower bound of the fewest blocks that fit; its plan is that of all
        blocks. None if all are needed, the mode has no partial form, or the config sets the number."""
        mode, blocks = choices["activation_checkpoint"], self._blocks(plan)
        if mode not in PARTIAL_MODES or self.config.activation_checkpoint_blocks != "auto" or blocks < 2:
            return None
        treated = self._bounds_of({**choices, "activation_checkpoint_blocks": blocks}, plan)
        keeping = {**choices, "activation_checkpoint": "none", "activation_checkpoint_blocks": 0}
        kept = self.bounds.get((*_without_gathering(keeping), 0)) or self._bounds_of(
            keeping, self._plan(keeping)
        )
        available = self.machines.available_bytes - whole_gradient_bytes(plan, self._work(choices, plan))
        excess = kept.needed_bytes - available
        share = max(excess / max(kept.needed_bytes - treated.needed_bytes, 1), 1 / blocks)
        if (count := math.ceil(share * blocks)) >= blocks:
            return None
        in_order = {name: choices.get(name, count) for name in CHOICES}
        lower_bound_s = part_s(kept, treated, share, plan.accumulation)
        needed = min(kept.needed_bytes, self.machines.available_bytes)
        return Candidate(in_order, plan, lower_bound_s, needed, at_least=True)

    def _settle_blocks(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with the fewest blocks that fit; memory grows with every block fewer. None if
        all are needed (a separate candidate), if even all do not fit, or if host memory is too small."""
        key, blocks = _without_gathering(candidate.choices), self._blocks(candidate.plan)
        needed: dict[int, int] = {}

        def with_blocks(count: int) -> Candidate:
            choices = {**candidate.choices, "activation_checkpoint_blocks": count}
            return self._candidate(choices, self._plan(choices))

        def fits(count: int) -> bool:
            choices = {**candidate.choices, "activation_checkpoint_blocks": count}
            memory = self._memory(choices, self._plan(choices))
            needed[count] = self.machines.needed_bytes(memory, HostMemory())
            return self.machines.fits(needed[count], HostMemory())  # of the device

        # The resharding and prefetching tried first need the least memory: the others never need fewer
        # blocks.
        least = max(candidate.choices["activation_checkpoint_blocks"], self.fewest.get(key, 0))
        if least >= blocks or self._is_slower(with_blocks(least)):
            return with_blocks(least) if least < blocks else None
        count = blocks
        if fits(blocks - 1):
            # the allocator reserves a share in addition to what is saved
            spare = (self.machines.available_bytes - needed[blocks - 1]) / (
                1 + self.machines.kind.reserved_share
            )
            keeping = (*_without_gathering({**candidate.choices, "activation_checkpoint": "none"}), 0)
            saved = max(
                1, (self.bounds[keeping].needed_bytes - self.bounds[*key, blocks].needed_bytes) / blocks
            )
            count = smallest(least, blocks - 1, blocks - 1 - int(spare / saved), fits)
        self.fewest.setdefault(key, count)
        if count == blocks:
            return None
        settled = with_blocks(count)
        return None if self._host_mistake(settled) else settled

    def _host_mistake(self, candidate: Candidate) -> PlanError | None:
        """Return why the host rules a candidate out. Offloading to the device's own memory saves nothing."""
        machines, problem = self.machines, self.machines.host_problem(candidate.host)
        if machines.host_bytes is None and candidate.host.activations:
            problem = (
                f"parallel.activation_checkpoint=offload: {machines.kind.name} has no other memory: use full"
            )
        return PlanError(problem) if problem else None

    def _fits(self, candidate: Candidate) -> bool:
        return self.machines.fits(candidate.needed_bytes, candidate.host)


def _without(choices: Mapping[str, Any], *keys: str) -> tuple[Any, ...]:
    """Return the values of the choices except `keys` and the number of blocks, which depends on others."""
    left_out = {*keys, "activation_checkpoint_blocks"}
    return tuple(value for key, value in choices.items() if key not in left_out)


def _without_gathering(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    return _without(
        choices, "reshard_after_forward", "reduce_gradients", "reshard_after_backward", "prefetch"
    )


def _plan_key(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the choices that `with_gathering` does not change."""
    return (*_without_gathering(choices), choices.get("activation_checkpoint_blocks"))


def _without_checkpointing(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    return _without(choices, "activation_checkpoint")


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, the fastest first, but before all the simplest that ties with the fastest."""
    ranked = sorted(candidates, key=lambda c: -c.rate())
    tie = [c for c in ranked if c.rate() > ranked[0].rate() * (1 - EQUAL)]
    best = min(tie, key=_complexity, default=None)
    return [best, *(c for c in ranked if c is not best)] if best else []


def _complexity(candidate: Candidate) -> tuple[Any, ...]:
    """A sort key, the simplest first: fewer mesh axes, less recompute, all blocks the same, default values,
    small micro batches."""
    c = candidate.choices
    mode, kinds = (
        c["activation_checkpoint"],
        {unit.activation_checkpoint for unit in candidate.plan.units[1:-1]},
    )
    return (
        c["tp"] > 1,
        c["cp"] > 1,
        c["dp_replicate"] > 1,
        CHECKPOINTING.index(mode) if mode in CHECKPOINTING else len(CHECKPOINTING),
        len(kinds),
        c["reduce_gradients"] != "every_micro_batch",
        c["reshard_after_backward"] is not True,
        c["reshard_after_forward"] is not True,
        str(c["prefetch"]),
        c["tp"],
        c["cp"],
        c["cp_exchange"] == "gather",
        c["dp_replicate"],
        c["activation_checkpoint_blocks"],
        c["micro_batch_size"],
    )
