"""The step that the plan promised against the one that was measured: lane under lane in a picture, and in
figures. A profiled step is made a Timeline of the planner's, so that both are drawn and compared by the same
code."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.parallel.planner.timeline import EXPOSED, MicroBatchTimeline, Timeline, TimelineEvent
from meshwright.parallel.planner.timeline_plot import (
    MARGIN,
    Panel,
    Span,
    backward_spans,
    draw_panels,
    in_ms,
    join_spans,
    kind_of,
    middle_units,
    phases,
    units_words,
)
from meshwright.tools.trace.steps import ComputeSpan, ProfiledStep, Transfer, total
from meshwright.train.config import Config
from meshwright.train.config_parser import load_config
from meshwright.train.errors import DataError
from meshwright.train.planning.predict import predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE_KINDS = ("forward", "backward", "copies", "optimizer")
LINK_LANES = ("tp", "all_gather", "reduce_scatter", "all_reduce", "offload")
SIDES = ("predicted", "measured")


@dataclass(frozen=True)
class LaneRow:
    """Seconds of a step. `lane`: step; compute and, of it, forward, backward, copies and optimizer; exposed;
    and how long each link lane (tp, all_gather, ...) has something in flight. `ratio`: measured / predicted,
    None where nothing was predicted."""

    lane: str
    predicted_s: float
    measured_s: float
    ratio: float | None


def predict_run(run: Path, device_name: str, processes_per_node: int) -> Timeline:
    """A step of the run in this folder as the planner expects it, by its config.yaml and plan.yaml.

    `device_name`: what torch calls the device that it ran on. Raises DataError that says why nothing can be
    predicted.
    """
    config, plan = _read_run(run)
    hardware = _hardware_of(device_name, config.run.threads, plan, run)
    try:
        return predict(config.job, plan, hardware, processes_per_node).timeline
    except ValueError as error:
        raise DataError(f"{run}: this run cannot be predicted: {error}") from None


def _read_run(run: Path) -> tuple[Config, Plan]:
    for name in ("config.yaml", "plan.yaml"):
        if not (run / name).is_file():
            raise DataError(
                f"{run} has no {name}, so its step cannot be predicted: give the folder of a run (run.dir)"
            )
    try:
        return load_config(run / "config.yaml"), load_plan(run / "plan.yaml")
    except ValueError as error:
        raise DataError(f"{run}: its step cannot be predicted: {error}") from None


def _hardware_of(device_name: str, threads: int, plan: Plan, run: Path) -> Hardware:
    """As far as the run used it: with `run.threads` fewer cores."""
    kinds = load_hardware()
    hardware = find_hardware(device_name) or (kinds["cpu"] if device_name.startswith("CPU") else None)
    if hardware is None:
        raise DataError(
            f"{run}: its step cannot be predicted: no file in configs/hardware describes {device_name!r}. "
            "Measure it: python -m tools.bench calibrate -h"
        )
    if not hardware.cores or not threads:
        return hardware
    return dataclasses.replace(hardware, cores=min(hardware.cores, threads * plan.mesh.world_size))


def compare_lanes(predicted: Timeline, measured: Timeline) -> list[LaneRow]:
    """A row for each lane that either has."""
    rows = []
    before, after = (_lane_seconds(timeline) for timeline in (predicted, measured))
    for lane in ("step", "compute", *COMPUTE_KINDS, EXPOSED, *LINK_LANES):
        if before[lane] or after[lane]:
            rows.append(
                LaneRow(lane, before[lane], after[lane], after[lane] / before[lane] if before[lane] else None)
            )
    return rows


def _lane_seconds(timeline: Timeline) -> Mapping[str, float]:
    seconds = Counter[str]()
    for event in timeline.events:
        if event.lane == "compute":
            seconds[kind_of(event)] += event.seconds  # type: ignore[assignment]
    for lane in LINK_LANES:
        seconds[lane] = _covered(event for event in timeline.events if event.lane == lane)  # type: ignore[assignment]
    totals = {"step": timeline.step_s, "compute": timeline.compute_s, EXPOSED: timeline.exposed_s}
    return Counter(seconds | totals)  # type: ignore[operator]


def _covered(events: Iterable[TimelineEvent]) -> float:
    """Seconds in which at least one of them runs."""
    total_s = end_s = 0.0
    for event in sorted(events, key=lambda event: event.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, end_s))
        end_s = max(end_s, event.end_s)
    return total_s


def draw_against(predicted: Timeline, measured: Timeline, title: str) -> "Figure":
    """Both steps from their starts on, lane under lane on one axis; below, on another, a few units of both
    backwards."""
    both = (predicted, measured)
    spans = [backward_spans(timeline) for timeline in both]
    units = middle_units([unit for unit in spans[0] if unit in spans[1]])
    windows = _windows([join_spans(each, units) for each in spans]) if units else [None, None]
    whole = (0.0, max(timeline.step_s for timeline in both))
    panels = [
        Panel(_facts(timeline, predicted, side), timeline, whole, [*phases(timeline)], window)
        for timeline, side, window in zip(both, SIDES, windows, strict=True)
    ]
    for timeline, side, window, its_spans in zip(both, SIDES, windows, spans, strict=True):
        if window is not None:
            words = _backward_facts(its_spans, spans[0], units, side)
            panels.append(Panel(words, timeline, window, _within(its_spans, window), large=True))
    return draw_panels(title, panels)


def _windows(spans: Sequence[Span]) -> list[Span]:
    """Start and end of each panel, equally long and as far before the first unit."""
    longest_s = max(end_s - start_s for start_s, end_s in spans)
    before_s = min(MARGIN * longest_s, *(start_s for start_s, _ in spans))
    return [(start_s - before_s, start_s + (1 + MARGIN) * longest_s) for start_s, _ in spans]


def _within(spans: Mapping[str, Span], window: Span) -> list[tuple[str, float, float]]:
    """The parts of them that the window shows."""
    parts = (
        (unit, max(start_s, window[0]), min(end_s, window[1])) for unit, (start_s, end_s) in spans.items()
    )
    return [part for part in parts if part[1] < part[2]]


def _facts(timeline: Timeline, predicted: Timeline, side: str) -> str:
    """The step's numbers in one line, each with its difference from the prediction's."""
    neither_s = timeline.step_s - timeline.compute_s - timeline.exposed_s
    parts = [
        f"{side.capitalize()}: step {_with_change(timeline.step_s, predicted.step_s, side)}",
        f"computing {_with_change(timeline.compute_s, predicted.compute_s, side)}",
        f"exposed {_with_change(timeline.exposed_s, predicted.exposed_s, side)}, "
        f"{timeline.exposed_share:.1%} of the step",
        *([f"doing neither {in_ms(neither_s)}"] if neither_s > 1e-3 * timeline.step_s else []),
    ]
    return "; ".join(parts)


def _backward_facts(
    spans: Mapping[str, Span], predicted: Mapping[str, Span], units: Sequence[str], side: str
) -> str:
    seconds, predicted_s = (
        end_s - start_s for start_s, end_s in (join_spans(each, units) for each in (spans, predicted))
    )
    return f"{side.capitalize()} backward of {units_words(units)}: {_with_change(seconds, predicted_s, side)}"


def _with_change(seconds: float, predicted_s: float, side: str) -> str:
    """As "120 ms (+20%)"."""
    changed = side == "measured" and predicted_s > 0
    return in_ms(seconds) + (f" ({round(100 * (seconds / predicted_s - 1)):+,d}%)" if changed else "")


COMPUTE = "compute"


def to_timeline(step: ProfiledStep) -> Timeline:
    """The step from second 0: a round per micro batch, the last one for the optimizer. Besides `compute_s`
    and `exposed_s` a measured `step_s` has time in which nothing happens."""
    events = sorted([*_works(step), *_transfers(step), *_exposed(step)], key=lambda event: event.start_s)
    by_lane = defaultdict[str, float](float)
    for event in events:
        if event.lane == EXPOSED:
            by_lane[event.work] += event.seconds
    rounds = tuple(_rounds(events, step.length_ns / 1e9))
    computing_s, exposed_s = total(step.computing) / 1e9, total(step.exposed) / 1e9
    return Timeline(rounds, step.length_ns / 1e9, computing_s, exposed_s, dict(by_lane))


def _event(
    step: ProfiledStep, lane: str, work: str, of: ComputeSpan | Transfer, start_ns: int, end_ns: int
) -> TimelineEvent:
    start_s, end_s = (start_ns - step.start_ns) / 1e9, (end_ns - step.start_ns) / 1e9
    return TimelineEvent(lane, work, of.unit, "", of.phase, of.micro_batch, start_s, end_s)


def _works(step: ProfiledStep) -> Iterator[TimelineEvent]:
    """One bar at a time, the first begun first: streams beside each other share the lane."""
    done_ns = step.start_ns
    for w in step.works:
        start_ns, end_ns = max(w.start_ns, done_ns), min(w.end_ns, step.end_ns)
        if end_ns > start_ns:
            yield _event(step, COMPUTE, w.work, w, start_ns, end_ns)
            done_ns = end_ns


def _transfers(step: ProfiledStep) -> Iterator[TimelineEvent]:
    for t in step.transfers:
        start_ns, end_ns = max(t.start_ns, step.start_ns), min(t.end_ns, step.end_ns)
        if start_ns < end_ns:
            yield _event(step, t.lane, t.lane, t, start_ns, end_ns)


def _exposed(step: ProfiledStep) -> Iterator[TimelineEvent]:
    """What nothing computed under, each piece with the transfer that is waited for: where several are in
    flight, the one that began first."""
    first = 0
    for start_ns, end_ns in step.exposed.tolist():
        while first < len(step.transfers) and step.transfers[first].end_ns <= start_ns:
            first += 1
        for t, piece in _by_transfer(step.transfers, first, start_ns, end_ns):
            yield _event(step, EXPOSED, t.lane, t, *piece)


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


def _rounds(events: Sequence[TimelineEvent], step_s: float) -> Iterator[MicroBatchTimeline]:
    """Cut where the first event of each micro batch, and of the optimizer, begins; the first round begins
    with the step."""
    parts = defaultdict[tuple[int, bool], list[TimelineEvent]](list)
    for event in events:
        parts[event.micro_batch, event.phase == "optimizer"].append(event)
    ordered = [parts[key] for key in sorted(parts)] or [[]]  # nothing happened in the step
    starts = [0.0, *(part[0].start_s for part in ordered[1:])]
    for part, start_s, end_s in zip(ordered, starts, [*starts[1:], step_s], strict=True):
        moved = (
            TimelineEvent(
                e.lane, e.work, e.unit, e.module, e.phase, 0, e.start_s - start_s, e.end_s - start_s
            )
            for e in part
        )
        yield MicroBatchTimeline(start_s, max(end_s - start_s, 0.0), tuple(moved))
