"""`python -m tools.check --model.factory=MODULE:FUNCTION`: prove that a model of yours computes what it does
unsharded, sharded as a plan says or by a function of yours (`--sharded`).

The function returns the model, or the model and an example of its arguments if these are not only tokens,
`return model, {"input_ids": ids}`, and if you like a loss, a function of outputs and example, to be told
whether it is a sum or a mean. It may build the model on the meta device.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.parallel.check.check import check
from meshwright.parallel.check.foreign import check_sharding, clean
from meshwright.parallel.check.kinds import TOLERANCE
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import LR, Subject
from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.fsdp import Gradients
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.inputs import tokens_of
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import CP_EXCHANGES, DTYPES, MeshPlan
from meshwright.parallel.plan.serialize import plan_to_table
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.tools.cli import new_parser, number_from, parse_with_keys, positive, run_tool, to_json
from meshwright.tools.plan.export import check_target, write_atomically
from meshwright.train.config import Config, OptimConfig
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import call_factory
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.user_code import allow, find

DESCRIPTION = """example:
  python -m tools.check --model.factory=mine:build --model.args.layers=2 --tp 2
  python -m tools.check --model.factory=mine:build --sharded=mine:shard --dp_shard 2
  python -m tools.check --model.factory=mine:build --optimizer muon

Compare a model, sharded, recomputed and compiled on 2 to 16 processes of this CPU, with the unsharded one:
outputs and every gradient. With --sharded it is not our plan that is checked but your function, whatever it
shards with, and with --step your training loop. With --optimizer two steps with the same gradients are
compared too: docs/proof.md.
"""
PREFIX, OPTIM = "--model.", "--optim."
OF_PLAN = (
    *("cp_exchange", "accumulation", "gradients", "param_dtype", "activation_checkpoint", "backend"),
    "graph_breaks",
)
OF_SHARDED = ("step", "device", "equal_rows", "tolerance")
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}  # and their defaults


def main(arguments: Sequence[str] | None = None) -> None:
    """Check a model and print what differs; exit code 1 if something does.

    Raises ConfigError and PlanError.
    """
    parser, early = make_parser(), argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--junit", type=Path, nargs="?")
    if junit := early.parse_known_args(arguments)[0].junit:  # before a mistake: an old report may say "same"
        check_target("--junit", junit, (".xml",), overwrites=True).unlink(missing_ok=True)
    options, keys = parse_with_keys(parser, arguments)
    plan_only = [name for name in OF_PLAN if getattr(options, name) != parser.get_default(name)]
    if options.sharded and plan_only:
        raise ConfigError(f"--{plan_only[0]} is of a plan, but --sharded shards without one: leave it out")
    of_sharded = [name for name in OF_SHARDED if getattr(options, name) != parser.get_default(name)]
    if of_sharded and not options.sharded:
        raise ConfigError(f"--{of_sharded[0]} needs --sharded=MODULE:FUNCTION, whose sharding is checked")
    report = of_function(options, keys) if options.sharded else of_plan(options, keys)
    if junit:
        write_atomically(junit, report.junit().encode())
    print(to_json(dataclasses.asdict(report) | {"same": report.same}) if options.json else report)
    if not report.same:
        sys.exit(1)


def of_function(options: argparse.Namespace, keys: Sequence[str]) -> CheckReport:
    """Check the sharding of a function of the caller's, and a loop if there is one."""
    config = read_config(options, keys)
    mesh = MeshPlan(**{axis: getattr(options, axis) for axis in DEGREES})
    made = call_factory(config.model, values=True)  # whose errors are told here, and not by a process
    allow(filter(None, (options.sharded, options.step)))
    optimizer = None
    if options.optimizer:
        if options.step:
            raise ConfigError("--optimizer with --step: the loop has an optimizer of its own: leave one out")
        by_kinds = options.optimizer != "adamw"
        units = describe(made.module, made.example, **config.model.described) if by_kinds else None
        optimizer = partial(new_optimizer, config.optim, units.blocks if units else ())
    subject = Subject(
        partial(find("model.factory", options.factory), **config.model.args),
        find("sharded", options.sharded),
        mesh,
        find("step", options.step) if options.step else None,
        device=options.device,
        equal_rows=options.equal_rows,
        optimizer=optimizer,
    )
    return check_sharding(subject, options.tolerance)


