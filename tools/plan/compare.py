"""Compare DDP, FSDP and HSDP for one training, predicted and simulated (`--compare`)."""

import dataclasses
import itertools
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run, total_by_axis
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

COMPARED = {"no_shard": "DDP", "full_shard": "FSDP", "hybrid_shard": "HSDP"}
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def compare_strategies(job: TrainingJob, world_size: int, gpus_per_node: int) -> dict[str, Any]:
    """Plan and simulate the training under each strategy. Return plain data: strategy -> mesh, predicted and
    measured {peak_memory_gib, memory in GiB}, totals of collectives. `measured` is the simulation.

    The config's data-parallel degrees and resharding are ignored. HSDP shards within a node. If all processes
    share one node, each half of it counts as a node.
    """
    for key, default in (("plan", "manual"), ("strategy", None)):
        if (requested := getattr(job.parallel, key)) != default:
            raise ConfigError(
                f"parallel.{key}={requested}: --compare makes a plan for each strategy: remove the key"
            )
    node = gpus_per_node if gpus_per_node < world_size else max(world_size // 2, 1)
    compared = {}
    for name in COMPARED:
        under = _with_strategy(job, name)
        plan = plan_run(under, world_size, node)
        simulation = simulate_run(under, plan)
        sides = {"predicted": predict_memory(under, plan), "measured": simulation}
        compared[name] = {
            "mesh": dataclasses.asdict(plan.mesh),
            **{
                side: {"peak_memory_gib": m.peak_bytes / GIB, "memory": m.memory.gib()}
                for side, m in sides.items()
            },
            "collectives": total_by_axis(simulation.collectives),
        }
    return compared


def as_text(compared: dict[str, Any]) -> str:
    """Return a table and notes on its columns."""
    names = list(itertools.product(COMPARED, ("predicted", "measured")))
    sides = [compared[name][side] for name, side in names]
    head = ["GiB per GPU", *(f"{COMPARED[name]} {side}" for name, side in names)]
    rows = [[kind, *(_gib(side["memory"][kind]) for side in sides)] for kind in sides[0]["memory"]]
    rows.append(["total", *(_gib(side["peak_memory_gib"]) for side in sides)])
    for op in OPS:
        totals = [each["collectives"] for each in compared.values()]
        moved = [sum(total["bytes"] for total in of_run if total["op"] == op) for of_run in totals]
        rows.append([op, *(cell for size in moved for cell in ("", _gib(size / GIB)))])
    notes = [
        f"{short}: {describe_strategy(name, MeshPlan(**compared[name]['mesh']))}"
        for name, short in COMPARED.items()
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


def _gib(value: float) -> str:
    return f"{value:10.2f}"
