"""How runs scale as a picture: MFU above, exposed share below, a column for each model, a colour for each
kind of GPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, log2
from typing import Any

from meshwright.parallel.planner.plot.shapes import Picture, Polygon, Shape, Text, rectangle, text_width
from meshwright.parallel.planner.plot.timeline import BODY, FAINT, GRID, INK, LARGE, SMALL

Both = tuple[Mapping[str, Any], Mapping[str, Any]]  # the planner's choice, FSDP alone
# model, kind of GPU, and both ways for each number of GPUs
Curves = Sequence[tuple[str, str, Sequence[Both]]]
LEGEND_WIDTH, PANEL, GAP, LEFT, TOP, HEIGHT = 900, 350, 44, 52, 112, 190
# of kinds; Okabe and Ito (2008), which colour-blind people can tell apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LINE, DOT, DASH = 2.2, 3.4, 7.0  # pixels: width of lines, half a dot, length of a dash
TITLE = "Predicted: the planner's choice and FSDP alone, from 8 GPUs on"
WORDS = ("MFU, attention in full", "exposed: share of the step that waits for communication")
KEYS = ("mfu", "exposed_share")
Point = tuple[float, float]


@dataclass(frozen=True)
class ScalingAxes:
    """A panel: its upper left corner, numbers of GPUs from left to right, and shares from 0 at its foot up to
    `most`."""

    left: float
    top: float
    counts: tuple[int, ...]
    most: float

    def place(self, gpus: int, share: float) -> Point:
        first, last = log2(self.counts[0]), log2(self.counts[-1])
        x = self.left + (log2(gpus) - first) / max(last - first, 1.0) * PANEL
        return x, self.top + (1 - share / self.most) * HEIGHT


def draw_scaling(curves: Curves) -> Picture:
    """Two panels for each model, under a title and a legend."""
    models, kinds = (
        list(dict.fromkeys(model for model, _, _ in curves)),
        list(dict.fromkeys(kind for _, kind, _ in curves)),
    )
    counts = tuple(sorted({pair[0]["gpus"] for _, _, both in curves for pair in both}))
    tops = [_ceiling(key, curves) for key in KEYS]
    shapes: list[Shape] = [Text(LEFT, 34, TITLE, LARGE, INK, bold=True), *_legend(kinds)]
    for column, model in enumerate(models):
        for row, (key, words) in enumerate(zip(KEYS, WORDS, strict=True)):
            axes = ScalingAxes(LEFT + column * (PANEL + GAP), TOP + row * (HEIGHT + 78), counts, tops[row])
            shapes += _frame(axes, f"{model}: {words}" if column == 0 else model, last=row == len(KEYS) - 1)
            for name, kind, both in curves:
                if name == model:
                    shapes += _curves(axes, both, key, COLORS[kinds.index(kind) % len(COLORS)], kind)
    width = max(LEGEND_WIDTH, LEFT + len(models) * (PANEL + GAP))
    return Picture(width, TOP + 2 * HEIGHT + 78 + 52, tuple(shapes))


def _ceiling(key: str, curves: Curves) -> float:
    """The first tick that is not below the largest value: ticks are 20% apart, or 10% where all is below
    50%."""
    most = max(
        (cell[key] for _, _, both in curves for pair in both for cell in pair if cell["fits"]), default=0.0
    )
    return next(tick for tick in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0) if tick >= min(most, 1.0))


def _legend(kinds: Sequence[str]) -> Iterator[Shape]:
    x = float(LEFT)
    for i, kind in enumerate(kinds):
        for dashed, words in ((False, f"{kind}, planner's choice"), (True, f"{kind}, FSDP alone")):
            color = COLORS[i % len(COLORS)]
            yield from _line((x, 60), (x + 34, 60), color, dashed)
            yield from _dot((x + 17, 60), color, hollow=dashed)
            yield Text(x + 41, 64, words, BODY, INK)
            x += 41 + text_width(words, BODY) + 22


def _frame(axes: ScalingAxes, words: str, last: bool) -> Iterator[Shape]:
    """Title, grid, and figures beside it; numbers of GPUs under it, every third where there are many."""
    yield Text(axes.left, axes.top - 12, words, BODY, INK, bold=True)
    tick = 0.1 if axes.most <= 0.5 else 0.2
    for i in range(round(axes.most / tick) + 1):
        y = axes.place(axes.counts[0], i * tick)[1]
        yield rectangle(axes.left, y - 0.5, PANEL, 1, GRID)
        yield Text(axes.left - 8, y + 4, f"{i * tick:.0%}", SMALL, FAINT, "end")
    for count in axes.counts[:: 3 if len(axes.counts) > 6 else 1]:
        x = axes.place(count, 0.0)[0]
        yield rectangle(x - 0.5, axes.top + HEIGHT, 1, 4, FAINT)
        yield Text(x, axes.top + HEIGHT + 18, f"{count:,}", SMALL, FAINT, "middle")
    if last:
        yield Text(axes.left + PANEL / 2, axes.top + HEIGHT + 38, "GPUs", SMALL, FAINT, "middle")


def _curves(axes: ScalingAxes, both: Sequence[Both], key: str, color: str, kind: str) -> Iterator[Shape]:
    """FSDP alone first, so that the planner's choice, which can be the same, lies on it."""
    for way, dashed in ((1, True), (0, False)):
        cells = [pair[way] for pair in both if pair[way]["fits"]]
        points = [axes.place(cell["gpus"], cell[key]) for cell in cells]
        for before, after in pairwise(points):
            yield from _line(before, after, color, dashed)
        for cell, point in zip(cells, points, strict=True):
            name = f"{cell['gpus']:,} {kind}, {'FSDP alone' if dashed else 'planner'}: {cell[key]:.1%}"
            yield from _dot(point, color, hollow=dashed, about=name)


def _dot(at: Point, color: str, hollow: bool, about: str = "") -> Iterator[Shape]:
    """A square; hollow ones are larger, so that they show around a full one."""
    half = DOT + (1.6 if hollow else 0.0)
    yield rectangle(at[0] - half, at[1] - half, 2 * half, 2 * half, color, about)
    if hollow:
        yield rectangle(
            at[0] - half + 1.4, at[1] - half + 1.4, 2 * half - 2.8, 2 * half - 2.8, "#ffffff", about
        )


def _line(start: Point, end: Point, color: str, dashed: bool) -> Iterator[Shape]:
    """A straight line as polygons: whole, or every second piece of it."""
    length = hypot(end[0] - start[0], end[1] - start[1])
    pieces = max(1, 2 * round(length / DASH / 2) + 1) if dashed else 1
    for i in range(0, pieces, 2):
        yield _stroke(_between(start, end, i / pieces), _between(start, end, (i + 1) / pieces), color)


def _between(start: Point, end: Point, share: float) -> Point:
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _stroke(start: Point, end: Point, color: str) -> Polygon:
    x, y = end[0] - start[0], end[1] - start[1]
    scale = LINE / 2 / max(hypot(x, y), 1e-9)
    dx, dy = -y * scale, x * scale
    return Polygon(
        (
            (start[0] + dx, start[1] + dy),
            (end[0] + dx, end[1] + dy),
            (end[0] - dx, end[1] - dy),
            (start[0] - dx, start[1] - dy),
        ),
        color,
    )
