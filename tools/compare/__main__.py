"""`python -m tools.compare A B`: whether runs are the same training, and where they begin to differ."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.timeline_plot import picture_bytes
from meshwright.tools.cli import format_table, number_from, positive, run_tool, to_json
from meshwright.tools.compare.comparison import (
    BITWISE,
    CurveDifference,
    RunComparison,
    compare_runs,
    own_band,
)
from meshwright.tools.compare.plot import draw_comparisons
from meshwright.tools.plan.export import check_target, write_whole
from meshwright.tools.run_reader import Figures, Rate, number_words, read_run
from meshwright.train.errors import ConfigError

EXIT_DIFFERENT = 1  # as of the diff command
PICTURES = (".svg", ".png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and leave with EXIT_DIFFERENT where runs are not the same training. Raises ConfigError."""
    options = make_parser().parse_args(arguments)
    if options.picture:
        check_target("--picture", options.picture, PICTURES, overwrites=True)
    own = options.rtol is not None or options.atol is not None
    bands = (BITWISE, own_band(options.rtol or 0.0, options.atol or 0.0)) if own else None
    first, *others = [read_run(folder) for folder in options.runs]
    if not others:
        raise ConfigError(f"{options.runs[0]}: name at least two runs' folders")
    comparisons = [compare_runs(first, other, bands, options.until) for other in others]
    same = all(comparison.same for comparison in comparisons)
    if options.picture:
        write_whole(options.picture, picture_bytes(draw_comparisons(comparisons), options.picture.suffix))
    if options.json:
        print(to_json({"same": same, "comparisons": [*map(as_json, comparisons)]}))
    else:
        if len(comparisons) > 1:
            print("\n".join(f"{each.b.folder}: {each.verdict}" for each in comparisons), end="\n\n")
        print("\n\n".join(map(as_text, comparisons)))
    if not same:
        sys.exit(EXIT_DIFFERENT)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare",
        description="Are these runs the same training? Data, loss and gradient norm at the steps that both "
        "report, the first step that differs and by how much; rate and memory side by side; config and plan "
        "in words. Of more than two runs each is compared with the first.",
        epilog="exit codes: 0 the same within the band, 1 different, 2 a mistake in what was asked. Bands: "
        "bit for bit; within float32 re-ordering noise (loss 5e-5, gradient norm 1e-5 of its size: what "
        "every mesh is tested to, at each of ten steps); and where one of the runs computes or keeps "
        "something in bfloat16 or float8, within what that rounds (loss 0.02, gradient norm 4.2% of its "
        "size). Noise grows with the steps, as fast as the training is unstable: --until looks at the first "
        "ones only.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, of a run that may still be going"
    )
    parser.add_argument(
        "--rtol",
        type=number_from(0),
        metavar="R",
        help="a band of your own: this share of the first run's value",
    )
    parser.add_argument(
        "--atol", type=number_from(0), metavar="A", help="and so much beside, for every curve"
    )
    parser.add_argument("--until", type=positive, metavar="STEP", help="the last step to look at")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw curves and differences, as .svg or .png"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


SHOWN = 40  # lines of a config's or a plan's differences


def as_text(comparison: RunComparison) -> str:
    """The verdict first, then what it rests on."""
    a, b = comparison.a, comparison.b
    lines = [comparison.verdict, f"  first:  {a.folder}", f"  second: {b.folder}", ""]
    lines += [format_table(("", "first", "second", "second / first"), _side_by_side(*comparison.figures)), ""]
    lines += [f"data: {comparison.data}", *(_curve_words(curve) for curve in comparison.curves)]
    for title, found in (("config", comparison.config), ("plan", comparison.plan)):
        lines.append(f"{title}:" if found else f"{title}: no difference")
        lines += [f"- {line}" for line in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"- and {len(found) - SHOWN} more")
    return "\n".join([*lines, *comparison.notes])


def as_json(comparison: RunComparison) -> dict[str, Any]:
    """Its fields, with the runs by their folders and the bands by their names."""
    folders = {"a": comparison.a.folder, "b": comparison.b.folder}
    bands = {
        "band": comparison.band and comparison.band.name,
        "bands": [one.name for one in comparison.bands],
    }
    return vars(comparison) | folders | bands


def _curve_words(curve: CurveDifference) -> str:
    if curve.first is None:
        return f"{curve.key}: equal at all {curve.steps} steps"
    step, one, other = curve.first
    at, most = curve.largest
    apart = f"by {most:.3g}" if math.isfinite(most) else "where only one is finite"
    beyond = "within the band" if curve.beyond is None else f"beyond the band from step {curve.beyond} on"
    return (
        f"{curve.key}: first differs at step {step} ({one:.6g} and {other:.6g}), most at step {at}, "
        f"{apart}; {beyond}"
    )


def _side_by_side(a: Figures, b: Figures) -> list[tuple[str, str, str, str]]:
    rows = [
        ("last step", a.step, b.step, ",.0f"),
        ("loss", a.loss, b.loss, ".4f"),
        ("eval loss", a.eval_loss, b.eval_loss, ".4f"),
        ("tokens/s", _median(a.tokens_per_s), _median(b.tokens_per_s), ",.0f"),
        ("step time, s", _median(a.step_time_s), _median(b.step_time_s), ".4g"),
        ("peak memory, GiB", a.peak_memory_gib, b.peak_memory_gib, ".2f"),
        ("MFU", a.mfu, b.mfu, ".1%"),
    ]
    return [
        (words, number_words(one, form), number_words(other, form), _ratio(one, other))
        for words, one, other, form in rows
        if one is not None or other is not None
    ]


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.3f}" if a and b is not None and math.isfinite(b / a) else ""


def _median(rate: Rate | None) -> float | None:
    return None if rate is None else rate.median


if __name__ == "__main__":
    run_tool(main)
