"""Curves and bars as pictures of shapes, for pages and files: `parallel.planner.plot.shapes` makes SVG or PNG
of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.parallel.planner.plot.shapes import Picture, Polygon, Shape, Text, rectangle, text_width
from meshwright.parallel.planner.plot.timeline import FAINT, GRID, INK

Point = tuple[float, float]
PAPER = "#ffffff"
# Of the palette of Okabe and Ito (2008), which colour-blind people can tell apart; without yellow, which is
# lost on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("circle", "square", "triangle", "diamond", "star")
SMALL, BODY = 11, 13
WIDTH, HEIGHT = 460, 270  # of a chart, in pixels: legible on a phone, where it shrinks to three quarters
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 42
LINE, MARK = 1.8, 4.0  # width of a line; half of a marker
MOST_POINTS = 240  # of one curve: more than that many pixels do not tell apart
BAR_ROW, BAR = 31, 11
NOT_FINITE_SHOWN = 12


@dataclass(frozen=True)
class Style:
    """How a run looks wherever it is shown."""

    color: str
    marker: str


@dataclass(frozen=True)
class Curve:
    """Points from left to right; a y that is not finite leaves a gap, and a cross above it."""

    name: str
    points: Sequence[Point]
    style: Style


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart. `low`, `high`: half of the measurements lie between. None: nothing was
    measured."""

    name: str
    value: float | None
    words: str
    style: Style
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Axes:
    """A panel: its corners in pixels and the values at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, point: Point) -> Point:
        across = (point[0] - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (point[1] - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


def style_of(number: int) -> Style:
    """Of the n-th run: colours first, then other markers, so that 30 runs are 30 ways."""
    return Style(COLORS[number % len(COLORS)], MARKERS[number // len(COLORS) % len(MARKERS)])


def draw_curves(title: str, x_words: str, curves: Sequence[Curve]) -> Picture:
    """One chart. Without a finite point it says so."""
    finite = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    if not finite:
        return empty_chart(title)
    across, up = _span([x for x, _ in finite], from_0=True), _span([y for _, y in finite])
    axes = Axes(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, across, up)
    shapes = [Text(8, 20, title, BODY, INK, bold=True), *frame(axes, x_words)]
    for number, curve in enumerate(curves):
        shapes += draw_curve(axes, curve, number)
    return Picture(WIDTH, HEIGHT, tuple(shapes))


def empty_chart(title: str) -> Picture:
    """Where there is nothing to draw."""
    return Picture(
        WIDTH,
        74,
        (Text(8, 20, title, BODY, INK, bold=True), Text(8, 48, "nothing measured yet", SMALL, FAINT)),
    )


def frame(axes: Axes, x_words: str, y_ticks: Sequence[tuple[float, str]] | None = None) -> Iterator[Shape]:
    """Grid, figures beside and below it, and what they are of. `y_ticks`: values with their words, where
    round values as they are will not do."""
    for value, words in (
        y_ticks if y_ticks is not None else [(value, short_number(value)) for value in ticks(*axes.y, most=6)]
    ):
        y = axes.place((axes.x[0], value))[1]
        yield rectangle(axes.left, y - 0.5, axes.right - axes.left, 1, GRID)
        yield Text(axes.left - 7, y + 4, words, SMALL, FAINT, "end")
    for value in ticks(*axes.x, most=6):
        x = axes.place((value, axes.y[0]))[0]
        yield rectangle(x - 0.5, axes.bottom, 1, 4, FAINT)
        yield Text(min(x, axes.right - 8), axes.bottom + 17, short_number(value), SMALL, FAINT, "middle")
    yield Text((axes.left + axes.right) / 2, axes.bottom + 34, x_words, SMALL, FAINT, "middle")


def draw_curve(axes: Axes, curve: Curve, number: int = 0) -> Iterator[Shape]:
    """Its line, some markers along it, at other places for each number, and a cross for what is not
    finite."""
    inside = [point for point in curve.points if axes.x[0] <= point[0] <= axes.x[1]]
    finite = [axes.place(point) for point in inside if math.isfinite(point[1])]
    for piece in _pieces(inside):
        for line in _without_sharp_corners([axes.place(point) for point in thin_out(piece)]):
            yield stroke(line, LINE, curve.style.color, curve.name)
    last = next((point for point in reversed(inside) if math.isfinite(point[1])), None)
    if last is not None:
        about = f"{curve.name}: {short_number(last[1])} at {short_number(last[0])}"
        places = {len(finite) - 1, *((len(finite) * (4 * i + number % 4)) // 16 for i in range(1, 4))}
        for at in sorted(places):
            yield marker(finite[at], curve.style, about)
    for point in [point for point in inside if not math.isfinite(point[1])][:NOT_FINITE_SHOWN]:
        x = axes.place((point[0], axes.y[0]))[0]
        yield from _cross(
            (x, axes.top + 5), curve.style.color, f"{curve.name}: not finite at {short_number(point[0])}"
        )


def draw_bars(title: str, bars: Sequence[Bar]) -> Picture:
    """A row for each: its name, and below it a bar with its figure."""
    known = [bar.high or bar.value for bar in bars if bar.value is not None]
    if not known:
        return empty_chart(title)
    room = WIDTH - 2 * 8 - 4 - max(text_width(bar.words, SMALL) for bar in bars)
    shapes: list[Shape] = [Text(8, 20, title, BODY, INK, bold=True)]
    for row, bar in enumerate(bars):
        top, scale = TOP + row * BAR_ROW, room / (max(known) or 1.0)
        shapes.append(Text(8, top + 11, fit_words(bar.name, SMALL, WIDTH - 16), SMALL, FAINT))
        length = max((bar.value or 0.0) * scale, 0.0)
        shapes.append(rectangle(8, top + 15, length, BAR, bar.style.color, f"{bar.name}: {bar.words}"))
        if bar.low is not None and bar.high is not None:
            shapes.append(
                rectangle(
                    8 + bar.low * scale, top + 15 + BAR / 2 - 1, max((bar.high - bar.low) * scale, 1), 2, INK
                )
            )
            length = max(length, bar.high * scale)
        shapes.append(
            Text(8 + length + 5, top + 25, bar.words, SMALL, INK if bar.value is not None else FAINT)
        )
    return Picture(WIDTH, TOP + len(bars) * BAR_ROW + 8, tuple(shapes))


def stroke(points: Sequence[Point], width: float, color: str, about: str = "") -> Polygon:
    """A line through points as one polygon: along its left side and back along its right one."""
    if len(points) == 1:
        (x, y), half = points[0], width / 2
        return rectangle(x - half, y - half, width, width, color, about)
    normals = [_normal(a, b) for a, b in pairwise(points)]
    corners = [normals[0], *(_miter(a, b) for a, b in pairwise(normals)), normals[-1]]
    half = width / 2
    there = [(x + dx * half, y + dy * half) for (x, y), (dx, dy) in zip(points, corners, strict=True)]
    back = [(x - dx * half, y - dy * half) for (x, y), (dx, dy) in zip(points, corners, strict=True)]
    return Polygon((*there, *reversed(back)), color, about)


def marker(at: Point, style: Style, about: str = "", size: float = MARK) -> Polygon:
    """A small sign around a point."""
    corners, first, inner = {
        "circle": (12, 0.0, 1.0),
        "square": (4, -3 * math.pi / 4, 1.0),
        "triangle": (3, -math.pi / 2, 1.0),
        "diamond": (4, 0.0, 1.0),
        "star": (10, -math.pi / 2, 0.45),
    }[style.marker]
    radius = size * {"circle": 1.0, "square": 1.2, "star": 1.6}.get(style.marker, 1.35)
    turns = [(first + 2 * math.pi * i / corners, radius * (inner if i % 2 else 1.0)) for i in range(corners)]
    return Polygon(
        tuple((at[0] + r * math.cos(a), at[1] + r * math.sin(a)) for a, r in turns), style.color, about
    )


def thin_out(points: Sequence[Point]) -> list[Point]:
    """Of many points the lowest and the highest of each stretch, so that spikes stay; and both ends."""
    size = math.ceil(len(points) / (MOST_POINTS / 2))
    if size <= 2:
        return list(points)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two others, 1, 2 or 5 times a power of ten apart, `most` at most."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """As 12.5k or 3.2M; few digits."""
    if not math.isfinite(value):
        return "not finite"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.3g}{letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) > 1e-12 else "0"


def fit_words(words: str, size: float, width: float) -> str:
    """The words, their end left out where they are wider."""
    most = max(4, int(width / text_width("n", size)))
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _span(values: Sequence[float], from_0: bool = False) -> tuple[float, float]:
    """From the lowest to the highest, with a little room."""
    low, high = min(values), max(values)
    if from_0:
        return min(0.0, low), high or 1.0
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Stretches of finite points."""
    piece = list[Point]()
    for point in (*points, (0.0, math.nan)):
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def _without_sharp_corners(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The line cut where it turns by more than a right angle: there its two sides would meet far out, or
    cross."""
    line = list(points[:1])
    for number, point in enumerate(points[1:], 1):
        if len(line) > 1:
            before, after = _normal(*line[-2:]), _normal(line[-1], point)
            if before[0] * after[0] + before[1] * after[1] < 0:
                yield line
                line = [points[number - 1]]
        line.append(point)
    if line:
        yield line


def _normal(a: Point, b: Point) -> Point:
    x, y = b[0] - a[0], b[1] - a[1]
    length = math.hypot(x, y) or 1.0
    return -y / length, x / length


def _miter(a: Point, b: Point) -> Point:
    """Where two sides meet; at sharp corners no further out than twice the line's width."""
    x, y = a[0] + b[0], a[1] + b[1]
    square = x * x + y * y
    scale = min(2 / square, 2 / math.sqrt(square)) if square > 1e-9 else 0.0
    return (x * scale, y * scale) if scale else a


def _cross(at: Point, color: str, about: str) -> Iterator[Shape]:
    (x, y), r = at, MARK
    yield stroke([(x - r, y - r), (x + r, y + r)], LINE, color, about)
    yield stroke([(x - r, y + r), (x + r, y - r)], LINE, color, about)
