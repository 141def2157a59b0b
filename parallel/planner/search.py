"""The search for the best plan: branch and bound over all legal plans, by predicted memory and step time.

Keys that have a value in the config keep it; keys at `auto` are searched.
"""

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import PredictedMemory
from meshwright.parallel.plan.make import RunShape, count_blocks, make_plan
from meshwright.parallel.plan.mistakes import describe
from meshwright.parallel.plan.schema import CP_EXCHANGES, ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.planner.cost_model import StepTimes, step_times
from meshwright.parallel.planner.hardware import HostMemory, Machines
from meshwright.parallel.planner.memory_model import (
    host_memory,
    least_bytes,
    predict_step_memory,
    whole_gradient_bytes,
)
from meshwright.parallel.planner.search_space import (
    CHECKPOINTING,
    Choices,
    combinations,
    with_choices,
    with_gathering,
)
from meshwright.parallel.planner.step_time import simulate_step, step_seconds
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.workload import ModelWorkload

T = TypeVar("T")
PARTIAL_MODES = ("selective", "full", "offload")  # also tried for the fewest blocks that fit
EQUAL = 0.01  # rates that differ by less are a tie, which the simpler plan wins
MIN_TIMED = 12  # plans simulated before any is pruned, for the list of runners-up
NEAREST = 24  # plans whose memory is predicted in full if none fits, to find the smallest


@dataclass(frozen=True)
class Candidate:
    """One legal plan.

    Args:
        choices: of the keys that the planner may choose
        plan: the complete plan; if `at_least`, with activation checkpointing for all blocks
        lower_bound_s: seconds of a step in which all FSDP communication is hidden
        needed_bytes: memory per rank including allocator overhead; if `memory` is None, a lower bound without
            that overhead
        host: host memory per rank
        memory: by kind; None if the bounds decided without it
        timeline: the simulated step; None for a plan that does not fit or was pruned
        at_least: the number of blocks is only a lower bound; the fewest that fit are still to be found
    """

    choices: Choices
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


@dataclass(frozen=True)
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
    machines: Machines,
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
        raise PlanError("\n".join(map(describe, mistakes)))
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


