"""`python -m tools.trace RUN`: what a profiled step did with its time, and what to do about it."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.timeline_plot import draw_timeline, picture_bytes
from meshwright.tools.cli import format_table, natural, run_tool
from meshwright.tools.plan.export import check_target, write_whole
from meshwright.tools.trace.advice import ms
from meshwright.tools.trace.analysis import ProfileAnalysis, answer
from meshwright.tools.trace.kernel_stats import KernelRow
from meshwright.tools.trace.kernels import KernelTable
from meshwright.tools.trace.plan_comparison import (
    LaneRow,
    compare_lanes,
    draw_against,
    predict_run,
    to_timeline,
)
from meshwright.tools.trace.reader import find_traces
from meshwright.tools.trace.report import describe, make_document
from meshwright.tools.trace.roofline import find_roof
from meshwright.train.errors import DataError

EPILOG = """
examples:
  torchrun --nproc-per-node 2 -m train.main --config llama_debug.yaml --profile.start=10 --profile.all_ranks=true
  python -m tools.trace runs/NAME                     the newest profile of a run
  python -m tools.trace runs/NAME --picture step.svg  beside the step that the plan predicted
  python -m tools.trace trace.json.gz --json          any trace of torch's profiler with ProfilerStep annotations
"""  # noqa: E501


@dataclass(frozen=True)
class AgainstPlan:
    """The step that the plan predicted; None and why where there is none."""

    predicted: Timeline | None
    why_not: str
    lanes: Sequence[LaneRow]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, judge, print. Raises ConfigError and DataError."""
    options = make_parser().parse_args(arguments)
    picture = (
        check_target("--picture", Path(options.picture), (".svg", ".png"), overwrites=True)
        if options.picture
        else None
    )
    traces = find_traces(Path(options.path), options.step)
    table = KernelTable()
    found = answer(traces, next(iter(traces)) if options.rank is None else options.rank, table.add)
    measured = to_timeline(found.step)
    kernels = table.rows(len(found.steps), find_roof(str(found.facts.get("device_name", ""))))
    plan = compare_with_plan(found, measured)
    if picture is not None:
        draw(picture, found, measured, plan.predicted)
    if options.json:
        print(json.dumps(_document(found, kernels, plan), indent=2))
    else:
        print("\n\n".join([*describe(found), *_kernel_text(kernels), _plan_text(plan)]))
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace",
        allow_abbrev=False,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Say what a profiled step did with its time: computing, waiting for communication, for "
        "the host; which "
        "all-gathers came late,\nwhich units and ranks are slow, how fast the kernels were, and how it "
        "compares with "
        "the plan. See docs/profiling.md.",
    )
    add = parser.add_argument
    add(
        "path",
        metavar="RUN",
        help="folder of a run (run.dir), of a profile in it, or one trace (.json, .json.gz)",
    )
    add("--step", type=natural, metavar="N", help="the profile that began at step N (default: the newest)")
    add(
        "--rank",
        type=natural,
        metavar="R",
        help="the rank whose step is looked into (default: the first profiled)",
    )
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--picture", metavar="FILE", help="draw the step, beside the plan's where there is one (.svg or .png)"
    )
    return parser


def compare_with_plan(found: ProfileAnalysis, measured: Timeline) -> AgainstPlan:
    """Lane by lane, for a trace that lies in its run's folder."""
    if found.run is None:
        return AgainstPlan(None, "the trace does not lie in the folder of its run", ())
    try:
        per_node = int(found.facts.get("local_world_size", found.facts.get("world_size", 1)))
        predicted = predict_run(found.run, str(found.facts.get("device_name", "")), per_node)
    except DataError as error:
        return AgainstPlan(None, str(error), ())
    return AgainstPlan(predicted, "", compare_lanes(predicted, measured))


def draw(path: Path, found: ProfileAnalysis, measured: Timeline, predicted: Timeline | None) -> None:
    """The step, below the predicted one if there is one."""
    title = (
        f"{found.run.name if found.run else found.trace.name}: step {found.step.number}, rank {found.rank}"
    )
    drawn = draw_against(predicted, measured, title) if predicted else draw_timeline(measured, title)
    write_whole(path, picture_bytes(drawn, path.suffix))


def _document(found: ProfileAnalysis, kernels: Sequence[KernelRow], plan: AgainstPlan) -> dict[str, Any]:
    against = {"why_not": plan.why_not or None, "lanes": [asdict(row) for row in plan.lanes]}
    return {**make_document(found), "kernels": [asdict(row) for row in kernels], "plan": against}


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
    head = ("share", "a step", "calls", "achieved", "achieved", "of roof", "kernel or operator")
    return ["Top kernels\n" + format_table(head, rows)]


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.{3 if value < 1 else 1}f} {unit}"


def _plan_text(plan: AgainstPlan) -> str:
    if plan.predicted is None:
        return f"Plan against measured: not compared, {plan.why_not}"
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
