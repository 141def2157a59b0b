"""Every legal way to lay out a training job, judged on memory and time; the best is chosen.

What the config gives a value stays as it is; what it leaves at `auto` is tried in every way that makes a
difference.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from operator import attrgetter
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.mistakes import key_line
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.planner.cost_model import host_bytes, step_times
from meshwright.parallel.planner.fsdp_schedule import simulate_step
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.memory_model import (
    least_bytes,
    predict_step_memory,
    reserved_bytes,
    usable_bytes,
)
from meshwright.parallel.planner.search_space import (
    CHECKPOINTING,
    CHOICES,
    Bounds,
    combinations,
    part_s,
    smallest,
    with_choices,
)
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.workload import ModelWorkload

PART_OF_THE_BLOCKS = ("selective", "full", "offload")  # what is tried for the fewest blocks that fit, too
EQUAL = 0.01  # rates that differ by less are a tie, which the simpler plan wins
JUDGED = 12  # plans that are timed in full though a faster one is known, for the list of runners-up
NEAREST = 24  # plans whose memory is gone through where none fits, to find the one that needs least


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What a run is planned for: devices of a kind, so many to a node, with so much memory each."""

    hardware: Hardware
    gpus_per_node: int
    available_bytes: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One legal plan.

    Args:
        choices: what was tried, by key: tp, dp_replicate, dp_shard, activation_checkpoint,
            activation_checkpoint_blocks (how many of the blocks; 0 with none), reshard_after_forward,
            prefetch, micro_batch_size
        plan: all of it
        lower_bound_s: seconds of a step that waits for nothing
        needed_bytes: memory of one rank, the allocator's included; at least, where that is too much already
        host_bytes: of what it keeps in host memory
        memory: by kind, None where it was clear without
        timeline: a step; None for a plan that does not fit, or that would be slower at best
        at_least: fewer blocks cannot fit, but these may not either: how many do is still to be found
    """

    choices: Mapping[str, Any]
    plan: Plan
    lower_bound_s: float
    needed_bytes: int
    host_bytes: int = 0
    memory: StepMemory | None = None
    timeline: Timeline | None = None
    at_least: bool = False

    def rate(self) -> float:
        """Sequences per second, of all ranks."""
        return self.plan.global_batch_size / (self.timeline.step_s if self.timeline else self.lower_bound_s)


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found: plans that fit and were timed, the best first; those that do not fit, those that
    need least first; and those that were not timed because they are slower than the best even if they wait
    for nothing."""

    ranked: tuple[Candidate, ...]
    does_not_fit: tuple[Candidate, ...]
    pruned: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def search(
    config: ParallelConfig,
    model: ModelUnits,
    shape: RunShape,
    machines: Cluster,
    trace: Callable[[Plan], ModelWorkload],
) -> SearchResult:
    """Try all. Raises PlanError if no combination is legal, with what is wrong with the simplest one. That
    none fits is no error: then `ranked` is empty."""
    if config.activation_checkpoint == "auto" and (
        mistakes := [*policy_mistakes(config.selective_policy, model.attention_ops)]
    ):
        raise PlanError("\n".join(map(key_line, mistakes)))
    found = _Search(config, model, shape, machines, trace)
    for candidate in sorted(found.legal(), key=lambda c: (-c.rate(), _complexity(c))):
        found.take(candidate)
    found.does_not_fit.sort(key=attrgetter("needed_bytes"))
    if not found.ranked:
        nearest = [
            candidate if candidate.memory else found.judge(candidate)
            for candidate in found.does_not_fit[:NEAREST]
        ]
        found.does_not_fit[:NEAREST] = sorted(nearest, key=attrgetter("needed_bytes"))
    return SearchResult(tuple(_ranked(found.ranked)), tuple(found.does_not_fit), tuple(found.pruned))


