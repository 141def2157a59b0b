"""The part of a step that its picture shows large: a few units in the middle of the last backward."""

from collections.abc import Mapping, Sequence

from meshwright.parallel.planner.timeline import Timeline

ZOOMED_UNITS = 4
MARGIN = 0.08  # of the neighbours, so that waits before the first unit show
Span = tuple[float, float]  # start, end


def zoom_window(timeline: Timeline) -> tuple[float, float, str]:
    """Start, end and names of a few units in the middle of the last backward; of all of it if it is short."""
    spans = backward_spans(timeline)
    if not spans:
        return 0.0, timeline.step_s, "nothing"
    shown = middle_units(list(spans))
    start_s, end_s = join_spans(spans, shown)
    margin_s = MARGIN * (end_s - start_s)
    return max(start_s - margin_s, 0.0), min(end_s + margin_s, timeline.step_s), units_words(shown)


def backward_spans(timeline: Timeline) -> dict[str, Span]:
    """Of each unit, in order, from the start to the end of its backward in the last micro batch."""
    backward = [event for event in timeline.events if event.lane == "compute" and event.work == "backward"]
    spans: dict[str, Span] = {}
    for event in backward:
        if event.micro_batch == backward[-1].micro_batch:
            start_s, end_s = spans.get(event.unit, (event.start_s, event.end_s))
            spans[event.unit] = min(start_s, event.start_s), max(end_s, event.end_s)
    return spans


def middle_units(units: Sequence[str]) -> Sequence[str]:
    """The few that are shown large."""
    first = max((len(units) - ZOOMED_UNITS) // 2, 0)
    return units[first : first + ZOOMED_UNITS]


def units_words(units: Sequence[str]) -> str:
    """As "layers.41 to layers.38"."""
    return units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"


def join_spans(spans: Mapping[str, Span], units: Sequence[str]) -> Span:
    """From the start of the first of these units to the end of the last one."""
    return min(spans[unit][0] for unit in units), max(spans[unit][1] for unit in units)