def of_plan(options: argparse.Namespace, keys: Sequence[str]) -> CheckReport:
    """Check the plan that the options describe."""
    read = read_config(options, keys)
    made = call_factory(read.model, values=True)
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
    units = describe(made.module, made.example, **read.model.described)
    shape = RunShape(world_size, world_size, max(1, tokens_of(made.example)), global_batch_size=batch)
    plan = make_plan(config, units, shape)
    if not options.json:
        print(plan_to_table(plan), flush=True)
        if plan.mesh.tp > 1:
            print(f"tp={plan.mesh.tp} splits {units.tp_share:.0%} of the parameters", flush=True)
    optimizer = partial(of_sharded_model, read.optim) if options.optimizer else None
    return check(made.module, plan, made.example, made.loss, gradients=options.gradients, optimizer=optimizer)


def of_sharded_model(config: OptimConfig, sharded: ShardedModel) -> torch.optim.Optimizer:
    """Return the optimizer of a model that a plan shards, or with `mesh=None` of its unsharded twin."""
    return new_optimizer(config, sharded.plan.blocks, sharded.model, sharded.mesh)


def new_optimizer(
    config: OptimConfig, blocks: Sequence[str], model: nn.Module, mesh: DeviceMesh | None
) -> torch.optim.Optimizer:
    """Return the optimizer of a model, which wrappers may have given other names, on the mesh over which it
    is sharded, of the same ranks. Raises ConfigError for Muon without blocks, and with parameters on axes
    that this mesh does not have, of which it does not know which rank has which part."""
    allow([config.name])
    while isinstance(model, DistributedDataParallel):
        model = model.module
    sharded = {name: p.device_mesh for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if mesh is not None and config.name == "muon":
        mesh = next((each for each in sharded.values() if each.size() == mesh.size()), mesh)
        for name, of_parameter in sharded.items():
            other = set(of_parameter.mesh_dim_names or ("",)) - set(mesh.mesh_dim_names or ())
            if other:
                raise ConfigError(
                    f"--optimizer=muon: {name} is sharded over {', '.join(other) or 'a mesh without names'}, "
                    "and no parameter over a mesh of all ranks with this axis: shard over the one that the "
                    "function gets"
                )
    found = [name for name, _ in model.named_modules() if clean(name) in blocks]
    if config.name == "muon" and not found:
        raise ConfigError(
            "--optimizer=muon: the model has no blocks, whose matrices Muon updates: name them with "
            f"{PREFIX}blocks"
        )
    return build_optimizer(model, config, blocks=found, mesh=mesh)


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
        text = f"degree, of a plan 1 or 2 (default {default})"
        add(f"--{axis}", type=positive, default=default, metavar="N", help=text)
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
    add(
        "--optimizer",
        metavar="NAME",
        help="compare two steps with the same gradients: adamw, muon, or MODULE:FUNCTION of yours",
    )
    add("--json", action="store_true", help="print one JSON document")
    add("--junit", type=Path, metavar="FILE", help="write the report as a JUnit file, for a CI")
    theirs = parser.add_argument_group("a sharding of your own, in place of a plan")
    theirs.add_argument(
        "--sharded",
        metavar="MODULE:FUNCTION",
        help="function of the model and a DeviceMesh that shards it, by whatever means, and returns it, or "
        "None if in place",
    )
    theirs.add_argument(
        "--step",
        metavar="MODULE:CLASS",
        help="your training loop: made of the sharded model and the mesh (None on one process); its "
        "step(batches) takes an optimizer step; save(folder) and load(folder), if it has them",
    )
    theirs.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo (default) or NCCL")
    theirs.add_argument("--equal_rows", action="store_true", help="all ranks get equally many rows")
    theirs.add_argument(
        "--tolerance", type=number_from(0), default=TOLERANCE, help=f"relative (default {TOLERANCE:g})"
    )
    parser.epilog = (
        f"{PREFIX}args.KEY=VALUE are arguments of the function, as YAML; {PREFIX}blocks, units, unsharded "
        f"and styles, and {OPTIM}KEY=VALUE with --optimizer, are as in a config: python -m train.main -h "
        "model."
    )
    return parser


def read_config(options: argparse.Namespace, arguments: Sequence[str]) -> Config:
    """Return the config of a model and an optimizer from arguments, all below `PREFIX`, and `OPTIM` if an
    optimizer is checked. Raises ConfigError."""
    known = (PREFIX, OPTIM) if options.optimizer else PREFIX
    if unknown := [each for each in arguments if not each.startswith(known)]:
        raise ConfigError(f"unknown argument {unknown[0]}: see python -m tools.check -h")
    of_optimizer = [f"{OPTIM}name={options.optimizer}", f"{OPTIM}lr={LR}"] if options.optimizer else []
    config = parse_config([f"--model.factory={options.factory}", *of_optimizer, *arguments])
    if options.optimizer and ":" in config.optim.name:
        find("optim.name", config.optim.name)  # whose errors are told here, and not by a process
    return config


if __name__ == "__main__":
    run_tool(main)
