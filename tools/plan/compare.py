"""`python -m tools.plan --compare`: DDP, FSDP and HSDP of the same training side by side, predicted and
measured."""

import dataclasses
import json
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.simulate.simulator import Simulation
from meshwright.tools.command import format_table
from meshwright.tools.simulate import simulate_run, totals
from meshwright.train.config import Config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

COMPARED = {"no_shard": "DDP", "full_shard": "FSDP", "hybrid_shard": "HSDP"}
OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True)
class Compared:
    """One strategy: its plan, memory in GiB by kind, predicted by formula and measured in a simulation, and
    the sum or the peak of it."""

    plan: Plan
    predicted: dict[str, float]
    predicted_gib: float
    measured: dict[str, float]
    measured_gib: float
    simulation: Simulation


def compare_strategies(config: Config, world_size: int, gpus_per_node: int) -> dict[str, Compared]:
    """The config's training under each strategy; the config's own degrees of data parallelism and resharding
    give way.

    HSDP shards within a node. Where all processes share one, it takes two halves of it for nodes.
    """
    for key, left_open in (("plan", "manual"), ("strategy", None)):
        if (asked := getattr(config.parallel, key)) != left_open:
            raise ConfigError(
                f"parallel.{key}={asked}: --compare makes the plan of each strategy itself, leave the key out"
            )
    node = gpus_per_node if gpus_per_node < world_size else max(world_size // 2, 1)
    return {name: _compared(_with_strategy(config, name), world_size, node) for name in COMPARED}


def comparison_json(compared: dict[str, Compared]) -> str:
    """One JSON document: strategy -> mesh, predicted and measured {peak_memory_gib, memory in GiB}, totals of
    collectives."""
    return json.dumps({name: _plain(strategy) for name, strategy in compared.items()}, indent=2)


def comparison_text(compared: dict[str, Compared]) -> str:
    """One table, and what its columns are."""
    head = [
        "GiB per GPU",
        *(f"{short} {what}" for short in COMPARED.values() for what in ("predicted", "measured")),
    ]
    strategies = list(compared.values())
    kinds = list(strategies[0].predicted)
    rows = [
        [kind, *(_gib(side[kind]) for s in strategies for side in (s.predicted, s.measured))]
        for kind in kinds
    ]
    rows.append(["total", *(_gib(total) for s in strategies for total in (s.predicted_gib, s.measured_gib))])
    for op in OPS:
        rows.append([op, *(cell for s in strategies for cell in ("", _gib(_moved_gib(s.simulation, op))))])
    notes = [f"{COMPARED[name]}: {describe_strategy(name, s.plan.mesh)}" for name, s in compared.items()]
    notes += [
        "predicted: compiled as asked, from the compiler's own graphs. measured: every storage of one rank "
        "in a simulated "
        "eager step. Each kind at its own maximum, the total at the common peak; no allocator, no fragments. "
        "The last rows "
        "are what one rank's collectives carry in a step."
    ]
    return "\n\n".join([format_table(head, rows), "\n".join(notes)])


def _with_strategy(config: Config, strategy: str) -> Config:
    parallel = dataclasses.replace(
        config.parallel,
        plan="manual",
        strategy=strategy,
        dp_replicate="auto",
        dp_shard="auto",
        reshard_after_forward="auto",
    )
    return dataclasses.replace(config, parallel=parallel)


def _compared(config: Config, world_size: int, gpus_per_node: int) -> Compared:
    plan = plan_run(config, world_size, gpus_per_node)
    estimate = predict_memory(config, plan)
    simulation = simulate_run(config, plan)
    return Compared(
        plan,
        estimate.memory.gib(),
        estimate.peak_bytes / GIB,
        simulation.memory.gib(),
        simulation.peak_bytes / GIB,
        simulation,
    )


def _plain(compared: Compared) -> dict[str, Any]:
    return {
        "mesh": dataclasses.asdict(compared.plan.mesh),
        "predicted": {"peak_memory_gib": compared.predicted_gib, "memory": compared.predicted},
        "measured": {"peak_memory_gib": compared.measured_gib, "memory": compared.measured},
        "collectives": [
            {"op": op, "axis": axis, "count": count, "bytes": size}
            for op, axis, count, size in totals(compared.simulation)
        ],
    }


def _moved_gib(simulation: Simulation, op: str) -> float:
    return sum(c.bytes for c in simulation.collectives if c.op == op) / GIB


def _gib(value: float) -> str:
    return f"{value:10.2f}"
