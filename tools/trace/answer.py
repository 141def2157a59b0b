"""All that `tools.trace` finds out about a profile, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.trace.cpu import cpu_steps
from tools.trace.cuda import cuda_steps
from tools.trace.find import run_of
from tools.trace.gathers import Prefetch, judge_prefetch
from tools.trace.ranks import Clock, SlowUnit, Straggler, find_slow_units, find_stragglers
from tools.trace.shares import Communication, Shares, median_step, split_step, sum_communication
from tools.trace.steps import Step
from tools.trace.store import Store, load_store
from train.data.config import DataError


@dataclass(frozen=True)
class Answer:
    """What a profile says.

    Args:
        trace: the file that all is of, but for `slow_units` and `stragglers`, which are of all ranks profiled
        run: the folder it lies in, if in a run's
        facts: what train.profiling wrote about the run
        steps: of `rank`; `step` is the one of median length
        clock: how times of several ranks were brought together, "" with one
    """

    trace: Path
    run: Path | None
    facts: Mapping[str, Any]
    device_type: str
    rank: int
    ranks: tuple[int, ...]
    steps: Sequence[Step]
    step: Step
    shares: Shares
    communication: Sequence[Communication]
    prefetch: Sequence[Prefetch]
    slow_units: Sequence[SlowUnit]
    stragglers: Sequence[Straggler]
    clock: str


@dataclass(frozen=True)
class _Rank:
    steps: Sequence[Step]
    clock: Clock
    slow_units: Sequence[SlowUnit]


def answer(traces: Mapping[int, Path], shown: int) -> Answer:
    """Read the traces, one after the other, and judge; `shown` is the rank whose step is looked into. Raises DataError."""
    if shown not in traces:
        raise DataError(f"--rank={shown} was not profiled: there are {', '.join(map(str, traces))}")
    ranks, kept = dict[int, _Rank](), None
    for rank, path in traces.items():
        store = load_store(path)
        steps = find_steps(store)
        ranks[rank] = _Rank([_sent_only(step) for step in steps], _clock(store), find_slow_units(steps))
        if rank == shown:
            kept = store.facts, store.device_type, store.rank if len(traces) == 1 else rank, steps
    assert kept is not None
    facts, device_type, rank, steps = kept
    step = median_step(steps)
    stragglers, clock = _compare(ranks, device_type != "cpu") if len(ranks) > 1 else ([], "")
    slow = sorted((unit for each in ranks.values() for unit in each.slow_units), key=lambda unit: unit.equals_ns - unit.ns)
    return Answer(traces[shown], run_of(traces[shown]), facts, device_type, rank, tuple(traces), steps, step, split_step(step),
                  sum_communication(step), judge_prefetch(step), slow, stragglers, clock)  # fmt: skip


def _compare(ranks: Mapping[int, _Rank], on_device: bool) -> tuple[list[Straggler], str]:
    steps = {rank: each.steps for rank, each in ranks.items()}
    return find_stragglers(steps, {rank: each.clock for rank, each in ranks.items()}, on_device)


def find_steps(store: Store) -> list[Step]:
    """The profiled steps of one rank, on whatever device it ran."""
    return cpu_steps(store) if store.device_type == "cpu" else cuda_steps(store)


def _sent_only(step: Step) -> Step:
    """What ranks are compared by; the rest of a large trace is let go."""
    return replace(step, works=(), runs=(), needs=(), host=())


def _clock(store: Store) -> Clock:
    return Clock(int(store.header.get("baseTimeNanoseconds", 0)), str(store.header.get("host_name", "")))
