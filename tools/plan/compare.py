"""Compare DDP, FSDP and HSDP for one training, predicted and simulated (`--compare`)."""

import dataclasses
import json
from typing import Any

from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.simulate.simulator import Simulation
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run, total_by_axis
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

COMPARED = {"no_shard": "DDP", "full_shard": "FSDP", "hybrid_shard": "HSDP"}
OPS = ("all_gather", "reduce_scatter", "all_reduce")


# by name of a strategy: its plan, the predicted memory, and the simulation of its step
Compared = dict[str, tuple[Plan, StepMemory, Simulation]]


def compare_strategies(job: TrainingJob, world_size: int, gpus_per_node: int) -> Compared:
    """Plan and simulate the training under each strategy. The config's data-parallel degrees and resharding
    are ignored.

    HSDP shards within a node. If all processes share one node, each half of it counts as a node.
    """
    for key, default in (("plan", "manual"), ("strategy", None)):
        if (requested := getattr(job.parallel, key)) != default:
            raise ConfigError(
                f"parallel.{key}={requested}: --compare makes a plan for each strategy: remove the key"
            )
    node = gpus_per_node if gpus_per_node < world_size else max(world_size // 2, 1)
    compared = Compared()
    for name in COMPARED:
        under = _with_strategy(job, name)
        plan = plan_run(under, world_size, node)
        compared[name] = plan, predict_memory(under, plan), simulate_run(under, plan)
    return compared


def comparison_json(compared: Compared) -> str:
    """Return a JSON document: strategy -> mesh, predicted and measured {peak_memory_gib, memory in GiB},
    totals of collectives. `measured` is the simulation."""
    return json.dumps({name: _plain(*strategy) for name, strategy in compared.items()}, indent=2)


def comparison_text(compared: Compared) -> str:
    """Return a table and notes on its columns."""
    head = [
        "GiB per GPU",
        *(f"{short} {side}" for short in COMPARED.values() for side in ("predicted", "measured")),
    ]
    sides = [side for _, *sides in compared.values() for side in sides]
    simulations = [simulation for *_, simulation in compared.values()]
    by_kind = [side.memory.gib() for side in sides]
    rows = [[kind, *(_gib(gib[kind]) for gib in by_kind)] for kind in by_kind[0]]
    rows.append(["total", *(_gib(side.peak_bytes / GIB) for side in sides)])
    for op in OPS:
        moved = [sum(c.bytes for c in s.collectives if c.op == op) for s in simulations]
        rows.append([op, *(cell for size in moved for cell in ("", _gib(size / GIB)))])
    notes = [
        f"{COMPARED[name]}: {describe_strategy(name, plan.mesh)}" for name, (plan, *_) in compared.items()
    ]
    notes += [
        "predicted: compiled as configured, from the compiler's graphs. measured: all storages of one rank "
        "in a simulated eager step. Each kind is shown at its own maximum, the total at the common peak, "
        "without allocator overhead. The last rows are the bytes of one rank's collectives per step."
    ]
    return "\n\n".join([format_table(head, rows), "\n".join(notes)])


def _with_strategy(job: TrainingJob, strategy: str) -> TrainingJob:
    parallel = dataclasses.replace(
        job.parallel,
        plan="manual",
        strategy=strategy,
        dp_replicate="auto",
        dp_shard="auto",
        reshard_after_forward="auto",
    )
    return dataclasses.replace(job, parallel=parallel)


def _plain(plan: Plan, predicted: StepMemory, simulation: Simulation) -> dict[str, Any]:
    sides = {
        name: {"peak_memory_gib": side.peak_bytes / GIB, "memory": side.memory.gib()}
        for name, side in (("predicted", predicted), ("measured", simulation))
    }
    totals = total_by_axis(simulation.collectives)
    return {"mesh": dataclasses.asdict(plan.mesh), **sides, "collectives": totals}


def _gib(value: float) -> str:
    return f"{value:10.2f}"