def check_legal(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> None:
    """Raise the PlanError of the simplest combination if none is legal. Needs no machine and no traces."""
    mistakes: list[PlanError] = []
    for choices in combinations(config, shape):
        try:
            _make(config, model, shape, choices)
        except PlanError as error:
            mistakes.append(error)
        else:
            return
    raise mistakes[0]


def _make(config: ParallelConfig, model: ModelUnits, shape: RunShape, choices: Choices) -> Plan:
    chosen, sizes = with_choices(config, shape, choices)
    return make_plan(chosen, model, sizes)


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


class _Search:
    """A search: its input, the classified candidates, and caches of what is known of choices."""

    def __init__(
        self,
        config: ParallelConfig,
        model: ModelUnits,
        shape: RunShape,
        machines: Machines,
        trace: Callable[[Plan], ModelWorkload],
    ) -> None:
        self.config, self.model, self.shape, self.machines = config, model, shape, machines
        self.blocks = count_blocks(config, model)
        self.ranked, self.does_not_fit, self.pruned = list[Candidate](), list[Candidate](), list[Candidate]()
        self.best_rate = 0.0
        # choices, but for the number of blocks, with which the plan fits without activation checkpointing
        self.fits_with_none = set[Choices]()
        # fewest blocks that fit; the resharding and prefetching tried first decides
        self.fewest = dict[Choices, int]()
        self.made = self.once_for_all(lambda choices: _make(config, model, shape, choices))
        self.work = self.once_for_all(lambda choices: trace(self.made(choices)))
        self.times = self.once_for_all(self.step_times, "reshard_after_forward")
        self.bounds = self.once_for_all(self.bound)
        self.memory = cache(lambda choices: predict_step_memory(self.plan(choices), self.work(choices)))
        self.step_s = cache(lambda choices: step_seconds(*self.timed(choices)))

    def once_for_all(self, find: Callable[[Choices], T], *also: str) -> Callable[[Choices], T]:
        """Cache a function of what is computed, and of these choices: the first of all choices that are equal
        in both stands for them."""
        cached, first = cache(find), dict[Any, Choices]()

        def find_once(choices: Choices) -> T:
            key = (choices.computed, *(choices[name] for name in also))
            return cached(first.setdefault(key, choices))

        return find_once

    def plan(self, choices: Choices) -> Plan:
        """Return the plan of the choices. When units gather and reduce makes no plan illegal: of the plans
        that differ in nothing else only one is made and checked."""
        return with_gathering(self.made(choices), self.config, choices)

    def step_times(self, choices: Choices) -> StepTimes:
        """Return the times of the parts of a plan's step."""
        machines = self.machines
        return step_times(self.plan(choices), self.work(choices), machines.kind, machines.per_node)

    def timed(self, choices: Choices) -> tuple[Plan, StepTimes]:
        """Return the plan and the times of the parts of its step."""
        return self.plan(choices), self.times(choices)

    def bound(self, choices: Choices) -> Candidate:
        """Return a candidate with quick bounds, of its memory without whole gradients."""
        plan, work = self.made(choices), self.work(choices)
        lower_bound_s = self.times(choices).step_lower_bound_s(plan.accumulation)
        return Candidate(choices, plan, lower_bound_s, least_bytes(plan, work), host_memory(plan, work))

    def legal_candidates(self) -> Iterator[Candidate]:
        """Yield all legal plans: with activation checkpointing for all blocks (or the number in the config),
        and for the fewest blocks that could fit."""
        mistakes: list[PlanError] = []
        on_hosts: list[PlanError] = []
        any_legal = False
        for choices in combinations(self.config, self.shape, self.blocks):
            try:
                candidates = self.candidate(choices), self.with_fewest_blocks(choices)
            except PlanError as error:
                mistakes.append(error)
                continue
            for candidate in candidates:
                if candidate and (mistake := self.host_mistake(candidate)):
                    on_hosts.append(mistake)
                elif candidate:
                    any_legal = True
                    yield candidate
        if not any_legal:
            raise (on_hosts or mistakes)[0]

    def candidate(self, choices: Choices) -> Candidate:
        """Return the candidate of the choices. Raises PlanError if they are not legal."""
        plan, bounds = self.plan(choices), self.bounds(choices)
        needed = bounds.needed_bytes + whole_gradient_bytes(plan, self.work(choices))
        return replace(bounds, choices=choices, plan=plan, needed_bytes=needed)

    def with_fewest_blocks(self, choices: Choices) -> Candidate | None:
        """Return the candidate with a lower bound of the fewest blocks that fit; its plan is that of all
        blocks. None if all are needed, the mode has no partial form, or the config sets the number."""
        if choices.activation_checkpoint not in PARTIAL_MODES or self.blocks < 2:
            return None
        if self.config.activation_checkpoint_blocks != "auto":
            return None
        plan, treated, kept = self.plan(choices), self.bounds(choices), self.bounds(with_none(choices))
        available = self.machines.available_bytes - whole_gradient_bytes(plan, self.work(choices))
        excess = kept.needed_bytes - available
        share = max(excess / max(kept.needed_bytes - treated.needed_bytes, 1), 1 / self.blocks)
        if (count := math.ceil(share * self.blocks)) >= self.blocks:
            return None
        # recompute costs in proportion to the share; offload the time by which copies exceed compute
        if (times := self.times(choices)).offload_s:
            lower_bound_s = times.step_lower_bound_s(plan.accumulation, offloaded=share)
        else:
            lower_bound_s = kept.lower_bound_s + share * (treated.lower_bound_s - kept.lower_bound_s)
        needed = min(kept.needed_bytes, self.machines.available_bytes)
        return Candidate(with_blocks(choices, count), plan, lower_bound_s, needed, at_least=True)

    def classify(self, candidate: Candidate) -> None:
        """Add a candidate to `ranked`, `does_not_fit` or `pruned`, and simulate it if it can be the best.
        Candidates must come in the order of their bounds, the fastest first."""
        if not candidate.at_least and not self.fits(candidate):
            self.does_not_fit.append(candidate)
        elif self.is_slower(candidate) or self.is_slower(candidate := self.with_simulated_bound(candidate)):
            self.pruned.append(candidate)
        elif not candidate.at_least:
            evaluated = self.evaluate(candidate)
            (self.ranked if evaluated.timeline else self.does_not_fit).append(evaluated)
            self.best_rate = max(self.best_rate, evaluated.rate() if evaluated.timeline else 0.0)
            if evaluated.timeline and candidate.choices.activation_checkpoint == "none":
                self.fits_with_none.add(candidate.choices)
        elif with_none(candidate.choices) not in self.fits_with_none and (
            settled := self.settle_blocks(candidate)
        ):
            self.classify(settled)

    def evaluate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its memory and, if it fits, its simulated step."""
        memory = self.memory(candidate.choices)
        needed = self.machines.needed_bytes(memory, candidate.host)
        evaluated = replace(candidate, memory=memory, needed_bytes=needed)
        if not self.fits(evaluated):
            return evaluated
        return replace(evaluated, timeline=simulate_step(*self.timed(candidate.choices)))

    def with_simulated_bound(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the simulated step as its lower bound, which costs less than its memory:
        with the fewest blocks that could fit, if they are still to be counted."""
        if len(self.ranked) < MIN_TIMED:
            return candidate
        return replace(candidate, lower_bound_s=self.step_s(candidate.choices))

    def is_slower(self, candidate: Candidate) -> bool:
        """Whether the candidate is slower than the best by its bound."""
        return candidate.rate() < self.best_rate * (1 - EQUAL) and len(self.ranked) >= MIN_TIMED

    def settle_blocks(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with the fewest blocks that fit; memory grows with every block fewer. None if
        all are needed (a separate candidate), if even all do not fit, or if host memory is too small."""
        key, choices = with_blocks(candidate.choices.computed, 0), candidate.choices
        # The resharding and prefetching tried first need the least memory: the others never need fewer.
        least = max(choices.activation_checkpoint_blocks, self.fewest.get(key, 0))
        if least >= self.blocks:
            return None
        if self.is_slower(settled := self.candidate(with_blocks(choices, least))):
            return settled
        counts = range(least, self.blocks)
        count = least + bisect_left(counts, True, key=lambda n: self.on_device(with_blocks(choices, n)))
        self.fewest.setdefault(key, count)
        if count == self.blocks:
            return None
        settled = self.candidate(with_blocks(choices, count))
        return None if self.host_mistake(settled) else settled

    def on_device(self, choices: Choices) -> bool:
        """Whether the device has the memory, whatever the host has."""
        needed_bytes = self.machines.needed_bytes(self.memory(choices), HostMemory())
        return needed_bytes <= self.machines.available_bytes

    def host_mistake(self, candidate: Candidate) -> PlanError | None:
        """Return why the host rules a candidate out. Offloading to the device's own memory saves nothing."""
        machines, problem = self.machines, self.machines.host_problem(candidate.host)
        if machines.host_bytes is None and candidate.host.activations:
            problem = (
                f"parallel.activation_checkpoint=offload: {machines.kind.name} has no other memory: use full"
            )
        return PlanError(problem) if problem else None

    def fits(self, candidate: Candidate) -> bool:
        """Whether device and host have the memory."""
        return self.machines.fits(candidate.needed_bytes, candidate.host)


def with_blocks(choices: Choices, count: int) -> Choices:
    """Return the choices with activation checkpointing for so many blocks."""
    return replace(choices, activation_checkpoint_blocks=count)


def with_none(choices: Choices) -> Choices:
    """Return the choices without activation checkpointing."""
    return replace(choices, activation_checkpoint="none", activation_checkpoint_blocks=0)


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, the fastest first, but before all the simplest that ties with the fastest."""
    ranked = sorted(candidates, key=lambda c: -c.rate())
    tie = [c for c in ranked if c.rate() > ranked[0].rate() * (1 - EQUAL)]
    best = min(tie, key=_complexity, default=None)
    return [best, *(c for c in ranked if c is not best)] if best else []


# What makes a plan simpler, the first difference decides: a key, and its simpler value, all values from the
# simplest on, or None for the smaller value. `modes`: the number of modes of activation checkpointing.
SIMPLER: tuple[tuple[str, Any], ...] = (
    ("tp", 1),
    ("cp", 1),
    ("dp_replicate", 1),
    ("activation_checkpoint", CHECKPOINTING),
    ("modes", None),
    ("reduce_gradients", "every_micro_batch"),
    ("reshard_after_backward", True),
    ("reshard_after_forward", True),
    ("prefetch", None),
    ("tp", None),
    ("cp", None),
    ("cp_exchange", ("auto", *CP_EXCHANGES)),
    ("dp_replicate", None),
    ("activation_checkpoint_blocks", None),
    ("micro_batch_size", None),
)


def _complexity(candidate: Candidate) -> tuple[Any, ...]:
    """A sort key, the simplest first: fewer mesh axes, less recompute, all blocks the same, default values,
    small micro batches."""
    choices, units = candidate.choices, candidate.plan.units[1:-1]
    modes = len({unit.activation_checkpoint for unit in units})
    values = {**vars(choices), "modes": modes, "prefetch": str(choices.prefetch)}

    def rank(value: Any, simpler: Any) -> Any:
        if isinstance(simpler, tuple):
            return simpler.index(value) if value in simpler else len(simpler)
        return value if simpler is None else value != simpler

    return tuple(rank(values[key], simpler) for key, simpler in SIMPLER)
