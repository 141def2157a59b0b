"""Draw how runs scale: MFU above, exposed share below, a column for each model, a color for each GPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.parallel.planner.timeline_plot import (
    BODY,
    FAINT,
    GRID,
    INK,
    LARGE,
    SMALL,
    new_figure,
    with_default_style,
)
from meshwright.tools.charts import COLORS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures = Mapping[str, float] | None  # those of KEYS; None if no plan fits
# model, kind and number of GPUs -> the planner's choice, FSDP alone
Points = Mapping[tuple[str, str, int], tuple[Figures, Figures]]
NARROWEST, PANEL, HEIGHT, LEFT = 900, 390, 620, 74  # points: minimum width, panel width, height, left margin
TITLE = "Predicted: the planner's choice and FSDP alone, from 8 GPUs on"
KEYS = {"mfu": "MFU, attention in full", "exposed_share": "exposed share of the step"}
WAYS = {"planner's choice": 0, "FSDP alone": 1}  # index in a pair


@with_default_style
def draw_scaling(points: Points) -> "Figure":
    """Draw two panels for each model, under a title and a legend."""
    models, kinds, gpus = (list(dict.fromkeys(values)) for values in zip(*points, strict=True))
    width = max(NARROWEST, LEFT + PANEL * len(models))
    figure = new_figure(width, HEIGHT)
    figure.text(LEFT / width, 1 - 34 / HEIGHT, TITLE, fontsize=LARGE, weight="bold", color=INK)
    edges = {"left": LEFT / width, "right": 1 - 24 / width, "top": 1 - 110 / HEIGHT, "bottom": 52 / HEIGHT}
    grid = figure.subplots(
        len(KEYS), len(models), sharex=True, sharey="row", squeeze=False, gridspec_kw=edges | {"wspace": 0.1}
    )
    for (key, label), row in zip(KEYS.items(), grid, strict=True):
        row[0].set_ylabel(label, fontsize=BODY, color=INK)
        for model, axes in zip(models, row, strict=True):
            for number, kind in enumerate(kinds):
                selected = {n: pair for (*of, n), pair in points.items() if of == [model, kind]}
                _draw_ways(axes, selected, key, kind, number)
    for axes in grid.flat:  # after all lines are drawn, because the axes of a row share their limits
        _frame(axes, sorted(gpus))
    for model, above, below in zip(models, *grid, strict=True):
        above.set_title(model, fontsize=BODY, weight="bold", color=INK, loc="left")
        below.set_xlabel("GPUs", fontsize=SMALL, color=FAINT)
    lines = {str(line.get_label()): line for axes in grid.flat for line in axes.lines}
    place: Any = {"loc": "upper left", "bbox_to_anchor": (LEFT / width, 1 - 50 / HEIGHT), "borderaxespad": 0}
    figure.legend(
        [*lines.values()], [*lines], **place, ncols=len(lines), fontsize=BODY, frameon=False, borderpad=0
    )
    return figure


def _draw_ways(
    axes: "Axes", both: Mapping[int, tuple[Figures, Figures]], key: str, kind: str, number: int
) -> None:
    """Draw a line for each way; FSDP alone is dashed, its larger hollow markers visible around solid ones."""
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    line: Any = {"color": color, "marker": marker, "lw": 2, "clip_on": False}
    for way, index in WAYS.items():
        values = {gpus: found[key] for gpus, pair in both.items() if (found := pair[index])}
        # the planner's choice is drawn on top, because both can be equal
        look: Any = {"ls": "--", "ms": 9, "mfc": "white", "zorder": 2} if index else {"ms": 5, "zorder": 3}
        axes.plot(list(values), list(values.values()), label=f"{kind}, {way}", **line, **look)


def _frame(axes: "Axes", counts: Sequence[int]) -> None:
    """Format the axes: grid, percentages, and the numbers of GPUs, every third if there are more than 6."""
    from matplotlib.ticker import NullLocator, PercentFormatter

    shown = counts[:: 3 if len(counts) > 6 else 1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{count:,}" for count in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", color=GRID)
    axes.tick_params(labelsize=SMALL, labelcolor=FAINT, color=FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
