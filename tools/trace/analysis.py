"""All that `tools.trace` finds out about a profile, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


def answer(
    traces: Mapping[int, Path], shown: int, look: Callable[[dict[str, Any]], None] | None = None
) -> ProfileAnalysis:
    """Read the traces, one after the other, and judge; `shown` is the rank whose step is looked into, and
    whose events `look` sees. Raises DataError."""
    if shown not in traces:
        raise DataError(f"--rank={shown} was not profiled: there are {', '.join(map(str, traces))}")
    path = traces[shown]
    store = load_store(path, look)
    own, facts, device_type = find_steps(store), store.facts, store.device_type
    rank = store.rank if len(traces) == 1 else shown
    steps, clocks, slow, left_out = {shown: own}, {shown: _clock(store)}, find_slow_units(own), list[str]()
    for other in sorted(traces.keys() - {shown}):
        store = load_store(traces[other])  # in the place of the one before: one large trace is in memory
        if why := why_apart(store.facts, other, facts):
            left_out.append(f"{traces[other].name} ({why})")
            continue
        found = find_steps(store)
        clocks[other] = _clock(store)
        slow += find_slow_units(found)
        # what ranks are compared by; the rest of a large trace is let go
        steps[other] = [replace(step, works=(), runs=(), needs=()) for step in found]
    stragglers, clock = list[Straggler](), ""
    if len(steps) > 1:
        steps = dict(sorted(steps.items()))
        stragglers, clock = find_stragglers(steps, clocks, device_type != "cpu", find_mesh(path))
    step = median_step(own)
    return ProfileAnalysis(
        path,
        run_of(path),
        facts,
        device_type,
        rank,
        tuple(steps),
        own,
        step,
        split_step(step),
        sum_communication(step),
        judge_prefetch(step),
        sorted(slow, key=lambda unit: (unit.equals_ns - unit.ns, unit.rank)),
        stragglers,
        clock,
        left_out,
    )


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


def _clock(store: TraceEvents) -> TraceClock:
    return TraceClock(int(store.header.get("baseTimeNanoseconds", 0)), str(store.header.get("host_name", "")))
