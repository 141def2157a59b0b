"""`python -m tools.simulate --config X --world-size N`: one step of one rank of a run of N processes.

The real model, optimizer and training step run in one process on a fake process group with fake tensors. The
tool prints the collectives that the rank issues, in order, and its memory by kind. It needs no GPU and little
memory.
"""

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.float8 import precomputes_scales, scale_weights
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.model.materialize import allocate
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.parallel.simulate.simulator import Simulation, TrainingCode, simulate
from meshwright.tools.cli import (
    add_config_option,
    add_node_option,
    format_table,
    natural,
    new_parser,
    parse_with_keys,
    positive,
    run_tool,
)
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sequences import Batch
from meshwright.train.data.training_data import make_batch_shape
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import with_newton_schulz_dtype
from meshwright.train.planning.resolve import plan_run
from meshwright.train.training import Training, describe_plan, fill_training, shard_model

FIRST = 24  # collectives shown without --all
DESCRIPTION = """examples:
  python -m tools.simulate --config llama_8b.yaml --world-size 64
  python -m tools.simulate --config llama_8b.yaml --world-size 64 --parallel.tp=8 --json

Run one optimizer step of one rank with the real code on a fake process group
and fake tensors, and print its collectives and its memory by kind. Needs no
GPU and starts no processes. Config keys override the file. Nothing is compiled
in a simulation: activations are those of eager operations, everything else is
as in a compiled run.
"""
NO_BUDGET = (
    "activation_checkpoint=budget needs the compiler, but a simulation is eager: activations are those of "
    "activation_checkpoint=none."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse arguments, simulate, print. Raises ConfigError and PlanError."""
    options, of_config = parse_with_keys(make_parser(), arguments)
    config = parse_config(of_config)
    if not options.rank < options.world_size:
        raise ConfigError(f"--rank={options.rank} must be less than --world-size={options.world_size}")
    plan = plan_run(config.job, options.world_size, options.gpus_per_node)
    simulation = simulate_run(config.job, plan, options.rank)
    if options.json:
        print(json.dumps(as_json(simulation), indent=2))
    else:
        print(as_text(simulation, config.job, plan, options.rank, None if options.all else FIRST))


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("simulate", "--config X --world-size N [--section.key=value ...]", DESCRIPTION)
    add = parser.add_argument
    add_config_option(parser)
    add("--world-size", required=True, type=positive, metavar="N", help="processes of the run, one per GPU")
    add_node_option(parser)
    add("--rank", type=natural, default=0, metavar="R", help="the rank to simulate (default 0)")
    add("--all", action="store_true", help=f"show every collective, not only the first {FIRST}")
    document = (
        "print one JSON document: collectives in order {op, axis, unit, phase, bytes}, totals per op and "
        "axis {count, bytes}, memory by kind in GiB (the maximum of each during the step), peak_memory_gib, "
        "memory_at_peak, host_memory_gib"
    )
    add("--json", action="store_true", help=document)
    return parser


def simulate_run(job: TrainingJob, plan: Plan, rank: int = 0) -> Simulation:
    """Simulate one optimizer step of `rank` of the job under `plan`."""
    job = with_newton_schulz_dtype(job, plan)
    sharded, training = list[ShardedModel](), list[Training]()

    def shard(plan: Plan, mesh: DeviceMesh) -> nn.Module:
        sharded.append(shard_model(job, plan, mesh))
        return sharded[0].model

    def fill(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
        training.append(fill_training(sharded[0], job, allocate))
        if precomputes_scales(plan):  # as after the first step
            scale_weights(model)
        return training[0].optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, group: Any) -> None:
        tokens = torch.zeros(plan.micro_batch_size, job.seq_len, dtype=torch.int64)
        # one document per sequence, which has the most attention blocks
        first = tokens.clone() if job.document_mask else None
        batches = [Batch(tokens.clone(), tokens.clone(), first) for _ in range(plan.accumulation)]
        training[0].step([*map(make_batch_shape(plan, sharded[0].mesh).local_tokens, batches)])

    return simulate(plan, TrainingCode(shard, fill, step, model_of(job.model).logits), rank)


def as_json(simulation: Simulation) -> dict[str, Any]:
    """Return the simulation as plain data, with memory in GiB."""
    return {
        "collectives": [dataclasses.asdict(collective) for collective in simulation.collectives],
        "totals": total_by_axis(simulation.collectives),
        "memory": simulation.memory.gib(),
        "peak_memory_gib": simulation.peak_bytes / GIB,
        "memory_at_peak": simulation.at_peak.gib(),
        "host_memory_gib": simulation.host_bytes / GIB,
    }


def as_text(simulation: Simulation, job: TrainingJob, plan: Plan, rank: int, first: int | None) -> str:
    """Return the plan, totals, memory and the first `first` collectives (None: all) as text."""
    parts = [f"rank {rank} of {plan.mesh.world_size}, one optimizer step", describe_plan(job, plan)]
    parts.append(totals_table(total_by_axis(simulation.collectives)))
    parts.append(memory_table(simulation))
    if simulation.host_bytes:
        parts.append(
            f"in host memory (cpu_offload): {simulation.host_bytes / GIB:.2f} GiB of parameters, gradients "
            "and optimizer state"
        )
    if any(unit.activation_checkpoint == "budget" for unit in plan.units):
        parts.append(f"note: {NO_BUDGET}")
    if shown := simulation.collectives[:first]:
        cells = [
            (str(number), c.op, c.axis, c.unit, c.phase, f"{c.bytes / 2**20:10.3f}")
            for number, c in enumerate(shown, 1)
        ]
        parts.append(format_table(("#", "op", "axis", "unit", "phase", "MiB"), cells))
    if len(shown) < len(simulation.collectives):
        parts[-1] += f"\n... {len(simulation.collectives) - len(shown)} more (--all shows them)"
    return "\n\n".join(parts)


def memory_table(memory: StepMemory) -> str:
    """Return a table of the maximum of each memory kind, and of its size at the peak of the sum."""
    digits = 2 if memory.peak_bytes >= GIB else 4
    at_peak = memory.at_peak.gib()
    rows = [
        (kind, f"{gib:8.{digits}f}", f"{at_peak[kind]:8.{digits}f}")
        for kind, gib in memory.memory.gib().items()
    ]
    total = ("total", "", f"{memory.peak_bytes / GIB:8.{digits}f}")
    return format_table(("memory", "most GiB", "GiB at the peak"), [*rows, total])


def total_by_axis(collectives: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the number and the bytes of collectives, which have op, axis and bytes, for each op and axis,
    most bytes first."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for each in collectives:
        counts[each.op, each.axis] += 1
        sizes[each.op, each.axis] += each.bytes
    return [
        {"op": op, "axis": axis, "count": counts[op, axis], "bytes": size}
        for (op, axis), size in sizes.most_common()
    ]


def totals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of `total_by_axis` as a table."""
    cells = [(t["op"], t["axis"], str(t["count"]), f"{t['bytes'] / GIB:9.3f}") for t in rows]
    return format_table(("collectives", "axis", "count", "GiB"), cells) if cells else "no collectives"


if __name__ == "__main__":
    run_tool(main)
