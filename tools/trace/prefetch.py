"""Judge a step's all-gathers (in time, late or far too early, and which prefetch depth is best), split the
step's time into shares that sum to exactly 1, and sum communication by kind, with the hidden part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mode

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import MicroBatch, ModelUnits, UnitPlan
from meshwright.parallel.planner.cost_model import ModuleTimes, PhaseTimes, StepTimes, UnitTimes
from meshwright.parallel.planner.step_time import TaskSink, run_tasks
from meshwright.parallel.planner.timeline import AXIS_OF_LANE, COMPUTE
from meshwright.parallel.planner.walk import StepWalk
from meshwright.tools.trace.steps import (
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    clip,
    intersect,
    is_gather,
    spans_of,
    total,
    union,
)

LATE_SHARE, LATE_NS = 0.001, 20_000  # share of the step, and minimum: shorter waits do not count
# other units that run between an all-gather's end and its need; at depth 1 it ends during the unit before
EARLY_UNITS = 2
DEEPEST = 8  # depth that is tried
LINK_LIMIT = "no depth helps: the link is the limit"
WORTH = 0.005  # of the step: the least saving that is worth advice


@dataclass(frozen=True)
class Gather:
    """One unit's all-gather in one phase of one micro batch.

    Args:
        times_ns: when it was "issued", "started" and "finished", and when it was "needed"
        ahead: how many units before its own it was launched; None if not known
        waited_ns: how long compute waited for it
        held_units: number of other units that ran between its end and its need
        first: whether it is the first of its phase
        blocking: whether its launch blocked the thread until it ended
        depth: smallest prefetch depth with which it would have been in time; None if there is none, or if it
            was in time
    """

    unit: str
    phase: str
    times_ns: Mapping[str, int]
    waited_ns: int
    ahead: int | None
    held_units: int
    late: bool
    first: bool
    blocking: bool
    depth: int | None

    @property
    def verdict(self) -> str:
        """The judgment as text."""
        if self.late and self.blocking:
            return f"blocked for {self.waited_ns / 1e6:.2f} ms: its launch waits for its end"
        if self.late and self.first:
            return f"waited {self.waited_ns / 1e6:.2f} ms: the first one, no compute before it"
        if self.late:
            fix = f"depth {self.depth} hides it" if self.depth is not None else LINK_LIMIT
            return f"late by {self.waited_ns / 1e6:.2f} ms ({fix})"
        early = f"far too early: held for {self.held_units} units"
        return early if self.held_units >= EARLY_UNITS else "in time"


@dataclass(frozen=True)
class Prefetch:
    """A phase of one micro batch: measured waits, and predicted waits for each prefetch depth from 0.

    Args:
        used: the depth with which most units were gathered
        waited_ns: measured wait, including waits that no depth hides
        waits_ns: wait by depth up to DEEPEST, from simulated phases with the measured durations
        best: smallest depth that is (nearly) as good as any
        blocking: whether launches blocked until their all-gathers ended, so that no depth hides any
    """

    phase: str
    micro_batch: int
    used: int
    waited_ns: int
    waits_ns: tuple[int, ...]
    best: int
    blocking: bool
    gathers: tuple[Gather, ...]

    @property
    def saving_ns(self) -> int:
        """The time that the best depth would save."""
        return 0 if self.blocking else max(self.waited_ns - self.waits_ns[self.best], 0)


def judge_prefetch(step: ProfiledStep, on_device: bool) -> list[Prefetch]:
    """Judge each phase with all-gathers. `on_device`: on a GPU, whose host launches ahead of it."""
    needs = sorted(step.needs, key=lambda need: need.needed_ns)
    judged = (
        _judge_phase(step, key, on_device) for key in dict.fromkeys((n.phase, n.micro_batch) for n in needs)
    )
    return [prefetch for prefetch in judged if prefetch is not None]


def _judge_phase(step: ProfiledStep, key: tuple[str, int], on_device: bool) -> Prefetch | None:
    # a unit is gathered for its first run
    first_runs = {run.unit: run for run in reversed(step.runs) if (run.phase, run.micro_batch) == key}
    runs = sorted(first_runs.values(), key=lambda run: run.start_ns)
    needs = {need.unit: need for need in reversed(step.needs) if (need.phase, need.micro_batch) == key}
    sent = {t.unit: t for t in reversed(step.transfers) if is_gather(t) and (t.phase, t.micro_batch) == key}
    if not (gathered := [run.unit for run in runs if run.unit in needs and run.unit in sent]):
        return None
    times = _measured_times(step, runs, sent, key)
    sink = TaskSink if on_device else ThreadSink
    depths = range(min(len(runs), DEEPEST) + 1)
    waits = [waits_with_depth(times, key[0], depth, sink) for depth in depths]
    late_ns = max(LATE_NS, round(LATE_SHARE * step.length_ns))
    gathers = [
        _judge(step, runs, needs[unit], sent[unit], [by_unit[unit] for by_unit in waits], late_ns)
        for unit in gathered
    ]
    totals = tuple(sum(by_unit.values()) for by_unit in waits)
    blocking = sum(sent[unit].blocking for unit in gathered) > 0.9 * len(gathered)
    best = next(
        depth for depth, waited in enumerate(totals) if waited <= min(totals) + WORTH * step.length_ns / 2
    )
    # no unit runs before the first
    ahead = [gather.ahead for gather in gathers[1:] if gather.ahead is not None]
    used = mode(ahead) if ahead else 0
    waited_ns = sum(gather.waited_ns for gather in gathers)
    return Prefetch(*key, used, waited_ns, totals, best, blocking, tuple(gathers))


def _measured_times(
    step: ProfiledStep, runs: Sequence[UnitRun], sent: dict[str, Transfer], key: tuple[str, int]
) -> StepTimes:
    """Return the times of the units of a phase, in the order of execution. Compute is the time between starts
    of units, without communication."""
    scatters = defaultdict[str, int](int)
    for t in step.transfers:
        if t.lane == "reduce_scatter" and (t.phase, t.micro_batch) == key:
            scatters[t.unit] += t.end_ns - t.start_ns
    starts = [*(run.start_ns for run in runs), max(run.end_ns for run in runs)]
    units, modules = dict[str, UnitTimes](), dict[str, ModuleTimes]()
    for run, (start_ns, next_ns) in zip(runs, pairwise(starts), strict=True):
        gather = sent.get(run.unit)
        gather_s = (gather.end_ns - gather.start_ns) / 1e9 if gather else 0.0
        compute = PhaseTimes((next_ns - start_ns - exposed_within(step, start_ns, next_ns)) / 1e9)
        units[run.unit] = UnitTimes(gather_s, gather_s, 0.0, 0.0, scatters[run.unit] / 1e9, 0.0)
        modules[run.unit] = ModuleTimes(compute, compute)
    return StepTimes(units, modules, 0.0, overlaps=True, slowdown=dict.fromkeys(AXIS_OF_LANE, 0.0))


class ThreadSink(TaskSink):
    """The tasks of a CPU, whose thread launches an all-gather only when it has computed what comes before."""

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """Start an all-gather after the compute before it."""
        self._gather_after += [self._last[COMPUTE]] if COMPUTE in self._last else []
        super().gather(unit, phase, again)


def waits_with_depth(times: StepTimes, phase: str, depth: int, sink_of: type[TaskSink]) -> dict[str, int]:
    """Return the wait of each unit for its all-gather, in ns, from a walk through one phase in which each
    unit starts the next `depth` all-gathers ahead.

    `times`: of the units of one phase and micro batch, each with one module, in the order of execution.
    """
    modules = list(times.modules) if phase == "forward" else list(times.modules)[::-1]
    model = ModelUnits(dict.fromkeys(modules, 1), [(name,) for name in modules], frozenset(), frozenset())
    config = ParallelConfig(forward_prefetch=depth, backward_prefetch=depth)
    plan = make_plan(config, model, RunShape(2, 2, 1, 1, 2))
    sink = sink_of(plan, times)
    walk, only = StepWalk(plan, sink, times.has_backward), MicroBatch(first=True, last=True)
    walk.forward(only) if phase == "forward" else walk.backward(only)
    waits, free_s = dict[str, int](), 0.0
    for task, span in zip(sink.tasks, run_tasks(sink.tasks, times.slowdown), strict=True):
        if task.lane == COMPUTE:
            if task.work == "copy_out":
                waits[task.unit] = round((span.start_s - free_s) * 1e9)
            free_s = span.end_s
    return waits


def _judge(
    step: ProfiledStep,
    runs: Sequence[UnitRun],
    need: UnitDeadline,
    sent: Transfer,
    waits: Sequence[int],
    late_ns: int,
) -> Gather:
    waited_ns = max(min(sent.end_ns, need.served_ns) - need.needed_ns, 0)
    if sent.blocking:
        waited_ns = exposed_within(step, sent.start_ns, sent.end_ns)
    late = waited_ns > late_ns
    order = [run.unit for run in runs]
    ahead = order.index(need.unit) - order.index(sent.during) if sent.during in order else None
    held = sum(sent.end_ns <= run.start_ns and run.end_ns <= need.needed_ns for run in runs)
    depth = next((d for d, wait in enumerate(waits) if wait <= late_ns), None) if late else None
    times_ns = {"issued": sent.issued_ns, "started": sent.start_ns, "finished": sent.end_ns}
    times_ns["needed"] = need.needed_ns
    first = order[0] == need.unit
    return Gather(need.unit, need.phase, times_ns, waited_ns, ahead, held, late, first, sent.blocking, depth)


KINDS = {  # kind of time -> description
    "compute": "computing, no communication in flight",
    "overlapped": "computing, with hidden communication",
    "exposed": "exposed communication: nothing computes",
    "host": "host-bound: nothing launched yet",
    "idle": "otherwise idle",
}


@dataclass(frozen=True)
class Communication:
    """One kind of collective on one axis: time in flight, and the part of it that is hidden under compute."""

    lane: str
    axis: str
    count: int
    ns: int
    hidden_ns: int
    bytes: int


def split_step(step: ProfiledStep) -> dict[str, int]:
    """Return the nanoseconds of each kind in KINDS; they sum to the step's length."""
    overlapped = total(intersect(step.computing, step.in_flight))
    host = total(step.host)
    compute, exposed = total(step.computing) - overlapped, total(step.exposed)
    idle = step.length_ns - compute - overlapped - exposed - host
    assert idle >= 0, "host-bound time overlaps other time"
    return {"compute": compute, "overlapped": overlapped, "exposed": exposed, "host": host, "idle": idle}