def frugal(config: ParallelConfig, shape: RunShape, blocks: int) -> tuple[ParallelConfig, RunShape]:
    """The same with the keys left open, all but the tp degree, set to what needs least memory. `blocks`: of
    the model."""
    least: dict[str, Any] = {
        "dp_replicate": 1,
        "activation_checkpoint": "full",
        "reshard_after_forward": True,
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
    """All legal plans, and what has become of those that were looked at."""

    config: ParallelConfig
    model: ModelUnits
    shape: RunShape
    machines: Cluster
    trace: Callable[[Plan], ModelWorkload]
    ranked: list[Candidate] = field(default_factory=list)
    does_not_fit: list[Candidate] = field(default_factory=list)
    pruned: list[Candidate] = field(default_factory=list)
    # resharding and prefetching change none
    bounds: dict[tuple[Any, ...], Bounds] = field(default_factory=dict)
    # blocks, with the frugal way to gather
    fewest: dict[tuple[Any, ...], int] = field(default_factory=dict)
    # choices with which nothing has to be recomputed or sent away
    keeps_all: set[tuple[Any, ...]] = field(default_factory=set)
    best_rate: float = 0.0

    def legal(self) -> Iterator[Candidate]:
        """All legal plans: with every block treated alike, or as many as the config says, and with as few as
        could fit."""
        mistakes: list[PlanError] = []
        found = False
        for choices in combinations(self.config, self.shape, self.machines.gpus_per_node):
            try:
                plan = self._plan(choices)
            except PlanError as error:
                mistakes.append(error)
                continue
            for candidate in (self._alike(choices, plan), self._fewest_blocks(choices, plan)):
                if candidate and (mistake := self._host_mistake(candidate)):
                    mistakes.append(mistake)
                elif candidate:
                    found = True
                    yield candidate
        if not found:
            raise mistakes[0]

    def take(self, candidate: Candidate) -> None:
        """Put a candidate where it belongs, after judging it if it can be the best. The fastest bound must
        come first."""
        if not candidate.at_least and candidate.needed_bytes > self.machines.available_bytes:
            self.does_not_fit.append(candidate)
        elif self._is_slower(candidate):
            self.pruned.append(candidate)
        elif not candidate.at_least:
            judged = self.judge(candidate)
            (self.ranked if judged.timeline else self.does_not_fit).append(judged)
            self.best_rate = max(self.best_rate, judged.rate() if judged.timeline else 0.0)
            if judged.timeline and candidate.choices["activation_checkpoint"] == "none":
                self.keeps_all.add(_but_checkpointing(candidate.choices))
        elif _but_checkpointing(candidate.choices) not in self.keeps_all and (
            settled := self._settle(candidate)
        ):
            self.take(settled)

    def judge(self, candidate: Candidate) -> Candidate:
        """The candidate with its memory and, if it fits, its step."""
        plan, machines = candidate.plan, self.machines
        work = self.trace(plan)
        memory = predict_step_memory(plan, work)
        needed = reserved_bytes(memory, machines.hardware)
        judged = dataclasses.replace(candidate, memory=memory, needed_bytes=needed)
        if needed > machines.available_bytes:
            return judged
        times = step_times(plan, work, machines.hardware, machines.gpus_per_node)
        return dataclasses.replace(judged, timeline=simulate_step(plan, times))

    def _is_slower(self, candidate: Candidate) -> bool:
        return candidate.rate() < self.best_rate * (1 - EQUAL) and len(self.ranked) >= JUDGED

    def _plan(self, choices: Mapping[str, Any]) -> Plan:
        config, shape = with_choices(self.config, self.shape, choices)
        return make_plan(config, self.model, shape)

    def _blocks(self, plan: Plan) -> int:
        """Units that activation checkpointing can be for."""
        return sum(self.model.checkpointed.issuperset(unit.modules) for unit in plan.units)

    def _alike(self, choices: Mapping[str, Any], plan: Plan) -> Candidate:
        """The candidate of a plan that was made with these choices."""
        asked, blocks = self.config.activation_checkpoint_blocks, self._blocks(plan)
        treated = (
            0
            if choices["activation_checkpoint"] == "none"
            else blocks
            if asked == "auto"
            else min(asked, blocks)
        )
        return self._candidate({**choices, "activation_checkpoint_blocks": treated}, plan)

    def _candidate(self, choices: Mapping[str, Any], plan: Plan) -> Candidate:
        bounds = self._look(choices, plan)
        in_order = {name: choices[name] for name in CHOICES}
        return Candidate(in_order, plan, bounds.lower_bound_s, bounds.needed_bytes, bounds.host_bytes)

    def _look(self, choices: Mapping[str, Any], plan: Plan) -> Bounds:
        key = (*_but_how_gathered(choices), choices["activation_checkpoint_blocks"])
        if key not in self.bounds:
            work = self.trace(plan)
            times = step_times(plan, work, self.machines.hardware, self.machines.gpus_per_node)
            self.bounds[key] = Bounds(
                times, times.busy_s(plan.accumulation), least_bytes(plan, work), host_bytes(plan, work)
            )
        return self.bounds[key]

    def _fewest_blocks(self, choices: Mapping[str, Any], plan: Plan) -> Candidate | None:
        """The same for fewer blocks: as many as are needed at least, if what blocks keep were all there is.
        None where that is all of them, or where the config says how many, or how. Its plan is that of all
        blocks."""
        mode, blocks = choices["activation_checkpoint"], self._blocks(plan)
        if mode not in PART_OF_THE_BLOCKS or self.config.activation_checkpoint_blocks != "auto" or blocks < 2:
            return None
        treated = self._look({**choices, "activation_checkpoint_blocks": blocks}, plan)
        keeping = {**choices, "activation_checkpoint": "none", "activation_checkpoint_blocks": 0}
        kept = self.bounds.get((*_but_how_gathered(keeping), 0)) or self._look(keeping, self._plan(keeping))
        excess = kept.needed_bytes - self.machines.available_bytes
        share = max(excess / max(kept.needed_bytes - treated.needed_bytes, 1), 1 / blocks)
        if (count := math.ceil(share * blocks)) >= blocks:
            return None
        in_order = {name: choices.get(name, count) for name in CHOICES}
        lower_bound_s = part_s(kept, treated, share, plan.accumulation)
        needed = min(kept.needed_bytes, self.machines.available_bytes)
        return Candidate(in_order, plan, lower_bound_s, needed, at_least=True)

    def _settle(self, candidate: Candidate) -> Candidate | None:
        """The candidate with the fewest blocks that fit: the fewer, the more memory. None where all are
        needed, which is a candidate of its own, or do not do, or where host memory is too small."""
        key, blocks = _but_how_gathered(candidate.choices), self._blocks(candidate.plan)
        needs: dict[int, int] = {}

        def with_blocks(count: int) -> Candidate:
            choices = {**candidate.choices, "activation_checkpoint_blocks": count}
            return self._candidate(choices, self._plan(choices))

        def fits(count: int) -> bool:
            plan = with_blocks(count).plan
            memory = predict_step_memory(plan, self.trace(plan))
            needs[count] = memory.peak_bytes
            return reserved_bytes(memory, self.machines.hardware) <= self.machines.available_bytes

        # Gathering otherwise than asked first never needs less memory, so never fewer blocks.
        least = max(candidate.choices["activation_checkpoint_blocks"], self.fewest.get(key, 0))
        if least >= blocks or self._is_slower(with_blocks(least)):
            return with_blocks(least) if least < blocks else None
        count = blocks
        if fits(blocks - 1):
            room = usable_bytes(self.machines.available_bytes, self.machines.hardware) - needs[blocks - 1]
            keeping = (*_but_how_gathered({**candidate.choices, "activation_checkpoint": "none"}), 0)
            saved = max(
                1, (self.bounds[keeping].needed_bytes - self.bounds[*key, blocks].needed_bytes) / blocks
            )
            count = smallest(least, blocks - 1, blocks - 1 - int(room / saved), fits)
        self.fewest.setdefault(key, count)
        if count == blocks:
            return None
        settled = with_blocks(count)
        return None if self._host_mistake(settled) else settled

    def _host_mistake(self, candidate: Candidate) -> PlanError | None:
        kind = self.machines.hardware
        if (
            candidate.choices["activation_checkpoint"] != "offload"
            or candidate.host_bytes <= kind.host_memory_gib * GIB
        ):
            return None
        return PlanError(
            f"parallel.activation_checkpoint=offload would keep {candidate.host_bytes / GIB:.1f} GiB of each "
            f"process in host memory, which has {kind.host_memory_gib:g} GiB for it (host_memory_gib in "
            f"configs/hardware/{kind.name}.yaml): offload fewer blocks "
            f"(parallel.activation_checkpoint_blocks), or "
            "use full"
        )


def _without(choices: Mapping[str, Any], *keys: str) -> tuple[Any, ...]:
    """The other choices, without the number of blocks, which follows from them."""
    left_out = {*keys, "activation_checkpoint_blocks"}
    return tuple(value for key, value in choices.items() if key not in left_out)


def _but_how_gathered(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    return _without(choices, "reshard_after_forward", "prefetch")


def _but_checkpointing(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    return _without(choices, "activation_checkpoint")


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest first, but the simplest of those that tie with it before it."""
    ranked = sorted(candidates, key=lambda c: -c.rate())
    tie = [c for c in ranked if c.rate() > ranked[0].rate() * (1 - EQUAL)]
    best = min(tie, key=_complexity, default=None)
    return [best, *(c for c in ranked if c is not best)] if best else []


def _complexity(candidate: Candidate) -> tuple[Any, ...]:
    """What is simpler sorts first: fewer axes, less recomputing, blocks alike, the defaults, and small micro
    batches."""
    c = candidate.choices
    mode, kinds = (
        c["activation_checkpoint"],
        {unit.activation_checkpoint for unit in candidate.plan.units[1:-1]},
    )
    return (
        c["tp"] > 1,
        c["dp_replicate"] > 1,
        CHECKPOINTING.index(mode) if mode in CHECKPOINTING else len(CHECKPOINTING),
        len(kinds),
        c["reshard_after_forward"] is not True,
        str(c["prefetch"]),
        c["tp"],
        c["dp_replicate"],
        c["activation_checkpoint_blocks"],
        c["micro_batch_size"],
    )
