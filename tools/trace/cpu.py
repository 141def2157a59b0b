"""Profiled steps of a CPU run over gloo: compute from the operators of the training threads, communication
from gloo's own spans."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.events import Label, Launch, TraceEvents
from meshwright.tools.trace.phases import Places, find_axis, find_lane
from meshwright.tools.trace.steps import (
    ComputeSpan,
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    clip,
    spans_of,
    subtract,
    union,
)

Timed = TypeVar("Timed", ComputeSpan, Transfer, UnitRun)


def cpu_steps(store: TraceEvents, mesh: MeshPlan | None = None) -> list[ProfiledStep]:
    """Return every profiled step. `mesh`: the run's mesh, if known."""
    places = Places(store.steps, store.labels)
    works = sorted(_works(store, places), key=lambda work: work.start_ns)
    transfers = sorted(_transfers(store, places, mesh), key=lambda transfer: transfer.start_ns)
    runs, needs = list(_unit_runs(store.labels, places)), list(_needs(store.labels, places))
    launching = union(spans_of(store.launches))
    steps = []
    for number, start_ns, end_ns in store.steps:
        step = ProfiledStep(
            number,
            store.rank,
            start_ns,
            end_ns,
            _within(works, start_ns, end_ns),
            _within(transfers, start_ns, end_ns),
            _within(runs, start_ns, end_ns),
            [need for need in needs if start_ns <= need.needed_ns < end_ns],
            launching=clip(launching, start_ns, end_ns),
        )
        # the host is the device: without compute or a launched collective Python runs between operators
        queued = union(spans_of(step.transfers, "issued_ns", "start_ns"))
        steps.append(replace(step, host=subtract(step.quiet, queued)))
    return steps


def _within(items: Sequence[Timed], start_ns: int, end_ns: int) -> list[Timed]:
    """Return the items that start in the window; `items` are sorted by start."""
    first = bisect_left(items, start_ns, key=lambda item: item.start_ns)
    return list(items[first : bisect_left(items, end_ns, key=lambda item: item.start_ns)])


def _works(store: TraceEvents, places: Places) -> Iterator[ComputeSpan]:
    """Yield compute spans: each operator once, without its waits and without the work that gloo does while
    a collective is launched."""
    for thread in (places.threads | store.step_threads) & set(store.operators):
        launching = spans_of(launch for launch in store.launches if launch.thread == thread)
        waits = union(np.concatenate([store.waits[thread].rows, launching]))
        spans = store.operators[thread].rows
        spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
        done_ns = np.maximum.accumulate(spans[:, 1])
        spans[1:, 0] = np.maximum(spans[1:, 0], done_ns[:-1])
        for start_ns, end_ns in subtract(spans[spans[:, 0] < spans[:, 1]], waits).tolist():
            yield ComputeSpan(start_ns, end_ns, *places.at(thread, start_ns)[1:])


def _transfers(store: TraceEvents, places: Places, mesh: MeshPlan | None) -> Iterator[Transfer]:
    """Yield gloo's spans, each with the launch that it carries out; a span launched before the profile
    started is left out."""
    around = _launch_labels(store.labels)
    for launch, carried in match_launches(store.launches, store.carried):
        place = places.at(launch.thread, launch.start_ns)
        axis = find_axis(launch.collective, place, mesh)
        launch_label = _around(around.get(launch.thread, []), launch.start_ns)
        yield Transfer(
            find_lane(launch.collective, axis),
            axis,
            place.unit if axis else "",
            place.phase,
            place.micro_batch,
            launch.start_ns,
            carried.start_ns,
            carried.end_ns,
            blocking=bool(launch_label and launch_label.end_ns >= carried.end_ns),
            bytes=0,
            during=places.hook(launch.thread, launch.start_ns),
        )


def match_launches(launches: Sequence[Launch], carried: Sequence[Launch]) -> Iterator[tuple[Launch, Launch]]:
    """Pair each launch, in order, with the first unused span of its collective that starts after it:
    process groups execute collectives in launch order. gloo executes some reduce-scatters as all-reduces
    and names them so."""
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
    """Return FSDP2's annotations around the launches of its collectives, by thread and in order."""
    by_thread = defaultdict[int, list[Label]](list)
    for label in labels:
        if label.kind in ("all_gather", "post_backward_reduce"):
            by_thread[label.thread].append(label)
    return by_thread


def _around(labels: Sequence[Label], time_ns: int) -> Label | None:
    """Return the last label that starts by `time_ns` if it contains that time, else None."""
    i = bisect_right(labels, time_ns, key=lambda label: label.start_ns) - 1
    return labels[i] if i >= 0 and labels[i].end_ns >= time_ns else None


def _unit_runs(labels: Sequence[Label], places: Places) -> Iterator[UnitRun]:
    """Yield the forward and backward of each unit, from its annotations."""
    for label in labels:
        if label.kind in ("forward", "backward"):
            place = places.at(label.thread, label.start_ns)
            yield UnitRun(label.unit, label.kind, place.micro_batch, label.start_ns, label.end_ns)


def _needs(labels: Sequence[Label], places: Places) -> Iterator[UnitDeadline]:
    """Yield for each unit the time from the start of FSDP2's hook before the unit to the end of the copy
    out of the gathered buffer, which waits for the all-gather."""
    hooks = defaultdict[str, list[Label]](list)
    for label in labels:
        if label.kind in ("pre_forward", "pre_backward"):
            hooks[label.unit].append(label)
    for copy in (label for label in labels if label.kind == "all_gather_copy_out"):
        place = places.at(copy.thread, copy.start_ns)
        hook = _around(hooks[copy.unit], copy.start_ns)
        needed_ns = hook.start_ns if hook else copy.start_ns
        yield UnitDeadline(copy.unit, place.phase, place.micro_batch, needed_ns, copy.end_ns)
