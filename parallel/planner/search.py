"""Every legal way to lay out a training job, judged on memory and time; the best is chosen.

What the config gives a value stays as it is; what it leaves at `auto` is tried in every way that makes a difference.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parallel.config import ParallelConfig
from parallel.make_plan import Job, make_plan
from parallel.memory_by_kind import StepMemory
from parallel.plan import ModelUnits, Plan, PlanError
from parallel.planner.costs import step_times
from parallel.planner.hardware import Hardware
from parallel.planner.memory import least_bytes, predict_step_memory, reserved_bytes
from parallel.planner.streams import simulate_step
from parallel.planner.timeline import Timeline
from parallel.planner.work import ModelWork
from parallel.selective import op_mistakes
from parallel.strategy import STRATEGIES, strategy_settings

CHECKPOINTING = ("none", "selective", "full")
PREFETCH = (1, 2)  # units ahead; 0 shows every all-gather
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # where nothing says how many sequences a rank gets
MOST_SEQUENCES = 64  # of a micro batch
EQUAL = 0.01  # rates that differ by less are a tie, which the simpler plan wins
JUDGED = 12  # plans that are timed in full though a faster one is known, for the list of runners-up
NEAREST = 24  # plans whose memory is gone through where none fits, to find the one that needs least


@dataclasses.dataclass(frozen=True)
class Machines:
    """What a job runs on: devices of a kind, so many to a node, with so much memory each."""

    hardware: Hardware
    gpus_per_node: int
    available_bytes: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One legal plan.

    Args:
        choices: what was tried, by key: tp, dp_replicate, dp_shard, activation_checkpoint, reshard_after_forward, prefetch,
            micro_batch_size
        plan: all of it
        least_s: seconds of a step that waits for nothing
        needed_bytes: memory of one rank, the allocator's included; at least, where that is too much already
        memory: by kind, None where it was clear without
        timeline: a step; None for a plan that does not fit, or that would be slower at best
    """

    choices: Mapping[str, Any]
    plan: Plan
    least_s: float
    needed_bytes: int
    memory: StepMemory | None = None
    timeline: Timeline | None = None

    def rate(self) -> float:
        """Sequences per second, of all ranks."""
        return self.plan.global_batch_size / (self.timeline.step_s if self.timeline else self.least_s)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a search found: plans that fit and were timed, the best first; those that do not fit, those that need least
    first; and those that were not timed because they are slower than the best even if they wait for nothing."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    slower: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.fitting[0]


def search(config: ParallelConfig, model: ModelUnits, job: Job, machines: Machines,
           trace: Callable[[Plan], ModelWork]) -> Choice:  # fmt: skip
    """Try all. Raises PlanError if no combination is legal, with what is wrong with the simplest one. That none fits is no
    error: then `fitting` is empty."""
    if config.activation_checkpoint == "auto" and (mistakes := op_mistakes(config.selective_policy, model.attention_ops)):
        raise PlanError("\n".join(mistakes))
    candidates = sorted(_legal(config, model, job, machines, trace), key=lambda c: (-c.rate(), _complexity(c)))
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    slower: list[Candidate] = []
    best_rate = 0.0
    for candidate in candidates:
        if candidate.needed_bytes > machines.available_bytes:
            too_large.append(candidate)
        elif candidate.rate() < best_rate * (1 - EQUAL) and len(fitting) >= JUDGED:
            slower.append(candidate)
        else:
            judged = _judge(candidate, machines, trace(candidate.plan))
            (fitting if judged.timeline else too_large).append(judged)
            best_rate = max(best_rate, judged.rate() if judged.timeline else 0.0)
    too_large.sort(key=_needed)
    if not fitting:
        nearest = [candidate if candidate.memory else _judge(candidate, machines, trace(candidate.plan))
                   for candidate in too_large[:NEAREST]]  # fmt: skip
        too_large = sorted(nearest, key=_needed) + too_large[NEAREST:]
    return Choice(tuple(_ranked(fitting)), tuple(too_large), tuple(slower))


def frugal(config: ParallelConfig, job: Job) -> tuple[ParallelConfig, Job]:
    """The same with the keys left open, all but the tp degree, set to what needs least memory."""
    least = {"dp_replicate": 1, "activation_checkpoint": "full", "reshard_after_forward": True, "forward_prefetch": 1,
             "backward_prefetch": 1}  # fmt: skip
    closed: dict[str, Any] = {key: value for key, value in least.items() if getattr(config, key) == "auto"}
    micro_batch_size = 1 if job.micro_batch_size == "auto" else job.micro_batch_size
    return dataclasses.replace(config, **closed), dataclasses.replace(job, micro_batch_size=micro_batch_size)


def _legal(config: ParallelConfig, model: ModelUnits, job: Job, machines: Machines,
           trace: Callable[[Plan], ModelWork]) -> Iterator[Candidate]:  # fmt: skip
    """All legal plans, with what can be said of them at once."""
    mistakes: list[PlanError] = []
    found = False
    bounds: dict[tuple[Any, ...], tuple[float, int]] = {}  # resharding and prefetching change neither
    for choices in _combinations(config, job, machines.gpus_per_node):
        try:
            tried, tried_job = _with_choices(config, job, choices)
            plan = make_plan(tried, model, tried_job)
        except PlanError as error:
            mistakes.append(error)
            continue
        found = True
        key = tuple(value for name, value in choices.items() if name not in ("reshard_after_forward", "prefetch"))
        if key not in bounds:
            work = trace(plan)
            times = step_times(plan, work, machines.hardware, machines.gpus_per_node)
            bounds[key] = times.busy_s(plan.accumulation), least_bytes(plan, work)
        yield Candidate(choices, plan, *bounds[key])
    if not found:
        raise mistakes[0]


