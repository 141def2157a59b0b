"""A trace of a run on a CPU over gloo as steps: operators of the threads that train, and gloo's own spans."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.events import Columns, Label, Launch, TraceEvents
from meshwright.tools.trace.phases import Places, find_axis, find_lane
from meshwright.tools.trace.steps import (
    ComputeSpan,
    Interval,
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    clip,
    subtract,
    union,
)

Timed = TypeVar("Timed", ComputeSpan, Transfer, UnitRun)


def cpu_steps(store: TraceEvents, mesh: MeshPlan | None = None) -> list[ProfiledStep]:
    """Every profiled step; `mesh`: the run's, where it is known."""
    places = Places(store.steps, store.labels)
    works = sorted(_works(store, places), key=lambda work: work.start_ns)
    transfers = sorted(_transfers(store, places, mesh), key=lambda transfer: transfer.start_ns)
    runs, needs = list(unit_runs(store.labels, places)), list(_needs(store.labels, places))
    launching = union((launch.start_ns, launch.end_ns) for launch in store.launches)
    return [
        _with_host(
            ProfiledStep(
                number,
                store.rank,
                start_ns,
                end_ns,
                _within(works, start_ns, end_ns),
                _within(transfers, start_ns, end_ns),
                _within(runs, start_ns, end_ns),
                [need for need in needs if start_ns <= need.needed_ns < end_ns],
                (),
                clip(launching, start_ns, end_ns),
            )
        )
        for number, start_ns, end_ns in store.steps
    ]


def _with_host(step: ProfiledStep) -> ProfiledStep:
    """The device is the host: what neither computes nor waits for something that was launched is Python
    between operators."""
    queued = union((t.issued_ns, t.start_ns) for t in step.transfers)
    rest = subtract(subtract([(step.start_ns, step.end_ns)], step.computing), step.in_flight)
    return replace(step, host=subtract(rest, queued))


def _within(items: Sequence[Timed], start_ns: int, end_ns: int) -> list[Timed]:
    """Those that start in the window; sorted."""
    first = bisect_left(items, start_ns, key=lambda item: item.start_ns)
    return list(items[first : bisect_left(items, end_ns, key=lambda item: item.start_ns)])


def _works(store: TraceEvents, places: Places) -> Iterator[ComputeSpan]:
    """Each operator once, without what it waits in it, nor what gloo does when something is launched."""
    for thread in (places.threads | store.step_threads) & set(store.operators):
        launching = ((launch.start_ns, launch.end_ns) for launch in store.launches if launch.thread == thread)
        waits = union([*store.waits.get(thread, Columns()).intervals(), *launching])
        done_ns = 0
        for start_ns, end_ns in sorted(store.operators[thread].intervals()):
            for piece in _without([(max(start_ns, done_ns), end_ns)], waits):
                place = places.at(thread, piece[0])
                yield ComputeSpan(*piece, place.work, place.unit, place.phase, place.micro_batch)
            done_ns = max(done_ns, end_ns)


def _without(pieces: list[Interval], waits: Sequence[Interval]) -> list[Interval]:
    (start_ns, end_ns), *_ = pieces
    if start_ns >= end_ns:
        return []
    first = max(bisect_right(waits, (start_ns, start_ns)) - 1, 0)
    return subtract(pieces, waits[first : bisect_left(waits, (end_ns, end_ns))]) if waits else pieces


def _transfers(store: TraceEvents, places: Places, mesh: MeshPlan | None) -> Iterator[Transfer]:
    """gloo's spans, each with the launch that it carries out; one that was launched before the profile began
    is left out."""
    around = _launch_labels(store.labels)
    for launch, carried in match_launches(store.launches, store.carried):
        place = places.at(launch.thread, launch.start_ns)
        axis = find_axis(launch.collective, place, mesh)
        lane = "tp" if axis == "tp" else find_lane(launch.collective)
        inside: Label | None = _around(around.get(launch.thread, []), launch.start_ns)
        yield Transfer(
            lane,
            axis,
            place.unit if axis else "",
            place.phase,
            place.micro_batch,
            launch.start_ns,
            carried.start_ns,
            carried.end_ns,
            bool(inside and inside.end_ns >= carried.end_ns),
            0,
            places.hook(launch.thread, launch.start_ns),
        )


