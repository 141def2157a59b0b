"""`python -m tools.trace RUN`: how a profiled step spent its time, and what to change."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.planner.hardware import find_hardware
from meshwright.parallel.planner.timeline_plot import draw_timeline, picture_bytes
from meshwright.tools.cli import natural, new_parser, run_tool
from meshwright.tools.plan.export import check_target, write_atomically
from meshwright.tools.trace.analysis import analyze_profile
from meshwright.tools.trace.kernels import KernelTable
from meshwright.tools.trace.plan_comparison import compare_with_plan, draw_against, to_timeline
from meshwright.tools.trace.reader import find_traces
from meshwright.tools.trace.report import describe, make_document
from meshwright.train.user_code import allow

DESCRIPTION = """\
examples:
  torchrun --nproc-per-node 2 -m train.main --config X.yaml --profile.start=10 --profile.all_ranks=true
  python -m tools.trace runs/NAME                     the newest profile of a run
  python -m tools.trace runs/NAME --picture step.svg  with the step that the plan predicted
  python -m tools.trace trace.json.gz --json          any torch.profiler trace with ProfilerStep annotations

Report how a profiled step spent its time: computing, exposed communication, host-bound; which all-gathers
were late, which units and ranks are slow, how fast the kernels were, and how the step compares with the plan.
docs/profiling.md describes the tables.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Analyze a profile and print the result. Raises ConfigError and DataError."""
    options = make_parser().parse_args(arguments)
    if options.factory:
        allow([options.factory])
    picture = None
    if options.picture:
        picture = check_target("--picture", Path(options.picture), (".svg", ".png"), overwrites=True)
    traces, table = find_traces(Path(options.path), options.step), KernelTable()
    shown = next(iter(traces)) if options.rank is None else options.rank
    analysis = analyze_profile(traces, shown, table.add)
    kernels = table.rows(len(analysis.steps), find_hardware(str(analysis.facts.get("device_name", ""))))
    measured = to_timeline(analysis.step)
    plan = compare_with_plan(analysis, measured)
    if picture is not None:
        subject = analysis.run.name if analysis.run else analysis.trace.name
        step = f"step {analysis.step.number}, rank {analysis.rank}"
        if plan.predicted:
            kind = str(analysis.facts.get("device_name", "devices"))
            title = f"{plan.predicted.title(subject, kind, measured.step_s)} ({step})"
            figure = draw_against(plan.predicted.timeline, measured, title)
        else:
            figure = draw_timeline(measured, f"{subject}; measured ({step})")
        write_atomically(picture, picture_bytes(figure, picture.suffix))
    if options.json:
        print(json.dumps(make_document(analysis, kernels, plan), indent=2))
    else:
        print("\n\n".join(describe(analysis, kernels, plan)))
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("trace", "RUN", DESCRIPTION)
    add = parser.add_argument
    add("path", metavar="RUN", help="folder of a run or of a profile in it, or one trace (.json, .json.gz)")
    add("--step", type=natural, metavar="N", help="the profile that starts at step N (default: the newest)")
    add("--rank", type=natural, metavar="R", help="analyze this rank's step (default: the first profiled)")
    add("--json", action="store_true", help="print one JSON document")
    add("--picture", metavar="FILE", help="draw the step, below the predicted one if any (.svg or .png)")
    text = (
        "the function that built the run's model, to predict its step: its config alone does not let it run"
    )
    add("--model.factory", dest="factory", metavar="MODULE:FUNCTION", help=text)
    return parser


if __name__ == "__main__":
    run_tool(main)
