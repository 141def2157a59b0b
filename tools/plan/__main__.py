"""`python -m tools.plan --config X --gpus N`: the plan of a run, its memory and its speed, without a GPU or a
process group.

With `--parallel.plan=auto` the planner chooses it. `--min-gpus` and `--sweep` ask for the number of GPUs,
`--check` has the real code confirm the prediction. `--compare` puts DDP, FSDP and HSDP of the same training
side by side. `python -m tools.plan diff A.yaml B.yaml` says what differs between two plan files.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.parallel.plan.schema import AXES
from meshwright.parallel.plan.serialize import load_plan
from meshwright.tools.command import run_tool
from meshwright.tools.plan.answer import Answer, Place, answer, as_json, find_fewest, find_gpu, time_to_train
from meshwright.tools.plan.check import Check, check_json, check_run, check_text
from meshwright.tools.plan.compare import compare_strategies, comparison_json, comparison_text
from meshwright.tools.plan.diff import diff_plans, in_words
from meshwright.tools.plan.files import PLAN_SUFFIXES, TIMELINES, check_target, save_plan, save_timeline
from meshwright.tools.plan.options import make_diff_parser, read_options
from meshwright.tools.plan.sweep import read_sweep, sweep, sweep_json, sweep_text
from meshwright.tools.plan.text import as_text
from meshwright.train.config import Config

EXIT_DIFFERS = 1  # --check found more difference than it allows


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, or compare two plans. Raises ConfigError and PlanError; leaves with 1 if a check fails."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["diff"]:
        compare_files(make_diff_parser().parse_args(arguments[1:]))
        return
    options, config = read_options(arguments)
    if options.compare:
        show_comparison(options, config)
    elif options.sweep:
        show_sweep(options, config)
    else:
        show_plan(options, config)


def show_plan(options: argparse.Namespace, config: Config) -> None:
    """Print the answer, and write the files asked for. A plan that does not fit is an answer, not an
    error."""
    targets = _targets(options)
    hardware = find_gpu(options.gpu) if options.gpu else None
    gpus = options.gpus or find_fewest(config, options.gpus_per_node, hardware)
    asked = answer(config, Place(gpus, min(gpus, options.gpus_per_node), hardware))
    check = check_run(config, asked.plan) if options.check else None
    _write(targets, asked, Path(options.config).stem)
    if options.json:
        print(json.dumps(_document(options, asked, check), indent=2))
    else:
        first = [f"the fewest GPUs that will do: {gpus}"] if options.min_gpus else []
        last = [*([check_text(check)] if check else []), *(f"wrote {path}" for path in targets.values())]
        print("\n\n".join([*first, as_text(asked, options.tokens), *last]))
    if check and not check.agrees:
        sys.exit(EXIT_DIFFERS)


def show_sweep(options: argparse.Namespace, config: Config) -> None:
    """Print a row for each number of GPUs."""
    swept = sweep(config, read_sweep(options.sweep), options.gpus_per_node, find_gpu(options.gpu))
    print(
        json.dumps(sweep_json(swept, options.tokens), indent=2)
        if options.json
        else sweep_text(swept, options.tokens)
    )


def show_comparison(options: argparse.Namespace, config: Config) -> None:
    """Print DDP, FSDP and HSDP of the same training side by side."""
    compared = compare_strategies(config, options.gpus, options.gpus_per_node)
    print(comparison_json(compared) if options.json else comparison_text(compared))


def compare_files(options: argparse.Namespace) -> None:
    """Print what differs between two plan files. Raises PlanError for a file that is not a plan."""
    differences = diff_plans(load_plan(Path(options.a)), load_plan(Path(options.b)))
    if options.json:
        rows = [dataclasses.asdict(difference) for difference in differences]
        print(json.dumps({"same": not rows, "differences": rows}, indent=2))
    elif not differences:
        print("the two plans are the same")
    else:
        print(f"{options.a} -> {options.b}", *map(in_words, differences), sep="\n")


def _targets(options: argparse.Namespace) -> dict[str, Path]:
    """The files to write, by option, each of them possible. A plan may be in use, and is never
    overwritten."""
    targets = {}
    if options.save:
        targets["save"] = check_target("--save", Path(options.save), PLAN_SUFFIXES, overwrites=False)
    if options.timeline:
        targets["timeline"] = check_target(
            "--timeline", Path(options.timeline), tuple(TIMELINES), overwrites=True
        )
    return targets


def _write(targets: Mapping[str, Path], asked: Answer, model: str) -> None:
    mesh, place = asked.plan.mesh, asked.place
    where = f"{mesh.world_size} {place.hardware.name}" if place.hardware else f"{mesh.world_size} GPUs"
    if "timeline" in targets and asked.prediction:
        degrees = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES)
        save_timeline(targets["timeline"], asked.prediction.timeline, f"{model} on {where}: {degrees}")
    if "save" in targets:
        save_plan(targets["save"], asked.plan, [f"{model} on {where}", *asked.reasons])


def _document(options: argparse.Namespace, asked: Answer, check: Check | None) -> dict[str, Any]:
    document = as_json(asked)
    if options.min_gpus:
        document["min_gpus"] = asked.place.gpus
    if options.tokens and asked.prediction:
        document["time_to_train"] = time_to_train(asked.prediction, asked.place.gpus, options.tokens)
    return document | ({"check": check_json(check)} if check else {})


if __name__ == "__main__":
    run_tool(main)
