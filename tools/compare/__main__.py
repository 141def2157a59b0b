"""`python -m tools.compare A B`: whether runs are the same training, and from which step on they differ."""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.timeline_plot import picture_bytes
from meshwright.tools.cli import format_table, new_parser, number_from, positive, run_tool, to_json
from meshwright.tools.compare.comparison import (
    BITWISE,
    CurveDifference,
    RunComparison,
    compare_runs,
    custom_band,
)
from meshwright.tools.compare.plot import draw_comparisons
from meshwright.tools.plan.export import check_target, write_atomically
from meshwright.tools.run_reader import FIGURES, Figures, format_number, read_run
from meshwright.train.errors import ConfigError

EXIT_DIFFERENT = 1  # the exit code of the diff command
EXIT_CODES = "exit codes: 0 the same within a band, 1 different, 2 invalid arguments"
PICTURES = (".svg", ".png")
EXAMPLES = """examples:
    python -m tools.compare runs/a runs/b
    python -m tools.compare sweeps/prefetch/*/                # each with the first
    python -m tools.compare runs/a runs/b --until 10 --picture difference.svg

Reports whether runs are the same training: data, loss and gradient norm at the steps that both report, then
throughput and memory, and the differences in config and plan. Rounding noise grows with every step: --until
compares the first ones. Bands: bit for bit; within float32 re-ordering noise (loss 5e-5, gradient norm 1e-5
relative: the tolerance of the tests of every mesh); and, if a run computes or stores values in bfloat16 or
float8, within bfloat16 rounding (loss 0.02, gradient norm 4.2% relative)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare runs; exit with EXIT_DIFFERENT unless all are the training of the first. Raises ConfigError."""
    options = make_parser().parse_args(arguments)
    if options.picture:
        check_target("--picture", options.picture, PICTURES, overwrites=True)
    is_custom = options.rtol is not None or options.atol is not None
    bands = (BITWISE, custom_band(options.rtol or 0.0, options.atol or 0.0)) if is_custom else None
    first, *others = [read_run(folder) for folder in options.runs]
    if not others:
        raise ConfigError(f"{options.runs[0]}: give the folders of at least two runs")
    comparisons = [compare_runs(first, other, bands, options.until) for other in others]
    same = all(comparison.same for comparison in comparisons)
    if options.picture:
        write_atomically(
            options.picture, picture_bytes(draw_comparisons(comparisons), options.picture.suffix)
        )
    if options.json:
        print(to_json({"same": same, "comparisons": [*map(as_json, comparisons)]}))
    else:
        if len(comparisons) > 1:
            print("\n".join(f"{each.b.folder}: {each.verdict}" for each in comparisons), end="\n\n")
        print("\n\n".join(map(as_text, comparisons)))
    if not same:
        sys.exit(EXIT_DIFFERENT)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("compare", "RUN RUN [RUN ...]", EXAMPLES, EXIT_CODES)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, also of one in progress")
    relative = "custom band: relative tolerance, as a share of the first run's value"
    add("--rtol", type=number_from(0), metavar="R", help=relative)
    absolute = "custom band: absolute tolerance, for every curve"
    add("--atol", type=number_from(0), metavar="A", help=absolute)
    add("--until", type=positive, metavar="STEP", help="compare steps up to this one")
    picture = "draw curves and differences (.svg or .png)"
    add("--picture", type=Path, metavar="FILE", help=picture)
    add("--json", action="store_true", help="print one JSON document instead of text")
    return parser


SHOWN = 40  # differences listed per config and per plan


def as_text(comparison: RunComparison) -> str:
    """Return a comparison as text: the verdict first, then the evidence."""
    a, b = comparison.a, comparison.b
    lines = [comparison.verdict, f"  first:  {a.folder}", f"  second: {b.folder}", ""]
    head = ("", "first", "second", "second / first")
    lines += [format_table(head, [*_side_by_side(*comparison.figures)]), ""]
    lines += [f"data: {comparison.data}", *(_describe_curve(curve) for curve in comparison.curves)]
    for title, differences in (("config", comparison.config), ("plan", comparison.plan)):
        lines.append(f"{title}:" if differences else f"{title}: no difference")
        lines += [f"- {line}" for line in differences[:SHOWN]]
        if len(differences) > SHOWN:
            lines.append(f"- and {len(differences) - SHOWN} more")
    return "\n".join([*lines, *comparison.notes])


def as_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the fields of a comparison, with runs as their folders and bands as their names."""
    folders = {"a": comparison.a.folder, "b": comparison.b.folder}
    bands = {
        "band": comparison.band and comparison.band.name,
        "bands": [band.name for band in comparison.bands],
    }
    return vars(comparison) | folders | bands


def _describe_curve(curve: CurveDifference) -> str:
    if curve.first is None:
        return f"{curve.key}: equal at all {curve.steps} steps"
    step, first, second = curve.first
    largest_at, most = curve.largest
    size = f"by {most:.3g}" if math.isfinite(most) else "where only one is finite"
    beyond = "within the band" if curve.beyond is None else f"outside the band from step {curve.beyond} on"
    return (
        f"{curve.key}: first differs at step {step} ({first:.6g} and {second:.6g}), most at step "
        f"{largest_at}, {size}; {beyond}"
    )


def _side_by_side(a: Figures, b: Figures) -> Iterator[tuple[str, str, str, str]]:
    for name, (label, form) in FIGURES.items():
        first, second = a.value(name), b.value(name)
        if first is not None or second is not None:
            ratio = second / first if first and second is not None else math.nan
            shown = f"{ratio:.3f}" if math.isfinite(ratio) else ""
            yield label, format_number(first, form), format_number(second, form), shown


if __name__ == "__main__":
    run_tool(main)
