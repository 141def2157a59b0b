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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import AXES
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.cli import number_from, positive, run_tool
from meshwright.tools.plan.check import PlanCheck, check_json, check_run, check_text
from meshwright.tools.plan.compare import (
    compare_strategies,
    comparison_json,
    comparison_text,
    diff_plans,
    in_words,
)
from meshwright.tools.plan.export import (
    PLAN_SUFFIXES,
    TIMELINE_SUFFIXES,
    check_target,
    save_plan,
    save_timeline,
)
from meshwright.tools.plan.report import (
    PlanReport,
    Target,
    answer,
    as_json,
    as_text,
    find_fewest,
    find_kind,
    time_to_train,
)
from meshwright.tools.plan.scaling import read_sweep, sweep, sweep_json, sweep_text
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError

EXIT_DIFFERS = 1  # --check found more difference than it allows


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, or compare two plans. Raises ConfigError and PlanError; leaves with 1 if a check fails."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["diff"]:
        compare_files(make_diff_parser().parse_args(arguments[1:]))
        return
    options, job = read_options(arguments)
    if options.compare:
        show_comparison(options, job)
    elif options.sweep:
        show_sweep(options, job)
    else:
        show_plan(options, job)


def show_plan(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print the answer, and write the files asked for. A plan that does not fit is an answer, not an
    error."""
    if options.save:  # a plan may be in use, and is never overwritten
        check_target("--save", options.save, PLAN_SUFFIXES, overwrites=False)
    if options.timeline:
        check_target("--timeline", options.timeline, TIMELINE_SUFFIXES, overwrites=True)
    hardware = find_kind(options.gpu, "--gpu") if options.gpu else None
    gpus = options.gpus or find_fewest(job, options.gpus_per_node, hardware)
    asked = answer(job, Target(gpus, min(gpus, options.gpus_per_node), hardware))
    check = check_run(job, asked.plan) if options.check else None
    written = _write(options, asked)
    if options.json:
        print(json.dumps(_document(options, asked, check), indent=2))
    else:
        first = [f"the fewest GPUs that will do: {gpus}"] if options.min_gpus else []
        last = [*([check_text(check)] if check else []), *(f"wrote {path}" for path in written)]
        print("\n\n".join([*first, as_text(asked, options.tokens), *last]))
    if check and not check.agrees:
        sys.exit(EXIT_DIFFERS)


def show_sweep(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print a row for each number of GPUs."""
    rows = sweep(job, read_sweep(options.sweep), options.gpus_per_node, find_kind(options.gpu, "--gpu"))
    as_asked = sweep_json if options.json else sweep_text
    print(as_asked(rows, options.tokens))


def show_comparison(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print DDP, FSDP and HSDP of the same training side by side."""
    compared = compare_strategies(job, options.gpus, options.gpus_per_node)
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


def _write(options: argparse.Namespace, asked: PlanReport) -> list[Path]:
    """Write the files asked for, and say which."""
    mesh, place = asked.plan.mesh, asked.place
    kind = place.hardware.name if place.hardware else "GPUs"
    about = f"{Path(options.config).stem} on {mesh.world_size} {kind}"
    if options.timeline and asked.prediction:
        degrees = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES)
        save_timeline(options.timeline, asked.prediction.timeline, f"{about}: {degrees}")
    if options.save:
        save_plan(options.save, asked.plan, [about, *asked.reasons])
    return [path for path in (options.save, options.timeline) if path]


def _document(options: argparse.Namespace, asked: PlanReport, check: PlanCheck | None) -> dict[str, Any]:
    document = as_json(asked)
    if options.min_gpus:
        document["min_gpus"] = asked.place.gpus
    if options.tokens and asked.prediction:
        document["time_to_train"] = time_to_train(asked.prediction, asked.place.gpus, options.tokens)
    return document | ({"check": check_json(check)} if check else {})


PROG = "tools.plan"
KEYS = "[--section.key=value ...]"
NEED_GPU = ("tokens", "timeline", "min_gpus", "sweep")
# What --compare and --sweep, which show many plans, have no use for.
OF_ONE_PLAN = ("save", "timeline", "check")
EPILOG = """\
Every config key is accepted too, as --section.key=value, and wins over the file. `python -m train.main -h` documents
them all. With --parallel.plan=auto the planner chooses what the config leaves at auto: degrees, activation
checkpointing, resharding, prefetching and the micro batch; a key that has a value keeps it.

examples:
  the best plan of a 70B on 256 GPUs, and why:
    python -m tools.plan --config llama_70b.yaml --gpus 256 --gpu h100-sxm --parallel.plan=auto --tokens 1e12
  keep it, and run it:
    python -m tools.plan --config llama_8b.yaml --gpus 8 --gpu h100-sxm --parallel.plan=auto --save plan.yaml
    torchrun --nproc-per-node 8 -m train.main --config llama_8b.yaml --parallel.plan=plan.yaml
  a plan of your own, and the picture of a step:
    python -m tools.plan --config llama_8b.yaml --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=full \\
        --timeline step.svg
  how few GPUs will do, and how it scales:
    python -m tools.plan --config llama_405b.yaml --gpu h200 --min-gpus --parallel.plan=auto
    python -m tools.plan --config llama_70b.yaml --gpu h100-sxm --sweep gpus=8..4096 --parallel.plan=auto
  the real code's word for it, before a large run:
    python -m tools.plan --config llama_405b.yaml --gpus 4096 --gpu h100-sxm --parallel.plan=auto --check
  what differs between the plans of two runs:
    python -m tools.plan diff runs/a/plan.yaml runs/b/plan.yaml
"""  # noqa: E501


class _PlanParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all of our own checks do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. See python -m {PROG} -h")


def make_parser() -> argparse.ArgumentParser:
    """Options of planning; every key of the config is accepted besides."""
    usage = [
        f"--gpus N [--gpu KIND] [--tokens T] [--check] [--save F] [--timeline F] {KEYS}",
        f"--gpu KIND --min-gpus {KEYS}",
        f"--gpu KIND --sweep gpus=8..4096 {KEYS}",
        f"--gpus N --compare {KEYS}",
    ]
    lines = [
        *(f"python -m {PROG} --config X {words}" for words in usage),
        f"python -m {PROG} diff A.yaml B.yaml [--json]",
    ]
    parser = _PlanParser(
        prog=f"python -m {PROG}",
        usage="\n       ".join(lines),
        description="Print the plan of a run, advice where it makes little sense, the memory it is predicted "
        "to need per GPU,\n"
        "and for a kind of GPU whether it fits and how fast it will be. Needs no GPU and starts no "
        "processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, flag = parser.add_argument, "store_true"
    add(
        "--config",
        required=True,
        metavar="X",
        help="YAML file: a path, or a name in configs/, as llama_8b.yaml",
    )
    how_many = parser.add_mutually_exclusive_group(required=True).add_argument
    how_many("--gpus", type=positive, metavar="N", help="processes of the run, one per GPU")
    add(
        "--gpus-per-node",
        type=positive,
        default=8,
        metavar="N",
        help="GPUs that share a node: 8 unless given, and never more than there are",
    )
    add(
        "--gpu",
        metavar="KIND",
        help=f"kind of GPU, for time and whether it fits: {', '.join(load_hardware())}",
    )
    add(
        "--tokens",
        type=number_from(1),
        metavar="T",
        help="say how long training on so many tokens takes, as 1e12 (needs --gpu)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE.yaml",
        help="write the plan to a new file, for --parallel.plan=FILE.yaml",
    )
    add(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write a step as a picture (.svg, .png) or as a trace for ui.perfetto.dev (.json); needs --gpu",
    )
    add(
        "--check",
        action=flag,
        help="run a step of one rank with the real code on a fake process group, and compare collectives "
        "and memory; exit code 1 if they differ too much",
    )
    how_many(
        "--min-gpus",
        action=flag,
        help="find the fewest GPUs that will do, a power of two, and plan for them (needs --gpu)",
    )
    how_many(
        "--sweep",
        metavar="gpus=A..B",
        help="plan for A GPUs, twice as many, and so on: how the run scales (needs --gpu)",
    )
    add(
        "--compare",
        action=flag,
        help="instead, put DDP, FSDP and HSDP of this training side by side: memory by kind, predicted "
        "and measured in a simulation",
    )
    add(
        "--json",
        action=flag,
        help="print one JSON document: plan, reasons, advice, predicted {peak_memory_gib, reserved_gib, "
        "memory and memory_at_peak by kind in GiB, step_time_s, compute_s, exposed_comm_s, "
        "tokens_per_s_per_gpu, mfu, "
        "mfu_causal, fits; null what needs --gpu}, with plan=auto candidates, and what was asked for: "
        "time_to_train, min_gpus, "
        "sweep, check",
    )
    return parser


def make_diff_parser() -> argparse.ArgumentParser:
    """Options of comparing."""
    parser = _PlanParser(
        prog=f"python -m {PROG} diff",
        description="Say in words what differs between two plan files.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A.yaml", help="a plan file, such as plan.yaml of a run")
    parser.add_argument("b", metavar="B.yaml", help="another")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: same, and differences {where, key, a, b}",
    )
    return parser


def read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, TrainingJob]:
    """Options of a command line, and the training they are about. Raises ConfigError for what does not exist
    or does not go together."""
    options, config_arguments = make_parser().parse_known_args(arguments)
    _check_names(config_arguments)
    job = parse_config([f"--config={options.config}", *config_arguments], PROG).job
    _check_together(options, job)
    return options, job


def _check_names(config_arguments: Sequence[str]) -> None:
    """An option without a dot is none of the config's."""
    known = [name for action in make_parser()._actions for name in action.option_strings]
    for argument in config_arguments:
        name = argument.split("=")[0]
        if name.startswith("--") and "." not in name and name != "--print_config":
            raise ConfigError(f"unknown option {name}.{nearest(name, known) or ' See -h for all of them.'}")


def _check_together(options: argparse.Namespace, job: TrainingJob) -> None:
    """Options that need each other, or exclude each other."""
    if options.compare:
        _refuse(
            options,
            ("gpu", "tokens", "min_gpus", "sweep", *OF_ONE_PLAN),
            "--compare says what each strategy needs, not whether it fits or how fast it is",
        )
        return
    if options.sweep:
        _refuse(options, OF_ONE_PLAN, "--sweep makes many plans: ask for one with --gpus")
    if options.gpu:
        _check_file(options, job)
        return
    for name in NEED_GPU:
        if getattr(options, name):
            raise ConfigError(f"{_option(name)} needs --gpu KIND: {', '.join(load_hardware())}")
    if job.parallel.plan == "auto":
        raise ConfigError(
            "parallel.plan=auto needs --gpu KIND, to know memory and speed: " + ", ".join(load_hardware())
        )


def _check_file(options: argparse.Namespace, job: TrainingJob) -> None:
    if job.parallel.plan not in ("auto", "manual") and (options.min_gpus or options.sweep):
        name = "--min-gpus" if options.min_gpus else "--sweep"
        raise ConfigError(
            f"{name}: parallel.plan={job.parallel.plan} is a plan for one number of GPUs: use auto or manual"
        )


def _refuse(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(options, name):
            raise ConfigError(f"{_option(name)}: {reason}: leave it out")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    run_tool(main)
