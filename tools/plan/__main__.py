"""`python -m tools.plan --config X --gpus N`: print the plan of a run and predict its memory and speed,
without a GPU or a process group.

With `--parallel.plan=auto` the planner chooses the plan. `--min-gpus` finds the fewest GPUs, `--sweep` plans
for a range of them, and `--check` compares the prediction with the real code. `--compare` compares DDP, FSDP
and HSDP. `python -m tools.plan diff A.yaml B.yaml` lists the differences between two plan files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.serialize import diff_plans, load_plan
from meshwright.parallel.planner.hardware import Hardware, Machines, load_hardware, machines_of_kind
from meshwright.tools.calibrate import HERE, measure_this_machine
from meshwright.tools.cli import (
    add_config_option,
    add_node_option,
    config_arguments,
    number_from,
    positive,
    run_tool,
)
from meshwright.tools.plan import check as checking
from meshwright.tools.plan import compare, export, scaling
from meshwright.tools.plan import report as reporting
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError

EXIT_DIFFERS = 1  # --check found a difference above its limit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Raises ConfigError and PlanError; exits with 1 if a check fails."""
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
    """Print the report on one plan, and write the requested files. One that does not fit is no error."""
    if options.save:  # never overwritten, because a run may use it
        export.check_target("--save", options.save, export.PLAN_SUFFIXES, overwrites=False)
    if options.timeline:
        export.check_target("--timeline", options.timeline, export.TIMELINE_SUFFIXES, overwrites=True)
    if options.gpu:
        hardware = _find_hardware(options, options.gpus or options.gpus_per_node)
        gpus = options.gpus or reporting.find_fewest(job, options.gpus_per_node, hardware)
        machines = machines_of_kind(hardware, gpus, options.gpus_per_node)
    else:
        machines = Machines(options.gpus, min(options.gpus, options.gpus_per_node))
    report = reporting.make_report(job, machines)
    check = checking.check_run(job, report.plan) if options.check else None
    written = _write(options, report)
    if options.json:
        print(json.dumps(_document(options, report, check), indent=2))
    else:
        first = [f"fewest GPUs: {machines.processes}"] if options.min_gpus else []
        last = [*([checking.as_text(check)] if check else []), *(f"wrote {path}" for path in written)]
        print("\n\n".join([*first, reporting.as_text(report, options.tokens), *last]))
    if check and check.wrong:
        sys.exit(EXIT_DIFFERS)


