"""A profiled step as the planner's Timeline, so that plan and measurement are drawn and compared by the same
code."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwright.parallel.planner.timeline import EXPOSED, Event, Round, Timeline
from meshwright.tools.trace.spans import clip, total
from meshwright.tools.trace.steps import Step, Transfer

COMPUTE = "compute"


def to_timeline(step: Step) -> Timeline:
    """The step from second 0: a round per micro batch, the last one for the optimizer. Besides `compute_s`
    and `exposed_s` a measured `step_s` has time in which nothing happens."""
    events = sorted([*_works(step), *_transfers(step), *_exposed(step)], key=lambda event: event.start_s)
    by_lane, by_unit = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in events:
        if event.lane == EXPOSED:
            by_lane[event.work] += event.seconds
            by_unit[event.unit] += event.seconds
    rounds = tuple(_rounds(events, step.length_ns / 1e9))
    computing_s, exposed_s = total(step.computing) / 1e9, total(step.exposed) / 1e9
    return Timeline(rounds, step.length_ns / 1e9, computing_s, exposed_s, dict(by_lane), dict(by_unit))


def _event(
    step: Step, lane: str, work: str, unit: str, phase: str, micro_batch: int, start_ns: int, end_ns: int
) -> Event:
    start_s, end_s = (start_ns - step.start_ns) / 1e9, (end_ns - step.start_ns) / 1e9
    return Event(lane, work, unit, "", phase, micro_batch, start_s, end_s)


def _works(step: Step) -> Iterator[Event]:
    """One bar at a time, the first begun first: streams beside each other share the lane."""
    done_ns = step.start_ns
    for w in step.works:
        start_ns, end_ns = max(w.start_ns, done_ns), min(w.end_ns, step.end_ns)
        if end_ns > start_ns:
            yield _event(step, COMPUTE, w.work, w.unit, w.phase, w.micro_batch, start_ns, end_ns)
            done_ns = end_ns


def _transfers(step: Step) -> Iterator[Event]:
    for t in step.transfers:
        for span in clip([(t.start_ns, t.end_ns)], step.start_ns, step.end_ns):
            yield _event(step, t.lane, t.lane, t.unit, t.phase, t.micro_batch, *span)


def _exposed(step: Step) -> Iterator[Event]:
    """What nothing computed under, each piece with the transfer that is waited for: where several are in
    flight, the one that began first."""
    first = 0
    for start_ns, end_ns in step.exposed:
        while first < len(step.transfers) and step.transfers[first].end_ns <= start_ns:
            first += 1
        for t, piece in _by_transfer(step.transfers, first, start_ns, end_ns):
            yield _event(step, EXPOSED, t.lane, t.unit, t.phase, t.micro_batch, *piece)


def _by_transfer(
    transfers: Sequence[Transfer], first: int, start_ns: int, end_ns: int
) -> Iterator[tuple[Transfer, tuple[int, int]]]:
    for t in transfers[first:]:
        if start_ns >= end_ns or t.start_ns >= end_ns:
            return
        if t.end_ns > start_ns:
            until_ns = min(t.end_ns, end_ns)
            yield t, (start_ns, until_ns)
            start_ns = until_ns


def _rounds(events: Sequence[Event], step_s: float) -> Iterator[Round]:
    """Cut where the first event of each micro batch, and of the optimizer, begins; the first round begins
    with the step."""
    parts = defaultdict[tuple[int, bool], list[Event]](list)
    for event in events:
        parts[event.micro_batch, event.phase == "optimizer"].append(event)
    ordered = [parts[key] for key in sorted(parts)] or [[]]  # nothing happened in the step
    starts = [0.0, *(part[0].start_s for part in ordered[1:])]
    for part, start_s, end_s in zip(ordered, starts, [*starts[1:], step_s], strict=True):
        moved = (
            Event(e.lane, e.work, e.unit, e.module, e.phase, 0, e.start_s - start_s, e.end_s - start_s)
            for e in part
        )
        yield Round(start_s, max(end_s - start_s, 0.0), tuple(moved))
