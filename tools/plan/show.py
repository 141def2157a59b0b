"""What tools.plan prints and writes: the report on one plan, a row for each number of GPUs, a comparison."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.planner.accuracy import trust
from meshwright.parallel.planner.hardware import Hardware, Machines, machines_of_kind
from meshwright.tools.calibrate import HERE, measure_this_machine
from meshwright.tools.plan import check as checking
from meshwright.tools.plan import compare, export, scaling
from meshwright.tools.plan import report as reporting
from meshwright.tools.plan.progress import progress
from meshwright.train.config import TrainingJob
from meshwright.train.planning.correction import find_correction


def show_plan(options: argparse.Namespace, job: TrainingJob) -> bool:
    """Print the report on one plan, and write the requested files. One that does not fit is no error. Returns
    whether --check found a difference above its limit."""
    if options.save:  # never overwritten, because a run may use it
        export.check_target("--save", options.save, export.PLAN_SUFFIXES, overwrites=False)
    if options.timeline:
        export.check_target("--timeline", options.timeline, export.TIMELINE_SUFFIXES, overwrites=True)
    hardware = options.gpu and _find_hardware(options, job, options.gpus or options.gpus_per_node)
    goal, per_node = reporting.Goal(options.tokens, options.price), options.gpus_per_node
    with progress() as seconds:
        if options.gpus:
            no_kind = Machines(options.gpus, min(options.gpus, per_node))
            machines = machines_of_kind(hardware, options.gpus, per_node) if hardware else no_kind
            report = reporting.make_report(job, machines, goal)
        else:
            report = reporting.report_on_fewest(job, per_node, hardware, goal, options.days or math.inf)
    check = checking.check_run(job, report.plan) if options.check else None
    written = _write(options, report)
    if options.json:
        print(json.dumps(_document(options, report, check) | {"seconds": seconds}, indent=2))
    else:
        within = f" for {goal.tokens:.3g} tokens in {options.days:g} days" if options.days else ""
        first = [] if options.gpus else [f"fewest GPUs{within}: {report.machines.processes}"]
        last = [*([checking.as_text(check)] if check else []), *(f"wrote {path}" for path in written)]
        print("\n\n".join([*first, reporting.as_text(report), *last]))
    return bool(check and check.wrong)


def show_sweep(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print a row for each number of GPUs."""
    counts = scaling.read_sweep(options.sweep)
    hardware = _find_hardware(options, job, max(counts))
    goal = reporting.Goal(options.tokens, options.price)
    with progress() as seconds:
        rows = scaling.sweep(job, counts, options.gpus_per_node, hardware, goal)
    if options.json:
        print(json.dumps({"sweep": rows, "source": hardware.source, "seconds": seconds}, indent=2))
        return
    lines = map(": ".join, trust(hardware, max(counts), options.gpus_per_node))
    print("\n\n".join([scaling.as_text(rows), "\n".join(lines)]))


def show_comparison(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print a comparison of DDP, FSDP and HSDP for the training."""
    compared = compare.compare_strategies(job, options.gpus, options.gpus_per_node)
    print(json.dumps(compared, indent=2) if options.json else compare.as_text(compared))


def _find_hardware(options: argparse.Namespace, job: TrainingJob, gpus: int) -> Hardware:
    """Return the kind that --gpu names, or this machine as it measures itself and as its runs correct it."""
    if options.gpu != HERE:
        return reporting.find_kind(options.gpu, "--gpu")
    print(f"{HERE}: this machine measures itself, up to a minute, unless it has before", file=sys.stderr)
    hardware, line = measure_this_machine(options.config_arguments, min(gpus, options.gpus_per_node))
    print(line, file=sys.stderr)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    correction = find_correction(job, hardware, device)
    if options.uncorrected or not correction.shares:
        return hardware
    print(f"{HERE}: {correction.describe()}", file=sys.stderr)
    return replace(hardware, correction=correction.factor)


def _write(options: argparse.Namespace, report: reporting.PlanReport) -> list[Path]:
    """Write the requested files, and return their paths."""
    hardware = report.machines.hardware
    kind = hardware.name if hardware else "GPUs"
    of = Path(options.config[-1]).stem if options.config else "model"
    if options.timeline and report.prediction:
        export.save_timeline(options.timeline, report.prediction.timeline, report.prediction.title(of, kind))
    if options.save:
        about = f"{of} on {report.plan.mesh.world_size} {kind}"
        export.save_plan(options.save, report.plan, [about, *report.reasons])
    return [path for path in (options.save, options.timeline) if path]


def _document(
    options: argparse.Namespace, report: reporting.PlanReport, check: checking.PlanCheck | None
) -> dict[str, Any]:
    document = reporting.as_json(report)
    if not options.gpus:
        document["min_gpus"] = report.machines.processes
    return document | ({"check": checking.as_json(check)} if check else {})
