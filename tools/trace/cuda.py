"""Profiled steps of a GPU run: kernels on their streams, with their launches on the CPU (correlation id)."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.events import NcclKernelInfo, TraceEvents
from meshwright.tools.trace.phases import Places, StepPhase, find_axis, find_lane, group_axes
from meshwright.tools.trace.steps import (
    ComputeSpan,
    Interval,
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    as_spans,
)


@dataclass(frozen=True, slots=True)
class _LaunchedKernel:
    """A kernel that ran. It was launched from `issued_ns` to `launched_ns` at `place` on a CPU thread; if
    the trace lacks the launch, thread is -1 and both times are the kernel's start. `sent`: set for a
    collective."""

    start_ns: int
    end_ns: int
    stream: int
    computes: bool
    sent: NcclKernelInfo | None
    issued_ns: int
    launched_ns: int
    thread: int
    place: StepPhase


def cuda_steps(store: TraceEvents, mesh: MeshPlan | None = None) -> list[ProfiledStep]:
    """Return every profiled step. A step starts with its first GPU kernel and ends where the next step
    starts; the first starts no later, and the last ends no earlier, than on the CPU. `mesh`: the run's
    mesh, if known."""
    places, axes = Places(store.steps, store.labels), group_axes(store)
    kernels = _kernels(store, places)
    starts = [start_ns for _, start_ns, _ in store.steps]
    parts: list[list[_LaunchedKernel]] = [[] for _ in starts]
    for kernel in kernels:
        if (number := bisect_right(starts, kernel.issued_ns)) > 0:
            parts[number - 1].append(kernel)
    launched = {kernel.start_ns: kernel.launched_ns for kernel in reversed(kernels)}
    main_stream = _busiest(kernels)
    steps = []
    for (number, _, _), window, part in zip(store.steps, _bounds(store, parts), parts, strict=True):
        works = [ComputeSpan(k.start_ns, k.end_ns, *k.place[1:]) for k in part if k.computes]
        transfers = [_transfer(k, places, axes, mesh) for k in part if not k.computes]
        runs = sorted(_unit_runs(works), key=lambda run: run.start_ns)
        needs = list(_needs([k for k in part if k.computes and k.stream == main_stream]))
        step = ProfiledStep(number, store.rank, *window, works, transfers, runs, needs)
        steps.append(replace(step, host=as_spans(list(_host(step, launched)))))
    return steps


def _kernels(store: TraceEvents, places: Places) -> list[_LaunchedKernel]:
    """Return the kernels in the order of their starts."""
    calls = {correlation: call for *call, correlation in store.calls.rows.tolist()}
    kernels = []
    for i, (start_ns, end_ns, stream, correlation, computes) in enumerate(store.kernels.rows.tolist()):
        issued_ns, launched_ns, thread = calls.get(correlation, (start_ns, start_ns, -1))
        place, sent = places.at(thread, issued_ns), store.sent.get(i)
        kernels.append(
            _LaunchedKernel(
                start_ns, end_ns, stream, bool(computes), sent, issued_ns, launched_ns, thread, place
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.start_ns)


def _bounds(store: TraceEvents, parts: Sequence[Sequence[_LaunchedKernel]]) -> list[Interval]:
    """Return start and end of each step."""
    begins = [
        part[0].start_ns if part else start_ns
        for part, (_, start_ns, _) in zip(parts, store.steps, strict=True)
    ]
    begins[0] = min(begins[0], store.steps[0][1])
    last_ns = max([store.steps[-1][2], *(kernel.end_ns for part in parts for kernel in part)])
    return list(zip(begins, [*begins[1:], last_ns], strict=True))


def _busiest(kernels: Sequence[_LaunchedKernel]) -> int:
    """Return the stream that computes longest."""
    busy = Counter[int]()
    for kernel in kernels:
        if kernel.computes:
            busy[kernel.stream] += kernel.end_ns - kernel.start_ns
    return max(busy, key=busy.__getitem__) if busy else 0


def _transfer(
    kernel: _LaunchedKernel, places: Places, axes: Mapping[str, str], mesh: MeshPlan | None
) -> Transfer:
    place, sent = kernel.place, kernel.sent
    lane, axis, unit = "offload", "", place.unit if place.kind else ""
    if sent:
        axis = axes.get(sent.group) or find_axis(sent.collective, place, mesh)
        lane, unit = find_lane(sent.collective, axis), place.unit if axis else ""
    return Transfer(
        lane,
        axis,
        unit,
        place.phase,
        place.micro_batch,
        kernel.issued_ns,
        kernel.start_ns,
        kernel.end_ns,
        blocking=False,
        bytes=sent.bytes if sent else 0,
        during=places.hook(kernel.thread, kernel.issued_ns),
    )


def _needs(main: Sequence[_LaunchedKernel]) -> Iterator[UnitDeadline]:
    """Yield for each unit, on the main stream, the time between the kernel before its copy out and that
    copy; it starts no earlier than the copy's launch, because until then the GPU waited for the CPU."""
    before_ns, last = 0, None
    for kernel in main:
        copies = kernel.place[2:] if kernel.place.kind == "all_gather_copy_out" else None
        if copies and copies != last:
            needed_ns = min(max(before_ns, kernel.launched_ns), kernel.start_ns)
            yield UnitDeadline(*copies, needed_ns, kernel.start_ns)
        last, before_ns = copies, max(before_ns, kernel.end_ns)


def _host(step: ProfiledStep, launched: Mapping[int, int]) -> Iterator[Interval]:
    """Yield the host-bound part of each gap without any GPU work: until the launch of the kernel that ends
    the gap, or the entire gap if no kernel ends it."""
    for start_ns, end_ns in step.quiet.tolist():
        until_ns = min(launched.get(end_ns, end_ns), end_ns)
        if until_ns > start_ns:
            yield start_ns, until_ns


def _unit_runs(works: Sequence[ComputeSpan]) -> Iterator[UnitRun]:
    """Yield the forward and backward of each unit, from its first to its last kernel."""
    spans = defaultdict[tuple[str, str, int], list[ComputeSpan]](list)
    for work in works:
        if work.unit and work.work in ("forward", "backward"):
            spans[work.unit, work.work, work.micro_batch].append(work)
    for key, own in spans.items():
        yield UnitRun(*key, min(work.start_ns for work in own), max(work.end_ns for work in own))
