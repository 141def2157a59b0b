"""The search for the best plan: all legal plans are bounded, and those are predicted that can still win.

Keys that have a value in the config keep it; keys at `auto` are searched.
"""

import gc
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import PredictedMemory
from meshwright.parallel.plan.make import RunShape, count_blocks
from meshwright.parallel.plan.mistakes import describe
from meshwright.parallel.plan.schema import CP_EXCHANGES, ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.planner.bounds import Bounds, make_chosen
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import HostMemory, Machines
from meshwright.parallel.planner.memory_model import host_memory, predict_step_memory
from meshwright.parallel.planner.progress import clock
from meshwright.parallel.planner.search_space import CHECKPOINTING, Choices, combinations
from meshwright.parallel.planner.step_time import simulate_step, step_load
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.workload import ModelWorkload

PARTIAL_MODES = ("selective", "full", "offload")  # also tried for the fewest blocks that fit
EQUAL = 0.01  # rates that differ by less are a tie, which the simpler plan wins
ALTERNATIVES = 4  # other plans that are predicted too, each computing or exchanging something else
SURE = 0.99  # of a bound of memory: in the graph of one sequence a tensor or two may live longer
NEAREST = 24  # plans whose memory is predicted in full if none fits, to find the smallest


@dataclass(frozen=True)
class Candidate:
    """One legal plan.

    Args:
        choices: of the keys that the planner may choose
        plan: the complete plan; if `memory` is None that of a model with few of its equal blocks, and if
            `at_least` with activation checkpointing for all of them
        lower_bound_s: seconds of a step that waits for nothing; infinite for a plan that does not fit
        needed_bytes: memory per rank including allocator overhead; if `memory` is None, a lower bound
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
        pruned: plans that were not predicted, the fastest by their bounds first: they are slower than the
            best, or may tie with it, but are less simple
        blocks: number of units that can use activation checkpointing
    """

    ranked: tuple[Candidate, ...]
    does_not_fit: tuple[Candidate, ...]
    pruned: tuple[Candidate, ...]
    blocks: int

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
        return state.run()