def to_shares(spent_ns: Mapping[str, int]) -> dict[str, float]:
    """Return the shares of the times; the last one is the remainder: they sum to exactly 1 in this order."""
    *first, last = spent_ns
    shares = {kind: spent_ns[kind] / sum(spent_ns.values()) for kind in first}
    return shares | {last: 1.0 - sum(shares.values())}


def sum_communication(step: ProfiledStep) -> list[Communication]:
    """Sum transfers by lane and axis, longest first. Overlaps count once as time, but add up as bytes."""
    by_kind = defaultdict[tuple[str, str], list[Transfer]](list)
    for t in step.transfers:
        by_kind[t.lane, t.axis].append(t)
    rows = []
    for kind, sent in by_kind.items():
        spans = union(clip(spans_of(sent), step.start_ns, step.end_ns))
        hidden_ns, size = total(intersect(spans, step.computing)), sum(t.bytes for t in sent)
        rows.append(Communication(*kind, len(sent), total(spans), hidden_ns, size))
    return sorted(rows, key=lambda row: -row.ns)


def median_step(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """Return the step of median length; of two middle ones, the longer."""
    return sorted(steps, key=lambda step: step.length_ns)[len(steps) // 2]


def exposed_within(step: ProfiledStep, start_ns: int, end_ns: int) -> int:
    """Return how long within a window nothing computed while communication was in flight."""
    return total(clip(step.exposed, start_ns, end_ns))
