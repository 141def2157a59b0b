"""A simulated step as a picture: all of it in one strip of lanes, and a few units in the middle of the last
backward large below."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.parallel.planner.plot.shapes import (
    Picture,
    Polygon,
    Shape,
    Text,
    rectangle,
    text_width,
    to_svg,
)
from meshwright.parallel.planner.timeline import EXPOSED, Timeline, TimelineEvent, describe

WIDTH = 1240
LEFT, RIGHT = 118, 24  # margins beside the lanes: their names are on the left
LANE_HEIGHT, LANE_GAP = 26, 5
AXIS_HEIGHT = 24
THIN, INVISIBLE = 1.5, 0.05  # pixels: thinner bars that nearly touch are painted as one; as thin, not at all
CELL = 1.0  # pixels: of thin bars in so much there is one, as wide as all of them
SMALLEST, SMALL, BODY, LARGE = 9, 11, 12, 19  # font sizes
INK, FAINT, GRID, PAPER, MARK = "#1a1a1a", "#595959", "#e3e3e3", "#f6f6f6", "#ececec"
# The palette of Okabe and Ito (2008), which colour-blind people can tell apart; exposed time alone is
# vermilion.
COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "copies": "#9a9a9a",
    "optimizer": "#4d4d4d",
    "tp": "#f0e442",
    "all_gather": "#009e73",
    "reduce_scatter": "#e69f00",
    "all_reduce": "#cc79a7",
    "offload": "#8c6d31",
    EXPOSED: "#d55e00",
}
DARK = frozenset({"backward", "optimizer", "all_gather", EXPOSED})  # colours on which words are white
LEGEND = {"copies": "copy in or out", "tp": "tensor parallel", EXPOSED: "exposed: computing waits"}
ROWS = {  # lane -> row of the picture
    "compute": "compute",
    EXPOSED: "compute",
    "tp": "tensor parallel",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "offload": "host memory",
}


@dataclass(frozen=True)
class Panel:
    """Lanes between two times, at a height of the picture."""

    top: float
    start_s: float
    end_s: float
    rows: Sequence[str]

    @property
    def bottom(self) -> float:
        return self.top + len(self.rows) * (LANE_HEIGHT + LANE_GAP)

    def x(self, time_s: float) -> float:
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, row: str) -> float:
        return self.top + self.rows.index(row) * (LANE_HEIGHT + LANE_GAP)


def timeline_svg(timeline: Timeline, title: str) -> str:
    """The step as an SVG document. `shapes.to_png` makes a PNG of `draw_timeline`'s picture."""
    return to_svg(draw_timeline(timeline, title))


def draw_timeline(timeline: Timeline, title: str) -> Picture:
    """The step in two panels, under its title, its numbers and a legend."""
    assert timeline.step_s > 0, "a step that takes no time has no picture"
    rows = [row for row in dict.fromkeys(ROWS.values()) if any(ROWS[e.lane] == row for e in timeline.events)]
    whole = Panel(138, 0.0, timeline.step_s, rows)
    start_s, end_s, units = zoom_window(timeline)
    zoom = Panel(whole.bottom + AXIS_HEIGHT + 62, start_s, end_s, rows)
    shapes: list[Shape] = [
        one_line(34, title, LARGE, bold=True),
        Text(LEFT, 57, facts(timeline), BODY + 1, INK),
        *legend(timeline.events, 78),
        *_funnel(whole, zoom),
        *phases(timeline, whole),
        *paint_panel(timeline.events, whole, named=False),
        Text(LEFT, zoom.top - 13, f"Backward of {units}", BODY + 1, INK, bold=True),
        *paint_panel(timeline.events, zoom, named=True),
    ]
    return Picture(WIDTH, round(zoom.bottom + AXIS_HEIGHT + 18), tuple(shapes))


def one_line(y: float, words: str, size: float, bold: bool = False) -> Text:
    """Words over the lanes, as small as they must be to fit beside the margins; where that is too small,
    their middle is left out. Bold letters are wider."""
    room = (WIDTH - LEFT - RIGHT) / (1.1 if bold else 1.0)
    if text_width(words, SMALLEST) > room:
        half = int(room / text_width("m", SMALLEST)) // 2 - 2
        words = f"{words[:half]} … {words[-half:]}"
    return Text(LEFT, y, words, size * min(1.0, room / text_width(words or " ", size)), INK, bold=bold)