def match_launches(launches: Sequence[Launch], carried: Sequence[Launch]) -> Iterator[tuple[Launch, Launch]]:
    """Launches in order, each with the first span of its collective not yet taken that began after it: groups
    work in the order of their launches. gloo carries some reduce-scatters out as all-reduces, and says so."""
    waiting = defaultdict[str, list[Launch]](list)
    for span in sorted(carried, key=lambda span: span.start_ns, reverse=True):
        waiting[span.collective].append(span)
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        kind = launch.collective
        if kind == "reduce_scatter" and not waiting[kind]:
            kind = "all_reduce"
        while waiting[kind] and waiting[kind][-1].start_ns < launch.start_ns:
            waiting[kind].pop()
        if waiting[kind]:
            yield launch, waiting[kind].pop()


def _launch_labels(labels: Sequence[Label]) -> dict[int, list[Label]]:
    """By thread, FSDP2's around the launching of its collectives, in order."""
    found = defaultdict[int, list[Label]](list)
    for label in sorted(labels, key=lambda each: each.start_ns):
        if label.kind in ("all_gather", "post_backward_reduce"):
            found[label.thread].append(label)
    return found


def _around(labels: Sequence[Label], time_ns: int) -> Label | None:
    i = bisect_right(labels, time_ns, key=lambda label: label.start_ns) - 1
    return labels[i] if i >= 0 and labels[i].end_ns >= time_ns else None


def unit_runs(labels: Sequence[Label], places: Places) -> Iterator[UnitRun]:
    """By the labels of each unit's own work; without them, as in a trace that train.profiling did not make,
    from the end of FSDP2's hook before it to the start of the one behind it."""
    ordered = sorted(labels, key=lambda label: label.start_ns)
    named = [label for label in ordered if label.kind in ("forward", "backward")]
    for label in named or list(_between_hooks(ordered)):
        place = places.at(label.thread, label.start_ns)
        yield UnitRun(label.unit, label.kind, place.micro_batch, label.start_ns, label.end_ns)


def _between_hooks(ordered: Sequence[Label]) -> Iterator[Label]:
    hooks = {
        "pre_forward": "forward",
        "post_forward": "forward",
        "pre_backward": "backward",
        "post_backward_accumulate": "backward",
    }
    by_unit = defaultdict[tuple[str, str], list[Label]](list)
    for label in ordered:
        if label.kind in hooks:
            by_unit[label.unit, hooks[label.kind]].append(label)
    made = [
        Label(before.thread, phase, unit, before.end_ns, after.start_ns)
        for (unit, phase), labels in by_unit.items()
        for before, after in pairwise(labels)
        if before.kind.startswith("pre") and after.kind.startswith("post")
    ]
    return iter(sorted(made, key=lambda label: label.start_ns))


def _needs(labels: Sequence[Label], places: Places) -> Iterator[UnitDeadline]:
    """From the start of FSDP2's hook before a unit to the end of the copy out of what was gathered, which
    waits for it."""
    hooks = [label for label in labels if label.kind in ("pre_forward", "pre_backward")]
    by_unit = defaultdict[str, list[Label]](list)
    for hook in sorted(hooks, key=lambda label: label.start_ns):
        by_unit[hook.unit].append(hook)
    for copy in sorted(
        (label for label in labels if label.kind == "all_gather_copy_out"), key=lambda label: label.start_ns
    ):
        place = places.at(copy.thread, copy.start_ns)
        before = _around(by_unit[copy.unit], copy.start_ns)
        yield UnitDeadline(
            copy.unit,
            place.phase,
            place.micro_batch,
            before.start_ns if before else copy.start_ns,
            copy.end_ns,
        )
