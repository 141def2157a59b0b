"""All that `tools.trace` finds out about a profile, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.cpu import cpu_steps
from meshwright.tools.trace.cuda import cuda_steps
from meshwright.tools.trace.events import TraceEvents, load_store
from meshwright.tools.trace.prefetch import (
    Communication,
    Prefetch,
    Shares,
    judge_prefetch,
    median_step,
    split_step,
    sum_communication,
)
from meshwright.tools.trace.reader import find_mesh, run_of, why_apart
from meshwright.tools.trace.steps import ProfiledStep
from meshwright.tools.trace.stragglers import (
    SlowUnit,
    Straggler,
    TraceClock,
    find_slow_units,
    find_stragglers,
)
from meshwright.train.errors import DataError


@dataclass(frozen=True)
class ProfileAnalysis:
    """What a profile says.

    Args:
        trace: the file that all is of, but for `slow_units` and `stragglers`, which are of all ranks profiled
        run: the folder it lies in, if in a run's
        facts: what train.profiling wrote about the run
        steps: of `rank`; `step` is the one of median length
        left_out: traces of other runs that lie beside it, each with what tells them apart
        clock: how times of several ranks were brought together, "" with one
    """

    trace: Path
    run: Path | None
    facts: Mapping[str, Any]
    device_type: str
    rank: int
    ranks: tuple[int, ...]
    steps: Sequence[ProfiledStep]
    step: ProfiledStep
    shares: Shares
    communication: Sequence[Communication]
    prefetch: Sequence[Prefetch]
    slow_units: Sequence[SlowUnit]
    stragglers: Sequence[Straggler]
    clock: str
    left_out: Sequence[str]


@dataclass(frozen=True)
class _Rank:
    steps: Sequence[ProfiledStep]
    clock: TraceClock
    slow_units: Sequence[SlowUnit]


def answer(traces: Mapping[int, Path], shown: int) -> ProfileAnalysis:
    """Read the traces, one after the other, and judge; `shown` is the rank whose step is looked into. Raises
    DataError."""
    if shown not in traces:
        raise DataError(f"--rank={shown} was not profiled: there are {', '.join(map(str, traces))}")
    store = load_store(traces[shown])
    steps, facts, device_type = find_steps(store), store.facts, store.device_type
    rank = store.rank if len(traces) == 1 else shown
    ranks, left_out = {shown: _of_rank(store, steps)}, list[str]()
    for other, path in traces.items():
        if other != shown:
            store = load_store(path)  # in the place of the one before: one large trace at a time is in memory
            if why := why_apart(store.facts, other, facts):
                left_out.append(f"{path.name} ({why})")
            else:
                ranks[other] = _of_rank(store, find_steps(store))
    ranks, step = dict(sorted(ranks.items())), median_step(steps)
    mesh = find_mesh(traces[shown])
    stragglers, clock = _compare(ranks, device_type != "cpu", mesh) if len(ranks) > 1 else ([], "")
    slow = sorted(
        (unit for each in ranks.values() for unit in each.slow_units),
        key=lambda unit: unit.equals_ns - unit.ns,
    )
    return ProfileAnalysis(
        traces[shown],
        run_of(traces[shown]),
        facts,
        device_type,
        rank,
        tuple(ranks),
        steps,
        step,
        split_step(step),
        sum_communication(step),
        judge_prefetch(step),
        slow,
        stragglers,
        clock,
        left_out,
    )


def _of_rank(store: TraceEvents, steps: Sequence[ProfiledStep]) -> _Rank:
    return _Rank([_sent_only(step) for step in steps], _clock(store), find_slow_units(steps))


def _compare(
    ranks: Mapping[int, _Rank], on_device: bool, mesh: MeshPlan | None
) -> tuple[list[Straggler], str]:
    steps = {rank: each.steps for rank, each in ranks.items()}
    return find_stragglers(steps, {rank: each.clock for rank, each in ranks.items()}, on_device, mesh)


def find_steps(store: TraceEvents) -> list[ProfiledStep]:
    """The profiled steps of one rank, on whatever device it ran. Raises DataError for one that takes no
    time."""
    mesh = find_mesh(store.path)
    steps = cpu_steps(store, mesh) if store.device_type == "cpu" else cuda_steps(store, mesh)
    for step in steps:
        if step.length_ns <= 0:
            raise DataError(
                f"{store.path}: step {step.number} takes no time, so there is nothing to share out. Profile "
                "again"
            )
    return steps


def _sent_only(step: ProfiledStep) -> ProfiledStep:
    """What ranks are compared by; the rest of a large trace is let go."""
    return replace(step, works=(), runs=(), needs=(), host=())


def _clock(store: TraceEvents) -> TraceClock:
    return TraceClock(int(store.header.get("baseTimeNanoseconds", 0)), str(store.header.get("host_name", "")))
