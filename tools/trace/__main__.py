"""`python -m tools.trace RUN`: how a profiled step spent its time, and what to change."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.hardware import find_hardware
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.timeline_plot import draw_timeline, picture_bytes
from meshwright.tools.cli import format_table, natural, run_tool
from meshwright.tools.plan.export import check_target, write_atomically
from meshwright.tools.trace.advice import ms
from meshwright.tools.trace.analysis import ProfileAnalysis, analyze_profile
from meshwright.tools.trace.kernels import KernelRow, KernelTable
from meshwright.tools.trace.plan_comparison import (
    LaneRow,
    compare_lanes,
    draw_against,
    predict_run,
    to_timeline,
)
from meshwright.tools.trace.reader import find_traces
from meshwright.tools.trace.report import describe, make_document
from meshwright.train.errors import DataError
from meshwright.train.model.factory import name_factory

EPILOG = """
examples:
  torchrun --nproc-per-node 2 -m train.main --config llama_debug.yaml --profile.start=10 --profile.all_ranks=true
  python -m tools.trace runs/NAME                     the newest profile of a run
  python -m tools.trace runs/NAME --picture step.svg  with the step that the plan predicted
  python -m tools.trace trace.json.gz --json          any torch.profiler trace with ProfilerStep annotations
"""  # noqa: E501


@dataclass(frozen=True)
class AgainstPlan:
    """The step that the plan predicted; None if it cannot be predicted, for the reason in `why_not`."""

    predicted: Timeline | None
    why_not: str
    lanes: Sequence[LaneRow]


def main(arguments: Sequence[str] | None = None) -> None:
    """Analyze a profile and print the result. Raises ConfigError and DataError."""
    options = make_parser().parse_args(arguments)
    if options.factory:
        name_factory(options.factory)
    picture = (
        check_target("--picture", Path(options.picture), (".svg", ".png"), overwrites=True)
        if options.picture
        else None
    )
    traces = find_traces(Path(options.path), options.step)
    table = KernelTable()
    analysis = analyze_profile(
        traces, next(iter(traces)) if options.rank is None else options.rank, table.add
    )
    measured = to_timeline(analysis.step)
    kernels = table.rows(len(analysis.steps), find_hardware(str(analysis.facts.get("device_name", ""))))
    plan = compare_with_plan(analysis, measured)
    if picture is not None:
        draw(picture, analysis, measured, plan.predicted)
    if options.json:
        print(json.dumps(_document(analysis, kernels, plan), indent=2))
    else:
        print("\n\n".join([*describe(analysis), *_kernel_text(kernels), _plan_text(plan)]))
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace",
        allow_abbrev=False,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Report how a profiled step spent its time: computing, exposed communication, "
        "host-bound; which all-gathers were late,\nwhich units and ranks are slow, how fast the kernels "
        "were, and how the step compares with the plan. See docs/profiling.md.",
    )
    add = parser.add_argument
    add(
        "path",
        metavar="RUN",
        help="folder of a run (run.dir) or of a profile in it, or one trace (.json, .json.gz)",
    )
    add("--step", type=natural, metavar="N", help="the profile that starts at step N (default: the newest)")
    add(
        "--rank",
        type=natural,
        metavar="R",
        help="the rank whose step is analyzed (default: the first profiled)",
    )
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--model.factory",
        dest="factory",
        metavar="MODULE:FUNCTION",
        help="the function that built the run's model, to predict its step: that its config names one does "
        "not let it run",
    )
    add(
        "--picture",
        metavar="FILE",
        help="draw the step, below the predicted one if there is one (.svg or .png)",
    )
    return parser


def compare_with_plan(analysis: ProfileAnalysis, measured: Timeline) -> AgainstPlan:
    """Compare the measured step with the predicted one, lane by lane. Without a prediction (a trace outside
    its run's folder, or a step that cannot be predicted) the result contains the reason."""
    if analysis.run is None:
        return AgainstPlan(None, "the trace is not in the folder of its run", ())
    try:
        per_node = int(analysis.facts.get("local_world_size", analysis.facts.get("world_size", 1)))
        predicted = predict_run(analysis.run, str(analysis.facts.get("device_name", "")), per_node)
    except DataError as error:
        return AgainstPlan(None, str(error), ())
    return AgainstPlan(predicted, "", compare_lanes(predicted, measured))


def draw(path: Path, analysis: ProfileAnalysis, measured: Timeline, predicted: Timeline | None) -> None:
    """Draw the step to a file, below the predicted one if there is one."""
    title = (
        f"{analysis.run.name if analysis.run else analysis.trace.name}: step {analysis.step.number}, rank "
        f"{analysis.rank}"
    )
    figure = draw_against(predicted, measured, title) if predicted else draw_timeline(measured, title)
    write_atomically(path, picture_bytes(figure, path.suffix))


def _document(analysis: ProfileAnalysis, kernels: Sequence[KernelRow], plan: AgainstPlan) -> dict[str, Any]:
    plan_document = {"why_not": plan.why_not or None, "lanes": [asdict(row) for row in plan.lanes]}
    return {**make_document(analysis), "kernels": [asdict(row) for row in kernels], "plan": plan_document}


def _kernel_text(kernels: Sequence[KernelRow]) -> list[str]:
    if not kernels:
        return []
    rows = [
        (
            f"{row.share:.1%}",
            ms(row.seconds_per_step * 1e9),
            f"{row.calls_per_step:g}",
            _figure(row.tflops, "TF/s"),
            _figure(row.gb_s, "GB/s"),
            "-" if row.roof_share is None else f"{row.roof_share:.0%}",
            row.name,
        )
        for row in kernels
    ]
    head = ("share", "per step", "calls", "achieved", "achieved", "of roof", "kernel or operator")
    return ["Top kernels\n" + format_table(head, rows)]


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.{3 if value < 1 else 1}f} {unit}"


def _plan_text(plan: AgainstPlan) -> str:
    if plan.predicted is None:
        return f"Plan against measured: not compared: {plan.why_not}"
    rows = [
        (
            row.lane,
            ms(row.predicted_s * 1e9),
            ms(row.measured_s * 1e9),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
        )
        for row in plan.lanes
    ]
    return "Plan against measured\n" + format_table(("lane", "predicted", "measured", "ratio"), rows)


if __name__ == "__main__":
    run_tool(main)