def _with_choices(config: ParallelConfig, job: Job, choices: Mapping[str, Any]) -> tuple[ParallelConfig, Job]:
    """Config and job with the choices in their keys."""
    keys = {key: value for key, value in choices.items() if key not in ("prefetch", "micro_batch_size")}
    keys |= {key: choices["prefetch"] for key in ("forward_prefetch", "backward_prefetch") if getattr(config, key) == "auto"}
    job = dataclasses.replace(job, micro_batch_size=choices["micro_batch_size"])
    return dataclasses.replace(config, plan="manual", **keys), job


def _combinations(config: ParallelConfig, job: Job, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Values of the keys, the simplest first. Degrees that the config leaves open multiply to the number of processes."""
    for tp in _degrees(config.tp, min(gpus_per_node, job.world_size)):
        for replicate, shard, reshards in _data_parallel(config, job, tp):
            prefetches = _prefetches(config, shard)
            modes, sizes = _options(config.activation_checkpoint, CHECKPOINTING), _micro_batches(job, replicate * shard)
            for checkpointing, reshard, prefetch, micro in itertools.product(modes, reshards, prefetches, sizes):
                yield {"tp": tp, "dp_replicate": replicate, "dp_shard": shard, "activation_checkpoint": checkpointing,
                       "reshard_after_forward": reshard, "prefetch": prefetch, "micro_batch_size": micro}  # fmt: skip


def _prefetches(config: ParallelConfig, shard: int) -> tuple[Any, ...]:
    """Depths to try: one where nothing is gathered, or where both directions are given."""
    if "auto" not in (config.forward_prefetch, config.backward_prefetch):
        return (f"{config.forward_prefetch}/{config.backward_prefetch}",)
    return PREFETCH if shard > 1 else PREFETCH[:1]


def _data_parallel(config: ParallelConfig, job: Job, tp: int) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """dp_replicate, dp_shard, and values of reshard_after_forward to try with them: a strategy's own, if one is named, but
    for what the config says otherwise, which `make_plan` refuses."""
    if config.strategy in STRATEGIES:
        own = strategy_settings(config, max(tp, 1), job.world_size, job.gpus_per_node)
        asked = {key: getattr(config, key) for key in ("dp_replicate", "dp_shard")}
        replicate, shard = (own[key] if value in ("auto", -1) else value for key, value in asked.items())
        yield replicate, shard, _options(config.reshard_after_forward, (own.get("reshard_after_forward", True),))
        return
    for replicate in _degrees(config.dp_replicate, job.world_size):
        left = max(1, job.world_size // max(tp * replicate, 1))
        shard = left if config.dp_shard in ("auto", -1) else config.dp_shard
        yield replicate, shard, _options(config.reshard_after_forward, (True,) if shard == 1 else (True, False))


def _options(asked: Any, all_of_them: tuple[Any, ...]) -> tuple[Any, ...]:
    return all_of_them if asked == "auto" else (asked,)


def _degrees(asked: Any, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if most % n == 0] if asked == "auto" else [asked]


def _micro_batches(job: Job, data_parallel: int) -> list[Any]:
    """Sizes to try: those that divide a rank's share of the global batch."""
    if job.micro_batch_size != "auto":
        return [job.micro_batch_size]
    if job.global_batch_size == -1:
        return list(MICRO_BATCHES)
    share = job.global_batch_size // max(data_parallel, 1)
    return [n for n in range(1, min(share, MOST_SEQUENCES) + 1) if share % n == 0] or [1]


def _judge(candidate: Candidate, machines: Machines, work: ModelWork) -> Candidate:
    """The candidate with its memory and, if it fits, its step."""
    memory = predict_step_memory(candidate.plan, work)
    needed = reserved_bytes(memory, machines.hardware)
    judged = dataclasses.replace(candidate, memory=memory, needed_bytes=needed)
    if needed > machines.available_bytes:
        return judged
    times = step_times(candidate.plan, work, machines.hardware, machines.gpus_per_node)
    return dataclasses.replace(judged, timeline=simulate_step(candidate.plan, times))


def _needed(candidate: Candidate) -> int:
    return candidate.needed_bytes


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest first, but the simplest of those that tie with it before it."""
    ranked = sorted(candidates, key=lambda c: -c.rate())
    tie = [c for c in ranked if c.rate() > ranked[0].rate() * (1 - EQUAL)]
    best = min(tie, key=_complexity, default=None)
    return [best, *(c for c in ranked if c is not best)] if best else []


def _complexity(candidate: Candidate) -> tuple[Any, ...]:
    """What is simpler sorts first: fewer axes, less recomputing, the defaults, and small micro batches."""
    c = candidate.choices
    return (c["tp"] > 1, c["dp_replicate"] > 1, CHECKPOINTING.index(c["activation_checkpoint"]) if c["activation_checkpoint"]
            in CHECKPOINTING else len(CHECKPOINTING), c["reshard_after_forward"] is not True, str(c["prefetch"]), c["tp"],
            c["dp_replicate"], c["micro_batch_size"])  # fmt: skip