def show_sweep(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print a row for each number of GPUs."""
    counts = scaling.read_sweep(options.sweep)
    hardware = _find_hardware(options, max(counts))
    rows = scaling.sweep(job, counts, options.gpus_per_node, hardware, options.tokens)
    print(json.dumps({"sweep": rows}, indent=2) if options.json else scaling.as_text(rows, options.tokens))


def show_comparison(options: argparse.Namespace, job: TrainingJob) -> None:
    """Print a comparison of DDP, FSDP and HSDP for the training."""
    compared = compare.compare_strategies(job, options.gpus, options.gpus_per_node)
    print(json.dumps(compared, indent=2) if options.json else compare.as_text(compared))


def _find_hardware(options: argparse.Namespace, gpus: int) -> Hardware:
    """Return the kind that --gpu names, or this machine as it measures itself."""
    if options.gpu != HERE:
        return reporting.find_kind(options.gpu, "--gpu")
    print(f"{HERE}: this machine measures itself, up to a minute, unless it has before", file=sys.stderr)
    hardware, line = measure_this_machine(options.config_arguments, min(gpus, options.gpus_per_node))
    print(line, file=sys.stderr)
    return hardware


def compare_files(options: argparse.Namespace) -> None:
    """Print the differences between two plan files. Raises PlanError for a file that is not a plan."""
    differences = diff_plans(load_plan(Path(options.a)), load_plan(Path(options.b)))
    if options.json:
        rows = [{"key": key, "a": a, "b": b} for key, (a, b) in differences.items()]
        print(json.dumps({"same": not rows, "differences": rows}, indent=2))
    elif not differences:
        print("the two plans are the same")
    else:
        lines = (f"{key}: {a} -> {b}" for key, (a, b) in differences.items())
        print(f"{options.a} -> {options.b}", *lines, sep="\n")


def _write(options: argparse.Namespace, report: reporting.PlanReport) -> list[Path]:
    """Write the requested files, and return their paths."""
    mesh, hardware = report.plan.mesh, report.machines.hardware
    kind = hardware.name if hardware else "GPUs"
    of = Path(options.config[-1]).stem if options.config else "model"
    title = f"{of} on {mesh.world_size} {kind}"
    if options.timeline and report.prediction:
        degrees = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in mesh.axes)
        export.save_timeline(options.timeline, report.prediction.timeline, f"{title}: {degrees}")
    if options.save:
        export.save_plan(options.save, report.plan, [title, *report.reasons])
    return [path for path in (options.save, options.timeline) if path]


def _document(
    options: argparse.Namespace, report: reporting.PlanReport, check: checking.PlanCheck | None
) -> dict[str, Any]:
    document = reporting.as_json(report)
    if options.min_gpus:
        document["min_gpus"] = report.machines.processes
    if options.tokens and report.prediction:
        document["time_to_train"] = reporting.time_to_train(
            report.prediction, report.machines.processes, options.tokens
        )
    return document | ({"check": checking.as_json(check)} if check else {})


PROG = "tools.plan"
KEYS = "[--section.key=value ...]"
NEED_GPU = ("tokens", "timeline", "min_gpus", "sweep")
OF_ONE_PLAN = ("save", "timeline", "check")
# options -> those that they refuse, and why
CONFLICTS = {
    "compare": (
        ("gpu", "tokens", "min_gpus", "sweep", *OF_ONE_PLAN),
        "which shows only the memory and the collectives of each strategy",
    ),
    "sweep": (OF_ONE_PLAN, "which makes several plans (one with --gpus)"),
}
EPILOG = """\
Every config key is accepted too, as --section.key=value, and overrides the file. `python -m train.main -h` documents
all of them. With --parallel.plan=auto the planner chooses the keys that the config leaves at auto: degrees, activation
checkpointing, resharding, prefetching and the micro batch; a key that has a value keeps it.

examples:
  the best plan of a 70B model on 256 GPUs, with reasons:
    python -m tools.plan --config llama_70b.yaml --gpus 256 --gpu h100-sxm --parallel.plan=auto --tokens 1e12
  save a plan, and run it:
    python -m tools.plan --config llama_8b.yaml --gpus 8 --gpu h100-sxm --parallel.plan=auto --save plan.yaml
    torchrun --nproc-per-node 8 -m train.main --config llama_8b.yaml --parallel.plan=plan.yaml
  your own plan, and a picture of a step:
    python -m tools.plan --config llama_8b.yaml --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=full \\
        --timeline step.svg
  the best plan for this machine, which measures itself first:
    python -m tools.plan --config llama_debug.yaml --gpus 2 --gpu here --parallel.plan=auto
  the fewest GPUs, and the scaling:
    python -m tools.plan --config llama_405b.yaml --gpu h200 --min-gpus --parallel.plan=auto
    python -m tools.plan --config llama_70b.yaml --gpu h100-sxm --sweep gpus=8..4096 --parallel.plan=auto
  compare the prediction with the real code before a large run:
    python -m tools.plan --config llama_405b.yaml --gpus 4096 --gpu h100-sxm --parallel.plan=auto --check
  list the differences between the plans of two runs:
    python -m tools.plan diff runs/a/plan.yaml runs/b/plan.yaml
"""  # noqa: E501


class _PlanParser(argparse.ArgumentParser):
    """A parser that raises ConfigError with one line, as all other checks do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. See python -m {PROG} -h")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; config keys are accepted in addition."""
    usage = [
        f"--gpus N [--gpu KIND] [--tokens T] [--check] [--save F] [--timeline F] {KEYS}",
        f"--gpu KIND --min-gpus {KEYS}",
        f"--gpu KIND --sweep gpus=8..4096 {KEYS}",
        f"--gpus N --compare {KEYS}",
    ]
    lines = [
        *(f"python -m {PROG} --config X {form}" for form in usage),
        f"python -m {PROG} diff A.yaml B.yaml [--json]",
    ]
    parser = _PlanParser(
        prog=f"python -m {PROG}",
        usage="\n       ".join(lines),
        description="Print the plan of a run, advice on questionable settings, and the predicted memory per "
        "GPU;\n"
        "with --gpu also whether the plan fits and how fast it is. Needs no GPU and starts no "
        "processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, flag = parser.add_argument, "store_true"
    add_config_option(parser)
    how_many = parser.add_mutually_exclusive_group(required=True).add_argument
    how_many("--gpus", type=positive, metavar="N", help="processes of the run, one per GPU")
    add_node_option(parser)
    add(
        "--gpu",
        metavar="KIND",
        help=f"kind of machine, to predict time and whether the plan fits: {', '.join(load_hardware())}; or "
        "here: this machine, which measures itself once, for up to a minute",
    )
    add(
        "--tokens",
        type=number_from(1),
        metavar="T",
        help="print the time to train on this many tokens, as 1e12 (needs --gpu)",
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
        "and memory with the prediction; exit code 1 if a difference is above its limit",
    )
    how_many(
        "--min-gpus",
        action=flag,
        help="find the fewest GPUs that the run fits on, a power of two, and plan for them (needs --gpu)",
    )
    how_many(
        "--sweep",
        metavar="gpus=A..B",
        help="plan for A GPUs, 2A, 4A, ... up to B, to show how the run scales (needs --gpu)",
    )
    add(
        "--compare",
        action=flag,
        help="compare DDP, FSDP and HSDP for this training: memory by kind, predicted "
        "and measured in a simulation",
    )
    add(
        "--json",
        action=flag,
        help="print one JSON document: plan, reasons, advice, predicted {peak_memory_gib, reserved_gib, "
        "memory and memory_at_peak by kind in GiB, step_time_s, compute_s, exposed_comm_s, host_bound_s, "
        "tokens_per_s_per_gpu, mfu, "
        "mfu_causal, fits; values that need --gpu are null without it}, with plan=auto candidates, and if "
        "requested time_to_train, min_gpus, "
        "sweep, check",
    )
    return parser


def make_diff_parser() -> argparse.ArgumentParser:
    """Return the parser of `diff`."""
    parser = _PlanParser(
        prog=f"python -m {PROG} diff",
        description="List the differences between two plan files.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A.yaml", help="a plan file, such as plan.yaml of a run")
    parser.add_argument("b", metavar="B.yaml", help="another")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: same, and differences {key, a, b}",
    )
    return parser


def read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, TrainingJob]:
    """Return a command line's options, and the training. ConfigError for unknown or conflicting ones."""
    options, keys = make_parser().parse_known_args(arguments)
    _check_names(keys)
    options.config_arguments = config_arguments(options, keys, PROG)
    job = parse_config(options.config_arguments, PROG).job
    _check_together(options, job)
    return options, job