def facts(timeline: Timeline) -> str:
    """The step's numbers in one line."""
    parts = [
        f"{ROWS[lane]} {in_ms(seconds)}" for lane, seconds in timeline.exposed_by_lane.items() if seconds
    ]
    exposed = f"{in_ms(timeline.exposed_s)} exposed ({timeline.exposed_share:.1%})"
    return f"step {in_ms(timeline.step_s)} = {in_ms(timeline.compute_s)} computing + {exposed}" + (
        f": {', '.join(parts)}" if parts else ""
    )


def in_ms(seconds: float) -> str:
    """As "1,234 ms" or "1.23 ms": three digits or more; "0.012 ms"."""
    ms = seconds * 1000
    return f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 3 if 0 < ms < 0.1 else 2}f} ms"


def legend(events: Iterable[TimelineEvent], y: float) -> Iterator[Shape]:
    """The colours that the events have."""
    used = {kind_of(event) for event in events}
    words = {kind: LEGEND.get(kind, ROWS.get(kind, kind)) for kind in COLORS if kind in used}
    widths = [17 + text_width(name, BODY) for name in words.values()]
    gap = min(20.0, (WIDTH - LEFT - RIGHT - sum(widths)) / max(len(widths) - 1, 1))
    x = float(LEFT)
    for (kind, name), width in zip(words.items(), widths, strict=True):
        yield rectangle(x, y, 12, 12, COLORS[kind])
        yield Text(x + 17, y + 10.5, name, BODY, INK)
        x += width + gap


def kind_of(event: TimelineEvent) -> str:
    """The event's key of COLORS."""
    if event.lane != "compute":
        return event.lane
    return "copies" if event.work.startswith("copy") else event.work


def _funnel(whole: Panel, zoom: Panel) -> Iterator[Shape]:
    """From the part of the strip that is shown below to where it is shown."""
    left, right = whole.x(zoom.start_s), max(whole.x(zoom.end_s), whole.x(zoom.start_s) + 1)
    bottom = whole.bottom + AXIS_HEIGHT
    yield rectangle(left, whole.top - 6, right - left, bottom - whole.top + 6, MARK)
    yield Polygon(
        ((left, bottom), (right, bottom), (WIDTH - RIGHT, zoom.top - 32), (LEFT, zoom.top - 32)), PAPER
    )
    yield rectangle(LEFT, zoom.top - 32, WIDTH - RIGHT - LEFT, zoom.bottom - zoom.top + 32, PAPER)


def phases(timeline: Timeline, panel: Panel) -> Iterator[Shape]:
    """Over the strip, what each stretch of it is, where the words fit."""
    return name_stretches(_stretches(timeline), panel)


def name_stretches(stretches: Iterable[tuple[str, float, float]], panel: Panel) -> Iterator[Shape]:
    """A line with words over each: words, start, end."""
    y = panel.top - 12
    for words, start_s, end_s in stretches:
        left, right = panel.x(start_s), panel.x(end_s)
        if right - left < INVISIBLE:
            continue
        yield rectangle(left + 0.5, y, max(right - left - 1, 0.5), 1.5, FAINT)
        if text_width(words, SMALL) < right - left:
            yield Text((left + right) / 2, y - 5, words, SMALL, FAINT, "middle")


