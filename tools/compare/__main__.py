"""`python -m tools.compare A B`: whether runs are the same training, and where they begin to differ."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.planner.plot.shapes import to_svg
from meshwright.tools.command import positive, run_tool
from meshwright.tools.compare.bands import BITWISE, own_band
from meshwright.tools.compare.comparison import Comparison, compare_runs
from meshwright.tools.compare.picture import draw_comparisons
from meshwright.tools.compare.text import as_json, as_text, summary
from meshwright.tools.plan.files import check_target, write_whole
from meshwright.tools.run_folder import read_run
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
        save_picture(options.picture, comparisons)
    if options.json:
        print(
            json.dumps(
                {"same": same, "comparisons": [as_json(comparison) for comparison in comparisons]}, indent=2
            )
        )
    else:
        parts = [summary(comparisons)] if len(comparisons) > 1 else []
        print("\n\n".join([*parts, *map(as_text, comparisons)]))
    if not same:
        sys.exit(EXIT_DIFFERENT)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare",
        description="Are these runs the same training? Data, loss and gradient norm at the steps that both "
        "report, the first "
        "step that differs and by how much; rate and memory side by side; config and plan in words. Of more "
        "than two runs each "
        "is compared with the first.",
        epilog="exit codes: 0 the same within the band, 1 different, 2 a mistake in what was asked. Bands: "
        "bit for bit; within "
        "float32 re-ordering noise (loss 5e-5, gradient norm 1e-5 of its size: what every mesh is tested to, "
        "at each of ten "
        "steps); and where one of the runs computes or keeps something in bfloat16 or float8, within what "
        "that rounds (loss "
        "0.02, gradient norm 4.2% of its size). Noise grows with the steps, as fast as the training is "
        "unstable: --until looks "
        "at the first ones only.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, of a run that may still be going"
    )
    parser.add_argument(
        "--rtol", type=_tolerance, metavar="R", help="a band of your own: this share of the first run's value"
    )
    parser.add_argument("--atol", type=_tolerance, metavar="A", help="and so much beside, for every curve")
    parser.add_argument("--until", type=positive, metavar="STEP", help="the last step to look at")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw curves and differences, as .svg or .png"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def save_picture(path: Path, comparisons: Sequence[Comparison]) -> None:
    """By the file's suffix. Raises ConfigError where it cannot be written, or Pillow is missing."""
    picture = draw_comparisons(comparisons)
    if path.suffix == ".svg":
        write_whole(path, to_svg(picture).encode())
        return
    try:
        from meshwright.parallel.planner.plot.shapes import to_png
    except ImportError:
        raise ConfigError(
            "--picture: a PNG needs Pillow (pip install pillow); an SVG needs nothing"
        ) from None
    write_whole(path, to_png(picture))


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return value


if __name__ == "__main__":
    run_tool(main)