def _check_names(config_arguments: Sequence[str]) -> None:
    """Refuse unknown options: one without a dot is not a config key."""
    known = [name for action in make_parser()._actions for name in action.option_strings]
    for argument in config_arguments:
        name = argument.split("=")[0]
        if name.startswith("--") and "." not in name and name != "--print_config":
            raise ConfigError(f"unknown option {name}.{nearest(name, known) or ' See -h for all options.'}")


def _check_together(options: argparse.Namespace, job: TrainingJob) -> None:
    """Refuse options that conflict, or that need another one."""
    for option, (refused, reason) in CONFLICTS.items():
        for name in refused if getattr(options, option) else ():
            if getattr(options, name):
                raise ConfigError(
                    f"{_option(name)}: not available with --{option}, {reason}: remove the option"
                )
    plan, kinds = job.parallel.plan, ", ".join(load_hardware())
    from_file = plan not in ("auto", "manual")
    for name in NEED_GPU:
        if getattr(options, name) and not options.gpu:
            raise ConfigError(f"{_option(name)} needs --gpu KIND, one of {kinds}, or --gpu here")
        if getattr(options, name) and from_file and name in ("min_gpus", "sweep"):
            raise ConfigError(
                f"{_option(name)}: parallel.plan={plan} is a file for one number of GPUs: use auto or manual"
            )
    if plan == "auto" and not options.gpu and not options.compare:
        raise ConfigError(
            f"parallel.plan=auto needs --gpu KIND to predict memory and speed, one of {kinds}, here"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    run_tool(main)
