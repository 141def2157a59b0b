"""Draw compared runs: curves with the band around the first run, and below them the differences from it."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.parallel.errors import one_line
from meshwright.parallel.planner.timeline_plot import INK, LETTER, SMALL, new_figure, with_default_style
from meshwright.tools.charts import HEIGHT, WIDTH, Curve, Style, add_curves, draw_note, style_axes, style_of
from meshwright.tools.compare.comparison import RunComparison, ToleranceBand, distance
from meshwright.tools.run_reader import RunFolder, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS = ("loss", "grad_norm")  # a column for each
HEAD, ROW = 48, 20  # height of the verdict and of a run's name, in points
LETTERS = int((2 * WIDTH - 60) / (LETTER * SMALL))  # per line
SHADE = "#e4e4e4"  # of the band
MOST_RUNS = 30


@with_default_style
def draw_comparisons(comparisons: Sequence[RunComparison]) -> "Figure":
    """Draw loss and gradient norm in two columns: curves on top, below the differences from the first."""
    first, shown = comparisons[0].a, comparisons[:MOST_RUNS]
    runs = [(first, style_of(0)), *((each.b, style_of(number + 1)) for number, each in enumerate(shown))]
    same = sum(each.same for each in comparisons)
    count = f"{same} of {len(comparisons)} runs are the same training as the first"
    verdict = comparisons[0].verdict if len(comparisons) == 1 else count
    lines = textwrap.wrap(verdict, int(LETTERS * 0.85))
    head = HEAD + ROW * (len(lines) - 1)
    width, top = 2 * WIDTH, head + len(runs) * ROW
    height = top + 2 * HEIGHT
    figure = new_figure(width, height)
    text_style: Any = {"fontsize": SMALL + 1, "weight": "bold", "color": INK, "parse_math": False}
    for row, line in enumerate(lines):
        figure.text(8 / width, 1 - (24 + row * ROW) / height, line, **text_style)
    for row, (run, style) in enumerate(runs):
        axes = figure.add_axes((0, 1 - (head + row * ROW) / height, 1, ROW / height), xlim=(0, width))
        axes.set_axis_off()
        axes.plot(14, 0.5, color=style.color, marker=style.marker, ms=7, mew=0)
        axes.text(26, 0.5, one_line(run.folder, LETTERS), va="center", fontsize=SMALL, parse_math=False)
    grid = {"left": 0.065, "right": 0.98, "bottom": 46 / height, "top": 1 - (top + 20) / height}
    panels = figure.subplots(2, 2, gridspec_kw=grid | {"hspace": 0.42, "wspace": 0.15})
    for key, curves, differences in zip(KEYS, *panels, strict=True):
        _draw_runs(curves, key, runs, comparisons[0].bands[-1])
        _draw_differences(differences, key, shown)
    return figure


def _draw_runs(axes: "Axes", key: str, runs: Sequence[tuple[RunFolder, Style]], band: ToleranceBand) -> None:
    """Draw the curves, with the band around the first run in gray."""
    title = f"{key} (gray: the band around the first)"
    curves = [Curve([*series(run.rows, key).items()], style) for run, style in runs]
    if not any(math.isfinite(value) for curve in curves for _, value in curve.points):
        return draw_note(axes, title, "no finite value")
    style_axes(axes, title, "step")
    add_curves(axes, curves)
    limits = axes.get_ylim()
    steps, values = zip(
        *[(x, y) for x, y in curves[0].points if math.isfinite(y)] or [(0, math.nan)], strict=True
    )
    widths = [band.tolerances[key].width(value) for value in values]
    low, high = ([v + sign * w for v, w in zip(values, widths, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=SHADE, lw=0, zorder=0.4)
    axes.set_ylim(limits)
    return None


def _draw_differences(axes: "Axes", key: str, comparisons: Sequence[RunComparison]) -> None:
    """Draw the differences on a logarithmic axis with a 0; gray up to the widest that the band allows."""
    from matplotlib.ticker import FuncFormatter

    title = f"{key}: difference from the first"
    first = series(comparisons[0].a.rows, key)
    others = (series(comparison.b.rows, key) for comparison in comparisons)
    differences = [
        {step: distance(first[step], other[step]) for step in first if step in other} for other in others
    ]
    sizes = [size for values in differences for size in values.values() if 0 < size < math.inf]
    if not sizes:
        note = "no difference at any common step" if any(differences) else "no common step has it"
        return draw_note(axes, title, note)
    style_axes(axes, title, "step")
    add_curves(axes, [Curve([*values.items()], style_of(n + 1)) for n, values in enumerate(differences)])
    finite = [value for value in first.values() if math.isfinite(value)] or [0.0]
    tolerances = [comparison.bands[-1].tolerances[key] for comparison in comparisons]
    widest = max(tolerance.width(value) for tolerance in tolerances for value in finite)
    axes.axhspan(0, widest, color=SHADE, zorder=0.4)
    axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(sizes))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}" if value else "0"))
    axes.set_ylim(0, 2 * max(*sizes, widest))
    return None
