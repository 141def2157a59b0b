"""Compare the measured step with the one that the plan predicted, in a picture and in figures. A profiled
step is converted to a planner Timeline, so that the same code draws and compares both."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.parallel.planner.timeline import (
    COMPUTE,
    EXPOSED,
    HOST_BOUND,
    LINKS,
    MicroBatchTimeline,
    Timeline,
    TimelineEvent,
)
from meshwright.parallel.planner.timeline_plot import (
    MARGIN,
    NOTABLE,
    Panel,
    Span,
    backward_spans,
    color_key,
    draw_panels,
    format_units,
    in_ms,
    join_spans,
    middle_units,
    phases,
)
from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.steps import ComputeSpan, ProfiledStep, Transfer, total
from meshwright.train.calibration.measure import kept_path, read_kept
from meshwright.train.config import Config
from meshwright.train.config_parser import load_config
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.errors import DataError
from meshwright.train.planning.predict import Prediction, predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE_KINDS = ("forward", "backward", "copies", "sum", "optimizer")
SIDES = ("predicted", "measured")


@dataclass(frozen=True)
class AgainstPlan:
    """What the plan predicted; None if it cannot be predicted, for the reason in `why_not`; and the lanes of
    its step beside the measured ones, as `compare_lanes` returns them."""

    predicted: Prediction | None
    why_not: str
    lanes: list[dict[str, Any]]


def compare_with_plan(analysis: ProfileAnalysis, measured: Timeline) -> AgainstPlan:
    """Compare the measured step with the predicted one, lane by lane. Without a prediction (a trace outside
    its run's folder, or a step that cannot be predicted) the result contains the reason."""
    if analysis.run is None:
        return AgainstPlan(None, "the trace is not in the folder of its run", [])
    facts = analysis.facts
    try:
        per_node = int(facts.get("local_world_size", facts.get("world_size", 1)))
        predicted = predict_run(analysis.run, str(facts.get("device_name", "")), per_node)
    except DataError as error:
        return AgainstPlan(None, str(error), [])
    return AgainstPlan(predicted, "", compare_lanes(predicted.timeline, measured))


def predict_run(run: Path, device_name: str, processes_per_node: int) -> Prediction:
    """Predict the run in a folder from its config.yaml and plan.yaml. `device_name`: torch's name
    of the device that the run used. Raises DataError with the reason if the step cannot be predicted."""
    for name in ("config.yaml", "plan.yaml"):
        if not (run / name).is_file():
            raise DataError(
                f"{run} has no {name}, so its step cannot be predicted: give the folder of a run (run.dir)"
            )
    try:
        config, plan = load_config(run / "config.yaml"), load_plan(run / "plan.yaml")
        hardware = _hardware_of(device_name, config, processes_per_node)
        return predict(config.job, plan, hardware, processes_per_node)
    except ValueError as error:
        raise DataError(f"{run}: its step cannot be predicted: {error}") from None


def _hardware_of(device_name: str, config: Config, processes: int) -> Hardware:
    """Return the hardware that the run used. A CPU: as it measured itself for such a run, otherwise cpu.yaml;
    only the cores of the run's threads. `processes`: on a node."""
    if hardware := find_hardware(device_name):
        return hardware
    if not device_name.startswith("CPU"):
        raise DataError(
            f"no file in configs/hardware describes {device_name!r}: measure it: python -m tools.calibrate -h"
        )
    threads = config.run.threads or max(1, usable_cores() // processes)
    kept = read_kept(kept_path(config.job, processes, threads, torch.device("cpu")))
    hardware = kept or load_hardware()["cpu"]
    return replace(hardware, cores=min(hardware.cores, threads * processes))


def compare_lanes(predicted: Timeline, measured: Timeline) -> list[dict[str, Any]]:
    """Return a row with the seconds of each lane that either timeline has: step; compute, and within it
    forward, backward, copies and optimizer; exposed; each link (tp, all_gather, ...), while it has a
    collective in flight; and host_bound. `ratio`: measured / predicted, None if nothing was predicted."""
    lanes = ("step", COMPUTE, *COMPUTE_KINDS, EXPOSED, *LINKS, HOST_BOUND)
    expected, actual = (_lane_seconds(timeline) for timeline in (predicted, measured))
    return [
        {
            "lane": lane,
            "predicted_s": expected[lane],
            "measured_s": actual[lane],
            "ratio": actual[lane] / expected[lane] if expected[lane] else None,
        }
        for lane in lanes
        if expected[lane] or actual[lane]
    ]


def _lane_seconds(timeline: Timeline) -> Mapping[str, float]:
    seconds = Counter[str]()
    for event in timeline.events:
        if event.lane == COMPUTE:
            seconds[color_key(event)] += event.seconds  # type: ignore[assignment]
    for lane in LINKS:
        seconds[lane] = _covered(event for event in timeline.events if event.lane == lane)  # type: ignore[assignment]
    totals = {
        "step": timeline.step_s,
        COMPUTE: timeline.compute_s,
        EXPOSED: timeline.exposed_s,
        HOST_BOUND: timeline.host_s,
    }
    return Counter(seconds | totals)  # type: ignore[operator]


def _covered(events: Iterable[TimelineEvent]) -> float:
    """Return the seconds in which at least one event runs."""
    total_s = end_s = 0.0
    for event in sorted(events, key=lambda event: event.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, end_s))
        end_s = max(end_s, event.end_s)
    return total_s


def draw_against(predicted: Timeline, measured: Timeline, title: str) -> "Figure":
    """Draw both steps on one time axis, lane below lane; below, on another, a few units of both backwards."""
    both = (predicted, measured)
    spans = [backward_spans(timeline) for timeline in both]
    units = middle_units([unit for unit in spans[0] if unit in spans[1]])
    windows = _windows([join_spans(each, units) for each in spans]) if units else [None, None]
    full_range = (0.0, max(timeline.step_s for timeline in both))
    panels = [
        Panel(_facts(timeline, predicted, side), timeline, full_range, [*phases(timeline)], window)
        for timeline, side, window in zip(both, SIDES, windows, strict=True)
    ]
    for timeline, side, window, unit_spans in zip(both, SIDES, windows, spans, strict=True):
        if window is not None:
            caption = _backward_facts(unit_spans, spans[0], units, side)
            panels.append(Panel(caption, timeline, window, _within(unit_spans, window), large=True))
    return draw_panels(title, panels)


def _windows(spans: Sequence[Span]) -> list[Span]:
    """Return start and end of each panel: equally long, and starting equally far before the first unit."""
    longest_s = max(end_s - start_s for start_s, end_s in spans)
    before_s = min(MARGIN * longest_s, *(start_s for start_s, _ in spans))
    return [(start_s - before_s, start_s + (1 + MARGIN) * longest_s) for start_s, _ in spans]


def _within(spans: Mapping[str, Span], window: Span) -> list[tuple[str, float, float]]:
    """Return the parts of the spans within the window."""
    parts = (
        (unit, max(start_s, window[0]), min(end_s, window[1])) for unit, (start_s, end_s) in spans.items()
    )
    return [part for part in parts if part[1] < part[2]]


def _facts(timeline: Timeline, predicted: Timeline, side: str) -> str:
    """Return the figures of a step on one line, each with its difference from the prediction."""
    host = _with_change(timeline.host_s, predicted.host_s, side)
    idle_s = timeline.step_s - timeline.compute_s - timeline.exposed_s - timeline.host_s
    parts = [
        f"{side.capitalize()}: step {_with_change(timeline.step_s, predicted.step_s, side)}",
        f"computing {_with_change(timeline.compute_s, predicted.compute_s, side)}",
        f"exposed {_with_change(timeline.exposed_s, predicted.exposed_s, side)}, "
        f"{timeline.exposed_share:.1%} of the step",
        *([f"host-bound {host}"] if timeline.host_share > NOTABLE else []),
        *([f"idle {in_ms(idle_s)}"] if idle_s > NOTABLE * timeline.step_s else []),
    ]
    return "; ".join(parts)


def _backward_facts(
    spans: Mapping[str, Span], predicted: Mapping[str, Span], units: Sequence[str], side: str
) -> str:
    seconds, predicted_s = (
        end_s - start_s for start_s, end_s in (join_spans(each, units) for each in (spans, predicted))
    )
    return (
        f"{side.capitalize()} backward of {format_units(units)}: {_with_change(seconds, predicted_s, side)}"
    )


def _with_change(seconds: float, predicted_s: float, side: str) -> str:
    """Format as "120 ms (+20%)"."""
    changed = side == "measured" and predicted_s > 0
    return in_ms(seconds) + (f" ({round(100 * (seconds / predicted_s - 1)):+,d}%)" if changed else "")


def to_timeline(step: ProfiledStep) -> Timeline:
    """Convert a measured step to a Timeline that starts at 0, with a round per micro batch; the last round
    is the optimizer. Besides `compute_s` and `exposed_s`, a measured `step_s` contains idle time."""
    events = sorted([*_works(step), *_transfers(step), *_exposed(step)], key=lambda event: event.start_s)
    by_lane = defaultdict[str, float](float)
    for event in events:
        if event.lane == EXPOSED:
            by_lane[event.work] += event.seconds
    rounds = tuple(_rounds(events, step.length_ns / 1e9))
    computing_s, exposed_s = total(step.computing) / 1e9, total(step.exposed) / 1e9
    host_s = total(step.host) / 1e9
    return Timeline(rounds, step.length_ns / 1e9, computing_s, exposed_s, dict(by_lane), host_s)


def _event(
    step: ProfiledStep, lane: str, work: str, source: ComputeSpan | Transfer, start_ns: int, end_ns: int
) -> TimelineEvent:
    start_s, end_s = (start_ns - step.start_ns) / 1e9, (end_ns - step.start_ns) / 1e9
    return TimelineEvent(lane, work, source.unit, "", source.phase, source.micro_batch, start_s, end_s)


def _works(step: ProfiledStep) -> Iterator[TimelineEvent]:
    """Yield compute events one after the other, by their starts, because parallel streams share the lane."""
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
    """Yield exposed time, each piece with the transfer that is waited for: of several in flight, the one
    that started first."""
    first = 0
    for start_ns, end_ns in step.exposed.tolist():
        while first < len(step.transfers) and step.transfers[first].end_ns <= start_ns:
            first += 1
        for t in step.transfers[first:]:
            if start_ns >= end_ns or t.start_ns >= end_ns:
                break
            if t.end_ns > start_ns:
                until_ns = min(t.end_ns, end_ns)
                yield _event(step, EXPOSED, t.lane, t, start_ns, until_ns)
                start_ns = until_ns


def _rounds(events: Sequence[TimelineEvent], step_s: float) -> Iterator[MicroBatchTimeline]:
    """Yield the rounds, cut at the first event of each micro batch and of the optimizer; the first round
    starts with the step."""
    parts = defaultdict[tuple[int, bool], list[TimelineEvent]](list)
    for event in events:
        parts[event.micro_batch, event.phase == "optimizer"].append(event)
    ordered = [parts[key] for key in sorted(parts)] or [[]]  # a step without events
    starts = [0.0, *(part[0].start_s for part in ordered[1:])]
    for part, start_s, end_s in zip(ordered, starts, [*starts[1:], step_s], strict=True):
        moved = (
            replace(e, micro_batch=0, start_s=e.start_s - start_s, end_s=e.end_s - start_s) for e in part
        )
        yield MicroBatchTimeline(start_s, max(end_s - start_s, 0.0), tuple(moved))
