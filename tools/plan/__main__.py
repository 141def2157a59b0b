"""`python -m tools.plan --config X --gpus N`: print the plan of a run and predict its memory and speed,
without a GPU or a process group.

With `--parallel.plan=auto` the planner chooses the plan. `--min-gpus` finds the fewest GPUs, `--days` the
fewest that are in time, `--sweep` plans for a range of them, and `--check` compares the prediction with the
real code. `--compare` compares DDP, FSDP and HSDP. `tools.plan diff A.yaml B.yaml` compares two plan files;
`tools.plan --gpu list` lists the machines.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from meshwright.parallel.plan.serialize import diff_plans, load_plan
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.cli import (
    add_config_option,
    add_node_option,
    number_from,
    parse_with_keys,
    positive,
    run_tool,
)
from meshwright.tools.plan.kinds import list_kinds
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
    if show_kinds(arguments):
        return
    options, job = read_options(arguments)
    from meshwright.tools.plan import show  # late: -h and mistakes are answered before torch is imported

    if options.compare:
        show.show_comparison(options, job)
    elif options.sweep:
        show.show_sweep(options, job)
    elif show.show_plan(options, job):
        sys.exit(EXIT_DIFFERS)


def show_kinds(arguments: Sequence[str]) -> bool:
    """Print the kinds of machines if the arguments are those of --gpu list, and return whether they are."""
    parser = _PlanParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu")
    parser.add_argument("--json", action="store_true")
    options, others = parser.parse_known_args(arguments)
    if options.gpu != LIST:
        return False
    if others:
        raise ConfigError(f"--gpu {LIST} prints all kinds, without a plan: remove {' '.join(others)}")
    print(list_kinds(options.json))
    return True


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


PROG, LIST = "tools.plan", "list"
HOW_MANY = ("min_gpus", "days", "sweep")  # which search for a number of GPUs
NEED_GPU = ("tokens", "timeline", *HOW_MANY)
NEED_TOKENS = ("days", "price")
OF_ONE_PLAN = ("save", "timeline", "check")
# options -> those that they refuse, and why
CONFLICTS = {
    "compare": (
        ("gpu", "tokens", "price", *HOW_MANY, *OF_ONE_PLAN),
        "which shows only the memory and the collectives of each strategy",
    ),
    "sweep": (OF_ONE_PLAN, "which makes several plans (one with --gpus)"),
}
EXAMPLES = """\
  the best plan of a 70B model on 256 GPUs, with reasons; and how it scales:
    python -m tools.plan --config llama_70b --gpus 256 --gpu h100-sxm \\
        --parallel.plan=auto --tokens 1e12
    python -m tools.plan --config llama_70b --gpu h100-sxm --sweep gpus=8..4096
  save a plan, and run it:
    python -m tools.plan --config llama_8b --gpus 8 --gpu h100-sxm --save p.yaml
    torchrun --nproc-per-node 8 -m train.main --config llama_8b \\
        --parallel.plan=p.yaml
  the fewest GPUs; in 30 days, and what that costs; the best plan for this machine:
    python -m tools.plan --config llama_405b --gpu h200 --min-gpus
    python -m tools.plan --config llama_8b --gpu h200 --tokens 1e12 --days 30 --price 2
    python -m tools.plan --config llama_debug --gpus 2 --gpu here \\
        --parallel.plan=auto
  compare a prediction with the real code; the plans of two runs:
    python -m tools.plan --config llama_8b --gpus 64 --check
    python -m tools.plan diff runs/a/plan.yaml runs/b/plan.yaml

Every key of train.main is an option, --section.key=value. With
--parallel.plan=auto the planner chooses those that are left at auto."""


class _PlanParser(argparse.ArgumentParser):
    """A parser that raises ConfigError with one line, as all other checks do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. See python -m {PROG} -h")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; config keys are accepted in addition."""
    parser = _PlanParser(
        prog=f"python -m {PROG}",
        usage=f"python -m {PROG} --config X --gpus N [--gpu KIND] [OPTION ...]",
        description=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, flag = parser.add_argument, "store_true"
    add_config_option(parser)
    how_many = parser.add_mutually_exclusive_group(required=True).add_argument
    how_many("--gpus", type=positive, metavar="N", help="processes of the run, one per GPU")
    how_many("--min-gpus", action=flag, help="the fewest, a power of two, that the run fits on")
    how_many("--days", type=number_from(0.01), metavar="D", help="the fewest for --tokens in D days")
    how_many("--sweep", metavar="gpus=A..B", help="a line for A GPUs, 2A, 4A, ... up to B")
    add_node_option(parser)
    kinds = ", ".join(load_hardware())
    add("--gpu", metavar="KIND", help=f"predict time, and whether it fits: {kinds}, here; {LIST}: print them")
    add("--uncorrected", action=flag, help="with --gpu here: leave out what this machine's runs correct")
    add("--tokens", type=number_from(1), metavar="T", help="time to train on as many, as 1e12")
    add("--price", type=number_from(0.01), metavar="P", help="of a GPU hour: what --tokens cost")
    add("--save", type=Path, metavar="FILE", help="write the plan, for --parallel.plan=FILE")
    add("--timeline", type=Path, metavar="FILE", help="a step as .svg, .png or .json (ui.perfetto.dev)")
    add("--check", action=flag, help="run the real code of one rank; exit code 1 if it differs")
    add("--compare", action=flag, help="memory and collectives of DDP, FSDP and HSDP")
    add("--json", action=flag, help="one JSON document, in GiB and seconds (docs/plan.md)")
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
    options, of_config = parse_with_keys(make_parser(), arguments)
    options.config_arguments = of_config
    job = parse_config(of_config).job
    _check_together(options, job)
    return options, job


def _check_together(options: argparse.Namespace, job: TrainingJob) -> None:
    """Refuse options that conflict, or that need another one."""
    for option, (refused, reason) in CONFLICTS.items():
        for name in refused if getattr(options, option) else ():
            if getattr(options, name):
                raise ConfigError(
                    f"{_option(name)}: not available with --{option}, {reason}: remove the option"
                )
    plan, kinds = job.parallel.plan, ", ".join([*load_hardware(), f"here (--gpu {LIST} describes them)"])
    if options.gpu == "":
        raise ConfigError(f"--gpu has no value: use one of {kinds}, or omit it")
    if options.uncorrected and options.gpu != "here":
        raise ConfigError("--uncorrected needs --gpu here: no other machine has runs to correct it")
    from_file = plan not in ("auto", "manual")
    for name in NEED_GPU:
        if getattr(options, name) and not options.gpu:
            raise ConfigError(f"{_option(name)} needs --gpu KIND, one of {kinds}")
        if getattr(options, name) and from_file and name in HOW_MANY:
            raise ConfigError(
                f"{_option(name)}: parallel.plan={plan} is a file for one number of GPUs: use auto or manual"
            )
    for name in NEED_TOKENS:
        if getattr(options, name) and not options.tokens:
            raise ConfigError(f"{_option(name)} needs --tokens T, the number to train on, such as 1e12")
    if plan == "auto" and not options.gpu and not options.compare:
        raise ConfigError(f"parallel.plan=auto needs --gpu KIND to predict memory and speed, one of {kinds}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    run_tool(main)
