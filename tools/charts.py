"""Line charts and bar charts of runs; `parallel.planner.timeline_plot` writes them as SVG and PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.parallel.errors import one_line
from meshwright.parallel.planner.timeline_plot import (
    FAINT,
    GRID,
    INK,
    LETTER,
    SMALL,
    new_figure,
    with_default_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito (2008), distinguishable with color blindness; without yellow, which is hard to
# see on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = "os^D*"  # as matplotlib names them
TITLE = 13  # font size
WIDTH, HEIGHT = 460, 270  # of a chart, in points: readable on a phone, where it shrinks to three quarters
SIDE, TOP, BAR_ROW = 8, 34, 36  # margin; title; a name with its bar below
NOT_FINITE_SHOWN = 12


@dataclass(frozen=True)
class Style:
    """The color and marker of a run in all charts."""

    color: str
    marker: str


@dataclass(frozen=True)
class Curve:
    """Points from left to right; a y that is not finite is drawn as a gap with a cross above it."""

    points: Sequence[tuple[float, float]]
    style: Style


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart; `value` is None if nothing was measured. Half of the measurements lie between
    `low` and `high`."""

    name: str
    value: float | None
    label: str
    style: Style
    low: float | None = None
    high: float | None = None


def style_of(number: int) -> Style:
    """Return the style of the n-th run: a new color each, then a new marker; 30 styles in total."""
    return Style(COLORS[number % len(COLORS)], MARKERS[number // len(COLORS) % len(MARKERS)])


@with_default_style
def draw_curves(title: str, x_label: str, curves: Sequence[Curve]) -> "Figure":
    """Return a line chart; without any finite point an empty chart with a note."""
    if not any(math.isfinite(y) for curve in curves for _, y in curve.points):
        return _empty_chart(title)
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.add_axes((0.13, 0.16, 0.83, 0.72))
    style_axes(axes, title, x_label)
    add_curves(axes, curves)
    return figure


def add_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Draw the curves from x=0, each with a few markers, at different positions for each curve."""
    across = axes.get_xaxis_transform()
    for number, curve in enumerate(curves):
        style: Any = {"color": curve.style.color, "marker": curve.style.marker}
        xs, ys = [x for x, _ in curve.points], [y if math.isfinite(y) else math.nan for _, y in curve.points]
        spacing = max(1, len(xs) // 4)
        axes.plot(xs, ys, markevery=(number % 4 * spacing // 4, spacing), lw=1.8, ms=7, mew=0, **style)
        gaps = [x for x, y in curve.points if not math.isfinite(y)][:NOT_FINITE_SHOWN]
        axes.plot(gaps, [0.97] * len(gaps), "x", color=curve.style.color, transform=across)
    axes.set_xlim(left=0)


@with_default_style
def draw_bars(title: str, bars: Sequence[Bar]) -> "Figure":
    """Return a chart with one row per bar: its name, and below it the bar with its label."""
    known = [bar.high or bar.value for bar in bars if bar.value is not None]
    if not known:
        return _empty_chart(title)
    height = TOP + len(bars) * BAR_ROW + SIDE
    figure = new_figure(WIDTH, height)
    place = (SIDE / WIDTH, SIDE / height, 1 - 2 * SIDE / WIDTH, len(bars) * BAR_ROW / height)
    axes = figure.add_axes(place, ylim=(len(bars), 0))
    style_axes(axes, title, pad=TOP - 20)
    axes.yaxis.set_visible(False)
    axes.xaxis.set_visible(False)
    name_style: Any = {"fontsize": SMALL, "color": FAINT, "parse_math": False}
    for row, bar in enumerate(bars):
        name = one_line(bar.name, int((WIDTH - 2 * SIDE) / (LETTER * SMALL)))
        axes.text(0, row + 0.33, name, transform=axes.get_yaxis_transform(), **name_style)
    longest = WIDTH - 3 * SIDE - LETTER * SMALL * max(len(bar.label) for bar in bars)
    axes.set_xlim(0, (max(known) or 1.0) * (WIDTH - 2 * SIDE) / longest)
    rows, values = [row + 0.68 for row in range(len(bars))], [bar.value or 0.0 for bar in bars]
    below = [0.0 if bar.low is None else value - bar.low for bar, value in zip(bars, values, strict=True)]
    above = [0.0 if bar.high is None else bar.high - value for bar, value in zip(bars, values, strict=True)]
    style: Any = {"color": [bar.style.color for bar in bars], "ecolor": INK, "error_kw": {"lw": 2}}
    drawn = axes.barh(rows, values, 0.36, xerr=[below, above], **style)
    axes.bar_label(drawn, [bar.label for bar in bars], padding=5, fontsize=SMALL, color=INK)
    return figure


def _empty_chart(title: str) -> "Figure":
    figure = new_figure(WIDTH, 74)
    axes = figure.add_axes((SIDE / WIDTH, 0.1, 1 - 2 * SIDE / WIDTH, 0.5))
    draw_note(axes, title, "nothing measured yet")
    return figure


def draw_note(axes: "Axes", title: str, note: str) -> None:
    """Show only a title and a note, for a chart without data."""
    style_axes(axes, title)
    axes.set_axis_off()
    axes.text(0, 0.5, note, fontsize=SMALL, color=FAINT)


def style_axes(axes: "Axes", title: str, x_label: str = "", pad: float = 8) -> None:
    """Set the title, the grid, and axes with short numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title, fontsize=TITLE, weight="bold", color=INK, loc="left", pad=pad)
    axes.set_xlabel(x_label, fontsize=SMALL, color=FAINT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=FAINT, color=FAINT)
    axes.tick_params("y", length=0)
    axes.spines[:].set_visible(False)


def short_number(value: float) -> str:
    """Format a number with few digits, as 12.5k or 3.2M."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.3g}{letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) > 1e-12 else "0"
