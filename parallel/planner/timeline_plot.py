"""Draw a simulated step: the complete step as a strip of lanes, and below it a zoom on a few units in the
middle of the last backward. matplotlib is imported with the first picture."""

import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from meshwright.parallel.errors import one_line
from meshwright.parallel.planner.timeline import (
    COMPUTE,
    EXPOSED,
    HOST,
    HOST_BOUND,
    LANES,
    LINKS,
    Timeline,
    TimelineEvent,
    describe,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In points (1/72 inch): a figure with 72 dots per inch has one pixel per point.
WIDTH, LEFT, RIGHT = 1240, 118, 36
LANES_WIDTH = WIDTH - LEFT - RIGHT
HEAD, OVER, UNDER = 76, 54, 44  # title and legend; text above the lanes; the axis below them
LANE, BAR = 31, 26  # heights
THIN = 0.5  # minimum width of a bar; a narrower one would be invisible
LETTER = 0.57  # mean width of a letter of matplotlib's font, in font sizes
PNG_SCALE = 2  # pixels per point, for high-resolution screens
SMALLEST, SMALL, BODY, LARGE = 9, 11, 12, 19  # font sizes
INK, FAINT, GRID, PAPER, MARK = "#1a1a1a", "#595959", "#e3e3e3", "#f6f6f6", "#e6e6e6"
# The palette of Okabe and Ito (2008), distinguishable with color blindness; only exposed time is vermilion.
# In drawing order: exposed time is on top.
COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "copies": "#9a9a9a",
    "sum": "#b3a2d8",
    "optimizer": "#4d4d4d",
    "tp": "#f0e442",
    "cp": "#56b4e9",
    "all_gather": "#009e73",
    "reduce_scatter": "#e69f00",
    "all_reduce": "#cc79a7",
    "all_to_all": "#f0e442",
    "offload": "#8c6d31",
    EXPOSED: "#d55e00",
    HOST_BOUND: "#7f3b08",
    HOST: "#bdbdbd",
}
DARK = frozenset({"backward", "optimizer", "offload", HOST_BOUND})  # colors with white text
LEGEND = {"copies": "copy in or out", **LANES}
ROWS = {  # lane -> row of the picture
    HOST: "host",
    COMPUTE: COMPUTE,
    EXPOSED: COMPUTE,
    HOST_BOUND: COMPUTE,
    **LINKS,
}
NOTABLE = 1e-3  # share of the step that is worth a figure
Span = tuple[float, float]  # start, end
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Panel:
    """The lanes of a step in a time window.

    Args:
        heading: the line of text above
        timeline: the step
        window: start and end in seconds
        stretches: label, start and end of each span named above the lanes
        marked: the span that another panel zooms in on
        large: whether bars are labeled
    """

    heading: str
    timeline: Timeline
    window: Span
    stretches: Sequence[tuple[str, float, float]]
    marked: Span | None = None
    large: bool = False

    @property
    def point_s(self) -> float:
        """Seconds per point."""
        return (self.window[1] - self.window[0]) / LANES_WIDTH

    @functools.cached_property
    def events(self) -> Mapping[str, Sequence[TimelineEvent]]:
        """The events in the window by key in COLORS, in drawing order; of the host only if the step waits for
        it: else it launches everything early, and the rest of its lane is empty."""
        left_out = () if self.timeline.host_share >= NOTABLE else (HOST, HOST_BOUND)
        inside = {kind: list[TimelineEvent]() for kind in COLORS}
        for event in self.timeline.events:
            if event.end_s > self.window[0] and event.start_s < self.window[1] and event.lane not in left_out:
                inside[color_key(event)].append(event)
        return {kind: events for kind, events in inside.items() if events}

    @property
    def rows(self) -> Sequence[str]:
        """The lanes that have events in the window."""
        used = {ROWS.get(kind, COMPUTE) for kind in self.events}
        return [row for row in dict.fromkeys(ROWS.values()) if row in used] or [COMPUTE]


