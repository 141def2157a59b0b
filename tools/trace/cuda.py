"""A trace of a run on a GPU as steps: kernels on their streams, each with the launch that its correlation
names."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.events import COLLECTIVE, KERNEL, TraceEvents
from meshwright.tools.trace.phases import Places, StepPhase, find_axis, find_lane, group_axes
from meshwright.tools.trace.steps import (
    ComputeSpan,
    Interval,
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    subtract,
)

Call = tuple[int, int, int]  # start, end, thread


def cuda_steps(store: TraceEvents, mesh: MeshPlan | None = None) -> list[ProfiledStep]:
    """Every profiled step. It begins with its first kernel on the GPU and ends where the next one begins; the
    first one begins, and the last one ends, no later and no sooner than on the CPU. `mesh`: the run's, where
    it is known."""
    device = _Device(store, mesh)
    starts = [start_ns for _, start_ns, _ in store.steps]
    parts = [[i for i in range(len(device.order)) if device.step_of[i] == k] for k in range(len(starts))]
    bounds = _bounds(store, device, parts)
    return [
        device.step(number, window, part)
        for (number, _, _), window, part in zip(store.steps, bounds, parts, strict=True)
    ]


def _bounds(store: TraceEvents, device: "_Device", parts: Sequence[Sequence[int]]) -> list[Interval]:
    begins = [
        device.start_ns(part[0]) if part else start_ns
        for part, (_, start_ns, _) in zip(parts, store.steps, strict=True)
    ]
    begins[0] = min(begins[0], store.steps[0][1])
    last_ns = max([store.steps[-1][2], *(device.end_ns(i) for part in parts for i in part)])
    return list(zip(begins, [*begins[1:], last_ns], strict=True))


class _Device:
    """Kernels in the order of their starts; indices are places in that order."""

    def __init__(self, store: TraceEvents, mesh: MeshPlan | None) -> None:
        kernels, calls = store.kernels, store.calls
        self._kernels = kernels
        self._store = store
        self.order = sorted(range(len(kernels)), key=kernels.start_ns.__getitem__)
        self._index = {correlation: i for i, correlation in enumerate(calls.correlation)}
        self._places = Places(store.steps, store.labels)
        starts = [start_ns for _, start_ns, _ in store.steps]
        self.places = list[StepPhase]()
        self.step_of = list[int]()  # -1 before the first
        for i in range(len(self.order)):
            start_ns, _, thread = self.call(i)
            self.places.append(self._places.at(thread, start_ns))
            self.step_of.append(bisect_right(starts, start_ns) - 1)
        self._launched = {self.start_ns(i): self.call(i)[1] for i in reversed(range(len(self.order)))}
        self._mesh, self._axes = mesh, group_axes(store)
        self._main_stream = self._busiest()

    def start_ns(self, i: int) -> int:
        return self._kernels.start_ns[self.order[i]]

    def end_ns(self, i: int) -> int:
        return self._kernels.end_ns[self.order[i]]

    def call(self, i: int) -> Call:
        """The launch; where the trace has none, as if on no thread and at the kernel's start."""
        found = self._index.get(self._kernels.correlation[self.order[i]])
        if found is None:
            return self.start_ns(i), self.start_ns(i), -1
        calls = self._store.calls
        return calls.start_ns[found], calls.end_ns[found], calls.thread[found]

    def _busiest(self) -> int:
        """The stream that computes most."""
        busy = Counter[int]()
        for i, at in enumerate(self.order):
            if self._kernels.kind[at] == KERNEL:
                busy[self._kernels.stream[at]] += self.end_ns(i) - self.start_ns(i)
        return max(busy, key=busy.__getitem__) if busy else 0

    def step(self, number: int, window: Interval, part: Sequence[int]) -> ProfiledStep:
        """The step of the kernels `part`."""
        works = [self._work(i) for i in part if self._kernels.kind[self.order[i]] == KERNEL]
        transfers = [self._transfer(i) for i in part if self._kernels.kind[self.order[i]] != KERNEL]
        runs = sorted(_unit_runs(works), key=lambda run: run.start_ns)
        step = ProfiledStep(
            number, self._store.rank, *window, works, transfers, runs, list(self._needs(part)), ()
        )
        return replace(step, host=list(self._host(step)))

    def _work(self, i: int) -> ComputeSpan:
        place = self.places[i]
        return ComputeSpan(
            self.start_ns(i), self.end_ns(i), place.work, place.unit, place.phase, place.micro_batch
        )

    def _transfer(self, i: int) -> Transfer:
        at, place = self.order[i], self.places[i]
        unit, issued_ns = place.unit if place.kind else "", self.call(i)[0]
        lane, axis, size = "offload", "", 0
        if self._kernels.kind[at] == COLLECTIVE:
            sent = self._kernels.sent[at]
            axis, size = (
                self._axes.get(sent.group) or find_axis(sent.collective, place, self._mesh),
                sent.bytes,
            )
            lane, unit = "tp" if axis == "tp" else find_lane(sent.collective), place.unit if axis else ""
        return Transfer(
            lane,
            axis,
            unit,
            place.phase,
            place.micro_batch,
            issued_ns,
            self.start_ns(i),
            self.end_ns(i),
            blocking=False,
            bytes=size,
            during=self._places.hook(self.call(i)[2], issued_ns),
        )

    def _needs(self, part: Sequence[int]) -> Iterator[UnitDeadline]:
        """On the main stream, between the kernel before a unit's copying out and that; not before the copy
        was launched, as until then the GPU stood for the CPU."""
        before_ns, last = 0, None
        for i in part:
            if (
                self._kernels.stream[self.order[i]] != self._main_stream
                or self._kernels.kind[self.order[i]] != KERNEL
            ):
                continue
            place = self.places[i]
            copies = place.unit, place.phase, place.micro_batch
            if place.kind == "all_gather_copy_out" and copies != last:
                yield UnitDeadline(
                    *copies, min(max(before_ns, self.call(i)[1]), self.start_ns(i)), self.start_ns(i)
                )
            last = copies if place.kind == "all_gather_copy_out" else None
            before_ns = max(before_ns, self.end_ns(i))

    def _host(self, step: ProfiledStep) -> Iterator[Interval]:
        """Of each gap in which nothing ran, the part until what ended it had been launched; all of one that
        nothing ended."""
        for start_ns, end_ns in subtract(
            subtract([(step.start_ns, step.end_ns)], step.computing), step.in_flight
        ):
            until_ns = min(self._launched.get(end_ns, end_ns), end_ns)
            if until_ns > start_ns:
                yield start_ns, until_ns


def _unit_runs(works: Sequence[ComputeSpan]) -> Iterator[UnitRun]:
    """From the first to the last kernel of each unit's own work."""
    spans: dict[tuple[str, str, int], Interval] = {}
    for work in works:
        if work.unit and work.work in ("forward", "backward"):
            key = work.unit, work.work, work.micro_batch
            start_ns, end_ns = spans.get(key, (work.start_ns, work.end_ns))
            spans[key] = min(start_ns, work.start_ns), max(end_ns, work.end_ns)
    for (unit, phase, micro_batch), span in spans.items():
        yield UnitRun(unit, phase, micro_batch, *span)
