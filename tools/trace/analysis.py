"""The full analysis of a profile, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.tools.trace.cpu import cpu_steps
from meshwright.tools.trace.cuda import cuda_steps
from meshwright.tools.trace.events import TraceEvents, load_store
from meshwright.tools.trace.prefetch import (
    Communication,
    Prefetch,
    judge_prefetch,
    median_step,
    split_step,
    sum_communication,
)
from meshwright.tools.trace.reader import find_difference, find_mesh, run_of
from meshwright.tools.trace.steps import ProfiledStep
from meshwright.tools.trace.stragglers import SlowUnit, Straggler, find_slow_units, find_stragglers
from meshwright.train.errors import DataError


@dataclass(frozen=True)
class ProfileAnalysis:
    """The analysis of a profile.

    Args:
        trace: the analyzed file; only `slow_units` and `stragglers` cover all profiled ranks
        facts: what train.profiling recorded about the run
        steps: profiled steps of `rank`; `step` is the one of median length
        left_out: traces of other runs in the same folder, each with the difference
        clock: how times of several ranks were aligned; "" for one rank
    """

    trace: Path
    facts: Mapping[str, Any]
    device_type: str
    rank: int
    ranks: tuple[int, ...]
    steps: Sequence[ProfiledStep]
    step: ProfiledStep
    communication: Sequence[Communication]
    prefetch: Sequence[Prefetch]
    slow_units: Sequence[SlowUnit]
    stragglers: Sequence[Straggler]
    clock: str
    left_out: Sequence[str]

    @property
    def run(self) -> Path | None:
        """The run's folder; None if the trace is not in one."""
        return run_of(self.trace)

    @cached_property
    def spent_ns(self) -> dict[str, int]:
        """The kinds of time in `step`."""
        return split_step(self.step)


def analyze_profile(
    traces: Mapping[int, Path], shown: int, on_event: Callable[[dict[str, Any]], None] | None = None
) -> ProfileAnalysis:
    """Read the traces, one after the other, and analyze the step of the rank `shown`. `on_event`: called with
    every event of that rank. Raises DataError."""
    if shown not in traces:
        raise DataError(f"--rank={shown} was not profiled: use one of {', '.join(map(str, traces))}")
    path = traces[shown]
    store = load_store(path, on_event)
    own, facts, device_type = find_steps(store), store.facts, store.device_type
    rank = store.rank if len(traces) == 1 else shown
    steps, clocks, slow, left_out = {shown: own}, {shown: store.clock}, find_slow_units(own), list[str]()
    for other_rank in sorted(traces.keys() - {shown}):
        store = load_store(traces[other_rank])  # replaces the one before, to keep one large trace in memory
        if difference := find_difference(store.facts, other_rank, facts):
            left_out.append(f"{traces[other_rank].name} ({difference})")
            continue
        other_steps = find_steps(store)
        clocks[other_rank] = store.clock
        slow += find_slow_units(other_steps)
        # keep what ranks are compared by; the rest may be large
        steps[other_rank] = [replace(step, works=(), runs=(), needs=()) for step in other_steps]
    stragglers, clock = list[Straggler](), ""
    if len(steps) > 1:
        steps = dict(sorted(steps.items()))
        stragglers, clock = find_stragglers(steps, clocks, device_type != "cpu", find_mesh(path))
    step = median_step(own)
    communication, prefetch = sum_communication(step), judge_prefetch(step, device_type != "cpu")
    slow.sort(key=lambda unit: (unit.equals_ns - unit.ns, unit.rank))
    of_step = step, communication, prefetch, slow, stragglers
    return ProfileAnalysis(path, facts, device_type, rank, tuple(steps), own, *of_step, clock, left_out)


def find_steps(store: TraceEvents) -> list[ProfiledStep]:
    """Return the profiled steps of one rank, on CPU or GPU. Raises DataError if a step has no duration."""
    mesh = find_mesh(store.path)
    steps = cpu_steps(store, mesh) if store.device_type == "cpu" else cuda_steps(store, mesh)
    for step in steps:
        if step.length_ns <= 0:
            raise DataError(
                f"{store.path}: step {step.number} has a duration of 0, so it has no shares to compute: "
                "profile again"
            )
    return steps