def with_default_style(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate `draw` to run with matplotlib's default settings, so that a user's matplotlibrc (as
    text.usetex) has no effect."""

    @functools.wraps(draw)
    def under_defaults(*arguments: P.args, **options: P.kwargs) -> T:
        matplotlib = _import_matplotlib()
        defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
        with matplotlib.rc_context(defaults):
            return draw(*arguments, **options)

    return under_defaults


def _import_matplotlib() -> Any:
    """Import matplotlib without its messages about the font cache or an unwritable home folder, and without
    $MPLBACKEND, which is not needed and makes the import fail if it is invalid."""
    logger, backend = logging.getLogger("matplotlib"), os.environ.pop("MPLBACKEND", None)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib.figure
    finally:
        logger.setLevel(level)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return matplotlib


@with_default_style
def draw_timeline(timeline: Timeline, title: str) -> "Figure":
    """Return a figure of the step with two panels: the complete step, and a zoom on a few units."""
    start_s, end_s, units = zoom_window(timeline)
    strip = Panel(facts(timeline), timeline, (0.0, timeline.step_s), list(phases(timeline)), (start_s, end_s))
    large = Panel(f"Backward of {units}", timeline, (start_s, end_s), (), large=True)
    figure = draw_panels(title, [strip, large])
    from matplotlib.patches import ConnectionPatch

    above, below = figure.axes
    lanes, lanes_below = (LANE * axes.get_ylim()[0] for axes in (above, below))
    for time_s, side in ((start_s, 0), (end_s, 1)):
        ends = (time_s * 1e3, -22 / lanes), (side, 1 + (OVER - 2) / lanes_below)
        transforms = above.get_xaxis_transform(), below.transAxes
        figure.add_artist(ConnectionPatch(*ends, *transforms, color=FAINT, lw=0.7, ls=":"))
    return figure


@with_default_style
def draw_panels(title: str, panels: Sequence[Panel]) -> "Figure":
    """Return a figure with a title, a legend of the colors of computing, and the panels below each other."""
    assert all(panel.timeline.step_s > 0 for panel in panels), "cannot draw a step of 0 s"
    kinds = {kind for panel in panels for kind in panel.events}
    height = HEAD + sum(OVER + LANE * len(panel.rows) + UNDER for panel in panels)
    figure = new_figure(WIDTH, height)
    from matplotlib.patches import Patch

    write_line(figure, 34, title, LARGE, bold=True)
    names = {LEGEND.get(kind, kind): COLORS[kind] for kind in COLORS if kind in kinds and kind not in LINKS}
    place: Any = {"loc": "upper left", "bbox_to_anchor": (LEFT / WIDTH, 1 - 50 / height), "borderaxespad": 0}
    style: Any = {
        "fontsize": SMALL,
        "frameon": False,
        "borderpad": 0,
        "handlelength": 1.1,
        "handleheight": 1.1,
    }
    keys = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=keys, ncols=len(keys) or 1, columnspacing=1.1, handletextpad=0.5, **place, **style)
    top = HEAD
    for panel in panels:
        lanes = LANE * len(panel.rows)
        write_line(figure, top + 16, panel.heading, BODY + 1, bold=panel.large)
        bottom = 1 - (top + OVER + lanes) / height
        axes = figure.add_axes((LEFT / WIDTH, bottom, LANES_WIDTH / WIDTH, lanes / height))
        _draw_frame(axes, panel)
        _draw_bars(axes, panel)
        top += OVER + lanes + UNDER
    return figure


def _draw_frame(axes: "Axes", panel: Panel) -> None:
    """Draw the labeled lanes, the time axis, the marked span, and above the lanes the labels that fit."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    start_ms, end_ms = (1e3 * time_s for time_s in panel.window)
    last_ms = min(end_ms, 1e3 * panel.timeline.step_s)
    rows = panel.rows
    middles = [row + BAR / LANE / 2 for row in range(len(rows))]
    axes.set(xlim=(start_ms, end_ms), ylim=(len(rows), 0), facecolor="none", axisbelow=True)
    axes.set_yticks(middles, rows)
    axes.barh(middles, last_ms - start_ms, BAR / LANE, left=start_ms, color=PAPER, zorder=0)
    axes.grid(axis="x", color=GRID, lw=1)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.tick_params("x", length=0, pad=5, labelsize=SMALL, labelcolor=FAINT)
    axes.tick_params("y", length=0, pad=10, labelsize=BODY, labelcolor=INK)
    style: Any = {"textcoords": "offset points", "fontsize": SMALL, "color": FAINT, "annotation_clip": False}
    axes.annotate("ms", (start_ms, len(rows)), (-40, -14), ha="right", **style)
    if panel.marked:
        axes.axvspan(panel.marked[0] * 1e3, min(panel.marked[1] * 1e3, last_ms), color=MARK, zorder=0.5)
    if last_ms < end_ms:
        axes.axvline(last_ms, color=FAINT, lw=1.5)
        if end_ms - last_ms > 66e3 * panel.point_s:
            axes.annotate("step ends", (last_ms, 0), (6, -12), **style)
    spans = [part[1:] for part in panel.stretches]
    _draw_spans(axes, spans, -9 / LANE, 1.5, panel, color=FAINT, clip_on=False)
    for name, start_s, end_s in panel.stretches:
        if len(name) * LETTER * SMALL * panel.point_s < end_s - start_s:
            middle = (500 * (start_s + end_s), 0)
            axes.annotate(one_line(name), middle, (0, 14), ha="center", parse_math=False, **style)


def _draw_bars(axes: "Axes", panel: Panel) -> None:
    """Draw the bars, kind by kind. In the strip, bars of exposed time extend below their lane, so that very
    thin ones are visible."""
    start_s, end_s = panel.window
    for kind, events in panel.events.items():
        middle = panel.rows.index(ROWS.get(kind, COMPUTE)) + BAR / LANE / 2
        foot = 0 if panel.large or kind not in (EXPOSED, HOST_BOUND) else LANE - BAR - 1
        # In the compute lane a widened bar would cover its neighbor.
        thinnest_s = THIN * panel.point_s if kind in ROWS else 0.0
        bars = merged(events, panel.point_s / PNG_SCALE)
        spans = [(left_s, max(right_s, left_s + thinnest_s)) for left_s, right_s in bars]
        _draw_spans(axes, spans, middle + foot / LANE / 2, BAR + foot, panel, color=COLORS[kind])
        style: Any = {"fontsize": SMALL, "color": "white" if kind in DARK else INK, "parse_math": False}
        for event in events if panel.large else ():
            if name := _label(event, panel):
                at = 500 * (max(event.start_s, start_s) + min(event.end_s, end_s)), middle
                axes.text(*at, name, ha="center", va="center_baseline", **style)


def _draw_spans(
    axes: "Axes", spans: Sequence[Span], y: float, height: float, panel: Panel, **style: Any
) -> None:
    """Draw bars as one thick line with gaps, because one rectangle per bar would make a large file. Wide bars
    leave a white edge to the next one."""
    ends = np.array(spans).reshape(-1, 2).clip(*panel.window)
    points = (ends[:, 1] - ends[:, 0]) / panel.point_s
    ends[:, 1] -= panel.point_s * np.select([points >= 4, points >= 2], [1.0, 0.5], 0.0)
    times = np.column_stack([ends, np.full(len(ends), np.nan)]).ravel()
    axes.plot(1e3 * times, np.full(len(times), y), lw=height, solid_capstyle="butt", snap=False, **style)


def merged(events: Iterable[TimelineEvent], cell_s: float) -> Iterator[Span]:
    """Yield the start and end of the bars of one kind. Events in one cell of time share a bar with the sum of
    their durations, so that a measured step with very many events makes no large file."""
    start_s = end_s = -1.0
    for event in events:
        if start_s <= event.start_s and event.end_s < (start_s // cell_s + 1) * cell_s:
            end_s = min(end_s + event.seconds, max(end_s, event.end_s))
            continue
        if start_s >= 0:
            yield start_s, end_s
        start_s, end_s = event.start_s, event.end_s
    if start_s >= 0:
        yield start_s, end_s


def _label(event: TimelineEvent, panel: Panel) -> str:
    """Return the longest label that fits into the event's bar, or "": its description; its module or unit;
    the last part of that name (first and last block for a unit of several)."""
    where = event.module or event.unit
    parts = [name.rpartition(".")[2] for name in where.split("+")]
    short = parts[0] if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"
    shown_s = min(event.end_s, panel.window[1]) - max(event.start_s, panel.window[0])
    most = (shown_s / panel.point_s - 6) / (LETTER * SMALL)
    return next((one_line(label) for label in (describe(event), where, short) if len(label) < most), "")


def color_key(event: TimelineEvent) -> str:
    """Return the event's key in COLORS."""
    if event.lane != COMPUTE:
        return event.lane
    return "copies" if event.work.startswith("copy") else event.work


def phases(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each forward, backward and optimizer step, from the events of the compute
    stream and its waits: a backward includes the wait for its last reduction."""
    many = len(timeline.rounds) > 2

    def name(event: TimelineEvent) -> str:
        return event.phase + (f" {event.micro_batch + 1}" if many and event.phase != "optimizer" else "")

    busy = (event for event in timeline.events if event.lane in (COMPUTE, EXPOSED, HOST_BOUND))
    for label, events in groupby(busy, name):
        first, *others = events
        yield label, first.start_s, (others or [first])[-1].end_s


def facts(timeline: Timeline) -> str:
    """Return the step's times in one line."""
    parts = [
        f"{ROWS[lane]} {in_ms(seconds)}" for lane, seconds in timeline.exposed_by_lane.items() if seconds
    ]
    exposed = f"{in_ms(timeline.exposed_s)} exposed ({timeline.exposed_share:.1%})"
    host = f" + {in_ms(timeline.host_s)} host-bound" if timeline.host_share >= NOTABLE else ""
    return f"step {in_ms(timeline.step_s)} = {in_ms(timeline.compute_s)} computing{host} + {exposed}" + (
        f": {', '.join(parts)}" if parts else ""
    )


def in_ms(seconds: float) -> str:
    """Format seconds with at least three digits, as "1,234 ms" or "1.23 ms"; below 0.1 ms as "0.012 ms"."""
    ms = seconds * 1000
    return f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 3 if 0 < ms < 0.1 else 2}f} ms"


ZOOMED_UNITS = 4
MARGIN = 0.08  # share of the zoom added on both sides, so that waits before the first unit are visible


def zoom_window(timeline: Timeline) -> tuple[float, float, str]:
    """Return start, end and names of a few units in the middle of the last backward; of all, if few."""
    spans = backward_spans(timeline)
    if not spans:
        return 0.0, timeline.step_s, "nothing"
    shown = middle_units(list(spans))
    start_s, end_s = join_spans(spans, shown)
    margin_s = MARGIN * (end_s - start_s)
    return max(start_s - margin_s, 0.0), min(end_s + margin_s, timeline.step_s), format_units(shown)


def backward_spans(timeline: Timeline) -> dict[str, Span]:
    """Return start and end of each unit's backward in the last micro batch, in order."""
    backward = [event for event in timeline.events if event.lane == COMPUTE and event.work == "backward"]
    spans: dict[str, Span] = {}
    for event in backward:
        if event.micro_batch == backward[-1].micro_batch:
            start_s, end_s = spans.get(event.unit, (event.start_s, event.end_s))
            spans[event.unit] = min(start_s, event.start_s), max(end_s, event.end_s)
    return spans


def middle_units(units: Sequence[str]) -> Sequence[str]:
    """Return the units shown in the zoom."""
    first = max((len(units) - ZOOMED_UNITS) // 2, 0)
    return units[first : first + ZOOMED_UNITS]


def format_units(units: Sequence[str]) -> str:
    """Format a range of units, as "layers.41 to layers.38"."""
    return units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"


def join_spans(spans: Mapping[str, Span], units: Sequence[str]) -> Span:
    """Return the earliest start and the latest end of these units."""
    return min(spans[unit][0] for unit in units), max(spans[unit][1] for unit in units)


# Common to all pictures


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, with its size in points; not of pyplot, which needs a display and a close."""
    matplotlib = _import_matplotlib()
    # A run's name may contain characters that matplotlib's font lacks; an SVG viewer uses its own fonts.
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
    return matplotlib.figure.Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="white")


@with_default_style
def to_svg(figure: "Figure") -> str:
    """Return the figure as an SVG document that can be embedded in HTML; deterministic. Text stays text, in
    the viewer's fonts."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "meshwright"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, start, document = file.getvalue().partition("<svg ")
    return start + document


def picture_bytes(figure: "Figure", suffix: str) -> bytes:
    """Return the figure as the content of a file with the suffix .svg or .png."""
    return to_svg(figure).encode() if suffix == ".svg" else to_png(figure)


@with_default_style
def to_png(figure: "Figure") -> bytes:
    """Return the figure as a PNG file with PNG_SCALE pixels per point."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=72 * PNG_SCALE, metadata={"Software": None})
    return file.getvalue()


def write_line(figure: "Figure", y: float, text: str, size: float, bold: bool = False) -> None:
    """Write a line of text `y` points below the top. It shrinks to fit the width; below SMALLEST the middle
    of the text is left out."""
    letter = LETTER * (1.12 if bold else 1.0)
    text = one_line(text, int(LANES_WIDTH / (SMALLEST * letter)))
    size = min(size, LANES_WIDTH / (letter * max(len(text), 1)))
    style: Any = {"fontsize": size, "weight": "bold" if bold else "normal", "color": INK, "parse_math": False}
    figure.text(LEFT / WIDTH, 1 - y / (72 * figure.get_figheight()), text, **style)