def check_legal(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> None:
    """Raise the PlanError of the simplest combination if none is legal. Needs no machine and no traces."""
    mistakes: list[PlanError] = []
    for choices in combinations(config, shape):
        try:
            make_chosen(config, model, shape, choices)
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


class _Search:
    """A search: its input, and the candidates."""

    def __init__(
        self,
        config: ParallelConfig,
        model: ModelUnits,
        shape: RunShape,
        machines: Machines,
        trace: Callable[[Plan], ModelWorkload],
    ) -> None:
        self.config, self.model, self.shape, self.machines = config, model, shape, machines
        self.trace, self.blocks = trace, count_blocks(config, model)
        self.bounds = Bounds(config, model, shape, machines, trace)
        self.open, self.bounded = list[Candidate](), 0  # those that fit by their bounds, the fastest last
        self.ranked, self.does_not_fit = list[Candidate](), list[Candidate]()
        self.leanest = dict[Choices, Choices]()  # the first of those that compute the same
        self.complete = cache(self.make_complete)
        self.memory = cache(lambda choices: predict_step_memory(*self.complete(choices)))
        self.least_needs = cache(self.find_least_needs)
        self.complexity = cache(lambda choices: _complexity(choices, self.blocks))

    def run(self) -> SearchResult:
        """Bound all legal plans, then predict those that can be the best, and some alternatives to it."""
        for candidate in self.legal_candidates():
            self.bounded += 1
            clock.done = f"{self.bounded:,} plans bounded"
            (self.open if candidate.at_least or self.fits(candidate) else self.does_not_fit).append(candidate)
        self.open.reverse()
        self.open.sort(key=lambda c: c.rate())  # of equals the simplest last
        for choose in (self.next_candidate, self.next_alternative):
            while chosen := choose():
                self.predict(chosen)
        self.does_not_fit.sort(key=attrgetter("needed_bytes"))
        if not self.ranked:
            nearest = [c if c.memory else self.evaluate(c) for c in self.does_not_fit[:NEAREST]]
            self.does_not_fit[:NEAREST] = sorted(nearest, key=attrgetter("needed_bytes"))
        self.ranked.sort(key=lambda c: -c.rate())
        if self.ranked:
            best = self.simplest(self.ranked)
            self.ranked.remove(best)
            self.ranked.insert(0, best)
        return SearchResult(
            tuple(self.ranked), tuple(self.does_not_fit), tuple(reversed(self.open)), self.blocks
        )

    @property
    def enough(self) -> float:
        """The rate above which a plan ties with the fastest that was predicted."""
        return max((c.rate() for c in self.ranked), default=0.0) * (1 - EQUAL)

    def simplest(self, candidates: Iterable[Candidate]) -> Candidate:
        """Return the simplest of those that tie with the fastest."""
        enough = self.enough
        return min((c for c in candidates if c.rate() > enough), key=lambda c: self.complexity(c.choices))

    def next_candidate(self) -> Candidate | None:
        """Return the candidate to predict next: the fastest by its bound, then the simplest of those that may
        tie with the fastest. None if that one was predicted and ties with it whatever the others are."""
        if not self.open or self.open[-1].rate() <= self.enough:
            return None
        fastest = self.open[-1]
        if not self.ranked:
            return fastest
        simplest = self.simplest([*self.open, *self.ranked])
        if simplest.timeline is None:
            return simplest
        return None if simplest.rate() > fastest.rate() * (1 - EQUAL) else fastest

    def next_alternative(self) -> Candidate | None:
        """Return the fastest candidate, by its bound, that differs from all that were predicted in more than
        the number of blocks and when units gather and reduce; None if there are enough."""
        known = {with_blocks(candidate.choices.computed, 0) for candidate in self.ranked}
        if not known or len(known) > ALTERNATIVES:
            return None
        others = (c for c in reversed(self.open) if with_blocks(c.choices.computed, 0) not in known)
        return next(others, None)

    def predict(self, candidate: Candidate) -> None:
        """Move a candidate from the open ones to those that are ranked or do not fit; one whose number of
        blocks is to be found comes back with it."""
        self.open.remove(candidate)
        if not candidate.at_least:
            evaluated = self.evaluate(candidate)
            (self.ranked if evaluated.timeline else self.does_not_fit).append(evaluated)
            clock.done = f"{self.bounded:,} plans bounded, {len(self.ranked)} that fit predicted"
        elif settled := self.settle_blocks(candidate):
            insort(self.open, settled, key=lambda c: c.rate())

    def make_complete(self, choices: Choices) -> tuple[Plan, ModelWorkload]:
        """Return the complete plan and its workload."""
        plan = make_chosen(self.config, self.model, self.shape, choices)
        return plan, self.trace(plan)

    def legal_candidates(self) -> Iterator[Candidate]:
        """Yield all legal plans: with activation checkpointing for all blocks (or the number in the config),
        and for the fewest blocks that could fit."""
        mistakes = dict[Choices, PlanError]()  # by what they compute
        on_hosts: list[PlanError] = []
        any_legal = False
        for choices in combinations(self.config, self.shape, self.blocks):
            if choices.computed in mistakes:
                continue
            try:
                candidates = self.candidate(choices), self.with_fewest_blocks(choices)
            except PlanError as error:
                mistakes[choices.computed] = error
                continue
            for candidate in candidates:
                if candidate and (mistake := self.host_mistake(candidate)):
                    on_hosts.append(mistake)
                elif candidate:
                    any_legal = True
                    yield candidate
        if not any_legal:
            raise next(iter(on_hosts or mistakes.values()))

    def candidate(self, choices: Choices) -> Candidate:
        """Return the candidate of the choices, by its bounds. If those that compute the same and were tried
        first, which need the least, do not fit, none does. Raises PlanError if the choices are not legal."""
        bounds, machines = self.bounds, self.machines
        host, leanest = bounds.host(choices), self.leanest.setdefault(choices.computed, choices)
        kept = machines.kept_bytes(host)
        if not machines.fits(needed := max(self.least_needs(leanest)) + kept, host):
            return Candidate(choices, bounds.plan(leanest), math.inf, needed, host)
        candidate = Candidate(
            choices,
            bounds.plan(choices),
            bounds.load(choices).seconds,
            max(self.least_needs(choices)) + kept,
            host,
        )
        return candidate if self.fits(candidate) else replace(candidate, lower_bound_s=math.inf)

    def find_least_needs(self, choices: Choices) -> tuple[int, ...]:
        """Return what a process needs at the moments of `LeastMemory`."""
        *moments, buffers = self.bounds.memory(choices)
        pool = 0 if self.machines.kind.cores else buffers
        return tuple(self.machines.least_needed_bytes(int(SURE * (used + pool))) for used in moments)

    def with_fewest_blocks(self, choices: Choices) -> Candidate | None:
        """Return the candidate with a lower bound of the fewest blocks that fit; its plan is that of all
        blocks. None if all are needed, the mode has no partial form, or the config sets the number."""
        if choices.activation_checkpoint not in PARTIAL_MODES or self.blocks < 2:
            return None
        available = self.machines.available_bytes
        if self.config.activation_checkpoint_blocks != "auto":
            return None
        none, treated = map(self.least_needs, (with_none(choices), choices))
        if max(treated[0], treated[-1]) > available:  # in between it may need less than with all blocks
            return None
        share, load = 1 / self.blocks, self.bounds.load(with_none(choices))
        if alike := self.bounds.has_equal_blocks(choices):
            share = max((none[0] - available) / max(none[0] - treated[0], 1), share)
        if (count := math.ceil(share * self.blocks)) >= self.blocks:
            return None
        if alike:  # in proportion between none and all; the last of the offloaded blocks is not copied
            more = count - (choices.activation_checkpoint == "offload")
            load = load.mixed(self.bounds.load(choices), more / self.blocks)
        plan, host = self.bounds.plan(choices), self.bounds.host(choices)
        host = replace(host, activations=int(alike * host.activations * (count - 1) / (self.blocks - 1)))
        needed = min(none[0], available)
        return Candidate(with_blocks(choices, count), plan, load.seconds, needed, host, at_least=True)

    def evaluate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its memory and, if it fits, its simulated step."""
        choices, machines = candidate.choices, self.machines
        (plan, work), memory = self.complete(choices), self.memory(choices)
        host = host_memory(plan, work)
        needed = machines.needed_bytes(memory, host)
        evaluated = replace(candidate, plan=plan, memory=memory, needed_bytes=needed, host=host)
        if not self.fits(evaluated):
            return evaluated
        times = step_times(plan, work, machines.kind, machines.per_node)
        return replace(evaluated, timeline=simulate_step(plan, times))

    def settle_blocks(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with the fewest blocks that fit; memory grows with every block fewer. None if
        all are needed (a separate candidate), if even all do not fit, or if host memory is too small."""
        choices, count = candidate.choices, candidate.choices.activation_checkpoint_blocks
        none, treated = map(self.least_needs, (with_none(choices), with_blocks(choices, self.blocks)))
        may_be_none = (
            self.config.activation_checkpoint == "auto" and max(none) <= self.machines.available_bytes
        )
        if may_be_none and self.excess_bytes(with_none(choices)) <= 0:
            return None

        def excess_bytes(blocks: int) -> int:
            return self.excess_bytes(with_blocks(choices, blocks))

        least = count
        if not self.bounds.has_equal_blocks(choices):
            count = self.blocks
        freed = max((none[0] - treated[0]) / self.blocks, 1.0)  # by each block
        while count < self.blocks and (excess := excess_bytes(count)) > 0:
            least, count = count + 1, count + math.ceil(excess / freed)
        counts = range(least, min(count, self.blocks))
        count = least + bisect_left(counts, True, key=lambda blocks: excess_bytes(blocks) <= 0)
        if count >= self.blocks:
            return None
        settled = replace(candidate, choices=with_blocks(choices, count), at_least=False)
        plan, work = self.complete(settled.choices)
        times = step_times(plan, work, self.machines.kind, self.machines.per_node)
        seconds, host = step_load(plan, times, {}).seconds, host_memory(plan, work)
        needed = self.machines.needed_bytes(self.memory(settled.choices), host)
        settled = replace(settled, plan=plan, lower_bound_s=seconds, needed_bytes=needed, host=host)
        return None if self.host_mistake(settled) else settled

    def excess_bytes(self, choices: Choices) -> int:
        """Return by how much the memory of a plan exceeds that of the device, whatever the host has."""
        return self.machines.needed_bytes(self.memory(choices), HostMemory()) - self.machines.available_bytes

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


def _complexity(choices: Choices, blocks: int) -> tuple[Any, ...]:
    """A sort key, the simplest first: fewer mesh axes, less recompute, all blocks the same, default values,
    small micro batches. `blocks`: of the model."""
    modes = 1 + (0 < choices.activation_checkpoint_blocks < blocks)
    values = {**vars(choices), "modes": modes, "prefetch": str(choices.prefetch)}

    def rank(value: Any, simpler: Any) -> Any:
        if isinstance(simpler, tuple):
            return simpler.index(value) if value in simpler else len(simpler)
        return value if simpler is None else value != simpler

    return tuple(rank(values[key], simpler) for key, simpler in SIMPLER)
