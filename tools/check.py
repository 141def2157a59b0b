"""`python -m tools.check --model.factory=MODULE:FUNCTION`: prove that a model of yours, sharded, computes
what it does unsharded.

The function returns the model, or the model and an example of its arguments if these are not only tokens,
`return model, {"input_ids": ids}`, and if you like a loss, a function of outputs and example, to be told
whether it is a sum or a mean. It may build the model on the meta device.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.fsdp import Gradients
from meshwright.parallel.model.check import check
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.inputs import tokens_of
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import CP_EXCHANGES, DTYPES
from meshwright.parallel.plan.serialize import plan_to_table
from meshwright.tools.cli import new_parser, parse_with_keys, run_tool, to_json
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import OwnModel, call_factory

DESCRIPTION = """example:
  python -m tools.check --model.factory=mine:build --model.args.layers=2 --tp 2

Compare a model, sharded, recomputed and compiled on 2 to 16 processes of this CPU, with the unsharded one:
outputs and every gradient.
"""
PREFIX = "--model."
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}  # and their defaults


def main(arguments: Sequence[str] | None = None) -> None:
    """Check a model and print what differs; exit code 1 if something does.

    Raises ConfigError and PlanError.
    """
    options, keys = parse_with_keys(make_parser(), arguments)
    made, described = build(options.factory, keys)
    degrees = {axis: getattr(options, axis) for axis in DEGREES}
    config = ParallelConfig(
        **degrees,
        cp_exchange=options.cp_exchange,
        activation_checkpoint=options.activation_checkpoint,
        param_dtype=options.param_dtype,
        compile=CompileConfig(
            enabled=options.backend != "none",
            backend=options.backend if options.backend != "none" else "inductor",
            fullgraph=not options.graph_breaks,
        ),
    )
    world_size = math.prod(degrees.values())
    batch = options.accumulation * options.dp_replicate * options.dp_shard
    units = describe(made.module, made.example, **described)
    shape = RunShape(world_size, world_size, max(1, tokens_of(made.example)), global_batch_size=batch)
    plan = make_plan(config, units, shape)
    if not options.json:
        print(plan_to_table(plan), flush=True)
        if plan.mesh.tp > 1:
            print(f"tp={plan.mesh.tp} splits {units.tp_share:.0%} of the parameters", flush=True)
    report = check(made.module, plan, made.example, made.loss, gradients=options.gradients)
    print(to_json(dataclasses.asdict(report) | {"same": report.same}) if options.json else report)
    if not report.same:
        sys.exit(1)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("check", "--model.factory MODULE:FUNCTION", DESCRIPTION)
    add = parser.add_argument
    add(
        "--model.factory",
        dest="factory",
        required=True,
        metavar="MODULE:FUNCTION",
        help="function that returns the model, and an example of its arguments (default: tokens) and a loss",
    )
    for axis, default in DEGREES.items():
        add(f"--{axis}", type=int, default=default, metavar="N", help=f"degree: 1 or 2 (default {default})")
    add("--cp_exchange", choices=("auto", *CP_EXCHANGES), default="auto", help="as parallel.cp_exchange")
    add("--accumulation", type=int, default=1, metavar="N", help="micro batches: 1 (default) or 2")
    add("--gradients", choices=get_args(Gradients), default="sum", help="as for apply_plan (default sum)")
    add("--param_dtype", choices=DTYPES, default="bfloat16", help="must run too (default bfloat16)")
    add(
        "--activation_checkpoint",
        choices=("none", "full", "selective", "offload"),
        default="full",
        help="recomputation or offload to check (default full)",
    )
    add("--backend", default="inductor", help="of torch.compile (default inductor); none: eager only")
    add("--graph_breaks", action="store_true", help="allow them in blocks (compile.fullgraph=false)")
    add("--json", action="store_true", help="print one JSON document")
    parser.epilog = (
        f"{PREFIX}args.KEY=VALUE are arguments of the function, as YAML; {PREFIX}blocks, units, unsharded "
        "and styles are as in a config: python -m train.main -h model."
    )
    return parser


def build(factory: str, arguments: Sequence[str]) -> tuple[OwnModel, Mapping[str, Any]]:
    """Call the factory, and return what it does and the options of `describe`. Raises ConfigError for an
    argument that is not below `PREFIX`, if there is no such function, and if it returns something else."""
    if unknown := [each for each in arguments if not each.startswith(PREFIX)]:
        raise ConfigError(f"unknown argument {unknown[0]}: see python -m tools.check -h")
    config = parse_config([f"--model.factory={factory}", *arguments]).model
    return call_factory(config, values=True), config.described


if __name__ == "__main__":
    run_tool(main)
