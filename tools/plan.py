"""`python -m tools.plan --config X --gpus N`: the plan of a run and its memory, without a GPU or a process group.

`--compare` puts DDP, FSDP and HSDP of the same training side by side. `python -m tools.plan diff A.yaml B.yaml` says what
differs between two plan files.
"""

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.advice import advise, unused_keys
from parallel.plan import Plan, PlanError
from parallel.plan_file import load_plan, plan_to_dict, plan_to_table
from parallel.planner.hardware import Hardware, load_hardware
from parallel.planner.memory import MemoryEstimate
from parallel.strategy import describe_strategy
from tools.command import format_table, positive, run_tool
from tools.compare_strategies import compare_strategies, comparison_json, comparison_text
from tools.plan_diff import diff_plans, in_words
from train.config import ConfigError, parse_config
from train.fits import GIB, check_fits, predict_memory
from train.planning import plan_run

PROG = "tools.plan"


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, or compare two plans. Raises ConfigError and PlanError."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["diff"]:
        compare_files(make_diff_parser().parse_args(arguments[1:]))
    else:
        options, config_arguments = make_parser().parse_known_args(arguments)
        show = show_comparison if options.compare else show_plan
        show(options, [f"--config={options.config}", *config_arguments])


def make_parser() -> argparse.ArgumentParser:
    """Options of planning; every key of the config is accepted besides."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}",
        usage=f"python -m {PROG} --config X --gpus N [--gpus-per-node N] [--gpu KIND] [--json] [--section.key=value ...]\n"
        f"       python -m {PROG} --config X --gpus N --compare [--gpus-per-node N] [--json] [--section.key=value ...]\n"
        f"       python -m {PROG} diff A.yaml B.yaml [--json]",
        description="Print the plan of a run, advice where it makes little sense, the memory it is predicted to need per GPU, "
        "and whether that fits. "
        "Needs no GPU and starts no processes.",
        epilog="Every config key is accepted too, as --section.key=value, and wins over the file: for example "
        "--parallel.activation_checkpoint=full or --train.micro_batch_size=2. `python -m train.main -h` documents them all. "
        "`diff` says what differs between two plan files, such as the plan.yaml of two runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="X", help="YAML file: a path, or a name in configs/, as llama_8b.yaml")
    parser.add_argument("--gpus", required=True, type=positive, metavar="N", help="processes of the run, one per GPU")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs that share a node, for hybrid "
                        "strategies and advice: 8 unless given, and never more than --gpus")  # fmt: skip
    parser.add_argument("--gpu", metavar="KIND", help="say whether the plan fits this kind of GPU, and if not what would: "
                        f"{', '.join(load_hardware())}")  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="instead, put DDP, FSDP and HSDP of this training side by side: "
                        "memory by kind, predicted and measured in a simulation")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document: plan, advice (sentences), and predicted "
                        "{peak_memory_gib, memory by kind in GiB, fits (null without --gpu)}")  # fmt: skip
    return parser


def make_diff_parser() -> argparse.ArgumentParser:
    """Options of comparing."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG} diff", description="Say in words what differs between two plan files.", allow_abbrev=False
    )
    parser.add_argument("a", metavar="A.yaml", help="a plan file, such as plan.yaml of a run")
    parser.add_argument("b", metavar="B.yaml", help="another")
    parser.add_argument("--json", action="store_true", help="print one JSON document: same, and differences {where, key, a, b}")
    return parser


def show_plan(options: argparse.Namespace, config_arguments: Sequence[str]) -> None:
    """Print plan, memory and verdict. A plan that does not fit is an answer, not an error."""
    config = parse_config(config_arguments, PROG)
    hardware = find_gpu(options.gpu) if options.gpu else None
    per_node = min(options.gpus_per_node, options.gpus)
    plan = plan_run(config, options.gpus, per_node)
    advice = [*advise(plan, per_node), *unused_keys(config.parallel)]
    memory = predict_memory(config, plan)
    too_much = ""
    if hardware is not None:
        try:
            check_fits(config, plan, int(hardware.memory_gib * GIB), hardware.name)
        except PlanError as error:
            too_much = str(error)
    if options.json:
        fits = None if hardware is None else not too_much
        document = {"plan": plan_to_dict(plan), "advice": advice, "predicted": predicted(memory, fits)}
        print(json.dumps(document, indent=2))
    else:
        said = [describe_strategy(config.parallel.strategy, plan.mesh)] if config.parallel.strategy else []
        said += [f"advice: {sentence}" for sentence in advice]
        print(plan_text(plan, said, memory, hardware, too_much))


def show_comparison(options: argparse.Namespace, config_arguments: Sequence[str]) -> None:
    """Print DDP, FSDP and HSDP of the same training side by side."""
    if options.gpu:
        raise ConfigError(f"--gpu={options.gpu}: --compare says what each strategy needs, not whether it fits: leave it out")
    compared = compare_strategies(parse_config(config_arguments, PROG), options.gpus, options.gpus_per_node)
    print(comparison_json(compared) if options.json else comparison_text(compared))


def predicted(memory: MemoryEstimate, fits: bool | None) -> dict[str, Any]:
    """The prediction as plain data, memory in GiB."""
    return {"peak_memory_gib": memory.total / GIB, "memory": _by_kind_gib(memory), "fits": fits}


def plan_text(plan: Plan, said: Sequence[str], memory: MemoryEstimate, hardware: Hardware | None, too_much: str) -> str:
    """Plan, what is `said` of it, memory and verdict for people; `too_much`: why the plan does not fit, and what would."""
    rows = [(kind, f"{size:8.2f}") for kind, size in _by_kind_gib(memory).items()]
    parts = ["\n".join([plan_to_table(plan), *said]),
             format_table(("memory", "GiB per GPU"), [*rows, ("total", f"{memory.total / GIB:8.2f}")])]  # fmt: skip
    if too_much:
        parts.append(f"does not fit: {too_much}")
    elif hardware is not None:
        parts.append(f"fits {hardware.name}: {memory.total / GIB:.1f} of {hardware.memory_gib:.1f} GiB")
    return "\n\n".join(parts)


def find_gpu(name: str) -> Hardware:
    """A kind of GPU from configs/hardware. ConfigError names the nearest."""
    kinds = load_hardware()
    if name not in kinds:
        near = [kind for kind in kinds if kind.startswith(name)] or difflib.get_close_matches(name, kinds, n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--gpu={name}: there is no configs/hardware/{name}.yaml. {hint}Known: {', '.join(kinds)}")
    return kinds[name]


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


def _by_kind_gib(memory: MemoryEstimate) -> dict[str, float]:
    return {kind: size / GIB for kind, size in dataclasses.asdict(memory).items()}


if __name__ == "__main__":
    run_tool(main)
