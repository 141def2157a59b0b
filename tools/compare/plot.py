"""Runs beside each other as a picture: the curves with the band around the first, and below how far apart
they lie."""

import math
from collections.abc import Iterator, Sequence

from meshwright.parallel.planner.plot.shapes import Picture, Polygon, Shape, Text, rectangle
from meshwright.parallel.planner.plot.timeline import INK
from meshwright.tools.charts import (
    BODY,
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SMALL,
    TOP,
    WIDTH,
    Axes,
    Curve,
    Style,
    draw_curve,
    fit_words,
    frame,
    marker,
    style_of,
)
from meshwright.tools.compare.comparison import RunComparison, ToleranceBand, distance
from meshwright.tools.run_reader import RunFolder, series

KEYS = ("loss", "grad_norm")  # a column for each
HEAD = 58  # pixels for the verdict and the runs' names
ROW = 22  # of a name
SHADE = "#ececec"  # of the band
FLOOR_DECADES = 2  # below the smallest difference that is not 0: where those that are 0 are drawn
MOST_RUNS = 30


def draw_comparisons(comparisons: Sequence[RunComparison]) -> Picture:
    """Two columns: loss and gradient norm; the curves above, the differences from the first run below."""
    first, shown = comparisons[0].a, comparisons[:MOST_RUNS]
    runs = [(first, style_of(0)), *((each.b, style_of(number + 1)) for number, each in enumerate(shown))]
    count = (
        f"{sum(each.same for each in comparisons)} of {len(comparisons)} runs are the same training as the "
        "first"
    )
    verdict = comparisons[0].verdict if len(comparisons) == 1 else count
    shapes: list[Shape] = [Text(8, 24, fit_words(verdict, BODY, 2 * WIDTH - 60), BODY, INK, bold=True)]
    for row, (run, style) in enumerate(runs):
        shapes.append(marker((14, 44 + row * ROW), style))
        shapes.append(Text(26, 48 + row * ROW, fit_words(str(run.folder), SMALL, 2 * WIDTH - 40), SMALL, INK))
    top = HEAD + len(runs) * ROW - 10
    for column, key in enumerate(KEYS):
        left = float(column * WIDTH)
        shapes += _curves(key, runs, comparisons[0].bands[-1], left, top)
        shapes += _differences(key, shown, left, top + HEIGHT)
    return Picture(2 * WIDTH, top + 2 * HEIGHT, tuple(shapes))


def _curves(
    key: str, runs: Sequence[tuple[RunFolder, Style]], band: ToleranceBand, left: float, top: float
) -> Iterator[Shape]:
    yield Text(left + 8, top + 20, f"{key} (grey: the band around the first)", SMALL, INK, bold=True)
    found = [series(run.rows, key) for run, _ in runs]
    finite = [(step, value) for values in found for step, value in values.items() if math.isfinite(value)]
    if not finite:
        yield Text(left + 8, top + 48, "no finite value", SMALL, INK)
        return
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes = _axes(left, top, max(step for step, _ in finite), (low - room, high + room))
    yield from _shade(axes, found[0], band, key)
    yield from frame(axes, "step")
    for number, ((run, style), values) in enumerate(zip(runs, found, strict=True)):
        yield from draw_curve(axes, Curve(str(run.folder), list(values.items()), style), number)


def _shade(axes: Axes, values: dict[int, float], band: ToleranceBand, key: str) -> Iterator[Shape]:
    """The band around the first run's curve."""
    finite = [(float(step), value) for step, value in values.items() if math.isfinite(value)]
    if len(finite) < 2:
        return
    widths = [band.tolerances[key].width(value) for _, value in finite]
    above = [
        _inside(axes, (step, value + width)) for (step, value), width in zip(finite, widths, strict=True)
    ]
    below = [
        _inside(axes, (step, value - width)) for (step, value), width in zip(finite, widths, strict=True)
    ]
    yield Polygon((*above, *reversed(below)), SHADE)


def _inside(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    x, y = axes.place(point)
    return x, min(max(y, axes.top), axes.bottom)


def _differences(key: str, comparisons: Sequence[RunComparison], left: float, top: float) -> Iterator[Shape]:
    """On a logarithmic axis; the band is grey below the widest distance that it allows."""
    yield Text(left + 8, top + 20, f"{key}: distance from the first", SMALL, INK, bold=True)
    found = [_distances(comparison, key) for comparison in comparisons]
    sizes = [size for values in found for size in values.values() if 0 < size < math.inf]
    if not sizes:
        yield Text(
            left + 8,
            top + 48,
            "none at any step that is in both" if any(found) else "no step in both has it",
            SMALL,
            INK,
        )
        return
    widest = max(_widest(comparison, key) for comparison in comparisons)
    low = math.floor(math.log10(min(sizes))) - FLOOR_DECADES
    high = math.ceil(math.log10(max(*sizes, widest or 0.0)) + 0.1)
    axes = _axes(left, top, max(step for values in found for step in values), (low, high))
    if widest and math.log10(widest) > low:
        y = axes.place((0, math.log10(widest)))[1]
        yield rectangle(
            axes.left, y, axes.right - axes.left, axes.bottom - y, SHADE, f"the band: up to {widest:.2g}"
        )
    every = max(1, math.ceil((high - low) / 6))
    marks = [(float(power), f"1e{power}") for power in range(low + every, high + 1, every)]
    yield from frame(axes, "step", [(float(low), "0"), *marks])
    for number, (comparison, values) in enumerate(zip(comparisons, found, strict=True)):
        points = [
            (float(step), math.log10(size) if 0 < size < math.inf else low if size == 0 else math.nan)
            for step, size in values.items()
        ]
        yield from draw_curve(axes, Curve(str(comparison.b.folder), points, style_of(number + 1)), number)


def _distances(comparison: RunComparison, key: str) -> dict[int, float]:
    one, other = series(comparison.a.rows, key), series(comparison.b.rows, key)
    return {step: distance(one[step], other[step]) for step in one if step in other}


def _widest(comparison: RunComparison, key: str) -> float:
    values = [value for value in series(comparison.a.rows, key).values() if math.isfinite(value)]
    return max((comparison.bands[-1].tolerances[key].width(value) for value in values), default=0.0)


def _axes(left: float, top: float, last: float, y: tuple[float, float]) -> Axes:
    return Axes(left + LEFT, top + TOP, left + WIDTH - RIGHT, top + HEIGHT - BOTTOM, (0.0, last or 1.0), y)