def _stretches(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each forward, backward and optimizer, by what the compute stream does or waits
    for."""
    busy = [event for event in timeline.events if event.lane in ("compute", EXPOSED, "tp")]
    many = len(timeline.rounds) > 2
    name, start_s, end_s = "", 0.0, 0.0
    for event in busy:
        # The end of a backward waits for its last reduction, which is in that phase too.
        here = event.phase + (f" {event.micro_batch + 1}" if many and event.phase != "optimizer" else "")
        if here != name:
            if name:
                yield name, start_s, end_s
            name, start_s = here, event.start_s
        end_s = event.end_s
    yield name, start_s, end_s


def paint_panel(events: Iterable[TimelineEvent], panel: Panel, named: bool) -> Iterator[Shape]:
    """Lanes, their names, the time axis, and a bar per event that falls into the panel."""
    for row in panel.rows:
        y = panel.y(row)
        yield rectangle(LEFT, y, WIDTH - LEFT - RIGHT, LANE_HEIGHT, "#ffffff" if named else PAPER)
        yield Text(LEFT - 10, y + LANE_HEIGHT / 2 + 4, row, BODY, INK, "end")
    yield from _axis(panel)
    yield from _bars(events, panel, named)


def _axis(panel: Panel) -> Iterator[Shape]:
    step_s = nice_step(panel.end_s - panel.start_s)
    first = -int(-panel.start_s // step_s)
    for number in range(first, int(panel.end_s / step_s) + 1):
        x = panel.x(number * step_s)
        digits = 0 if step_s >= 1e-3 else 2 if step_s >= 1e-5 else 3
        yield rectangle(x - 0.5, panel.top - 3, 1, panel.bottom - panel.top + 4, GRID)
        words = f"{number * step_s * 1000:,.{digits}f}"
        inside = min(x, WIDTH - 4 - text_width(words, SMALL) / 2)
        yield Text(inside, panel.bottom + 14, words, SMALL, FAINT, "middle")
    yield Text(LEFT - 40, panel.bottom + 14, "ms", SMALL, FAINT, "end")


def nice_step(length_s: float) -> float:
    """Between ticks: 1, 2 or 5 times a power of ten, so that there are five to twelve of them."""
    power = 1e-6
    while power * 100 < length_s:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10, 20, 50) if power * factor * 12 >= length_s)


def _bars(events: Iterable[TimelineEvent], panel: Panel, named: bool) -> Iterator[Shape]:
    """Exposed time last, so that nothing hides it, and in the strip with a foot below its lane, so that
    slivers show."""
    bars = _merged(events, panel)
    for bar in sorted(bars, key=lambda bar: bar.kind == EXPOSED):
        y, width = panel.y(ROWS[bar.event.lane]), bar.right - bar.left
        gap = 1.0 if width >= 4 else 0.5 if width >= 2 else 0.0
        foot = LANE_GAP - 1 if bar.kind == EXPOSED and not named else 0
        about = f"{describe(bar.event)}: {in_ms(bar.event.seconds)}" + (
            f" and {bar.more} more" if bar.more else ""
        )
        yield rectangle(
            bar.left, y, width - gap, LANE_HEIGHT + foot, COLORS[bar.kind], about if named else ""
        )
        if named:
            yield from _bar_name(bar, y)


@dataclass(slots=True)
class _Bar:
    """From left to right in pixels: an event, or some of one kind that are too thin to tell apart, of which
    the first."""

    event: TimelineEvent
    kind: str
    left: float
    right: float
    more: int = 0


def _merged(events: Iterable[TimelineEvent], panel: Panel) -> list[_Bar]:
    bars: list[_Bar] = []
    last: dict[tuple[str, str], _Bar] = {}  # by lane and kind
    for bar in _cells(events, panel):
        lane, width = bar.event.lane, bar.right - bar.left
        before = last.get((lane, bar.kind))
        if before and width < THIN and bar.left - before.right < width / 20:
            before.right, before.more = bar.right, before.more + bar.more + 1
        elif lane != "compute" or width > INVISIBLE:
            # Only in the compute lane would a widened bar hide another.
            bar.right = max(bar.right, bar.left + (THIN / 3 if lane != "compute" else 0))
            bars.append(bar)
            last[lane, bar.kind] = bar
    return bars


def _cells(events: Iterable[TimelineEvent], panel: Panel) -> list[_Bar]:
    """A bar per event; events of one kind within one pixel share one, as wide as they are together. So a
    measured step of very many events is no larger a picture, and what was busy half of the time is half
    painted."""
    bars: list[_Bar] = []
    last: dict[tuple[str, str], _Bar] = {}
    for event in events:
        if event.end_s <= panel.start_s or event.start_s >= panel.end_s:
            continue
        bar = _Bar(event, kind_of(event), panel.x(event.start_s), panel.x(event.end_s))
        cell = last.get((event.lane, bar.kind))
        if cell and cell.left <= bar.left and bar.right < (cell.left // CELL + 1) * CELL:
            cell.right = min(cell.right + bar.right - bar.left, max(cell.right, bar.right))
            cell.more += 1
        else:
            bars.append(bar)
            last[event.lane, bar.kind] = bar
    return bars


def _bar_name(bar: _Bar, top: float) -> Iterator[Shape]:
    """The longest name that fits."""
    where = bar.event.module or bar.event.unit
    for words in (describe(bar.event), where, _short(where)):
        if words and text_width(words, SMALL) + 6 < bar.right - bar.left:
            color = "#ffffff" if bar.kind in DARK else INK
            yield Text((bar.left + bar.right) / 2, top + LANE_HEIGHT / 2 + 4, words, SMALL, color, "middle")
            return


def _short(where: str) -> str:
    """A module's last name; of a unit of several the first's and the last's."""
    names = [name.rpartition(".")[2] for name in where.split("+")]
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


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
