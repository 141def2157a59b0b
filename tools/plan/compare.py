"""Compare DDP, FSDP and HSDP for one training, predicted and simulated (`--compare`); and list the
differences between two plan files (`diff`)."""

import dataclasses
import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import join_names
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.simulate.simulator import Simulation
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run, totals
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

COMPARED = {"no_shard": "DDP", "full_shard": "FSDP", "hybrid_shard": "HSDP"}
OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class ComparedStrategy:
    """One strategy: its plan, the predicted memory, and the simulation of its step."""

    plan: Plan
    predicted: StepMemory
    simulation: Simulation


def compare_strategies(job: TrainingJob, world_size: int, gpus_per_node: int) -> dict[str, ComparedStrategy]:
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
    return {name: _compared(_with_strategy(job, name), world_size, node) for name in COMPARED}


def comparison_json(compared: dict[str, ComparedStrategy]) -> str:
    """Return a JSON document: strategy -> mesh, predicted and measured {peak_memory_gib, memory in GiB},
    totals of collectives. `measured` is the simulation."""
    return json.dumps({name: _plain(strategy) for name, strategy in compared.items()}, indent=2)


def comparison_text(compared: dict[str, ComparedStrategy]) -> str:
    """Return a table and notes on its columns."""
    head = [
        "GiB per GPU",
        *(f"{short} {side}" for short in COMPARED.values() for side in ("predicted", "measured")),
    ]
    sides = [side for s in compared.values() for side in (s.predicted, s.simulation)]
    by_kind = [side.memory.gib() for side in sides]
    rows = [[kind, *(_gib(gib[kind]) for gib in by_kind)] for kind in by_kind[0]]
    rows.append(["total", *(_gib(side.peak_bytes / GIB) for side in sides)])
    for op in OPS:
        moved = [sum(c.bytes for c in s.simulation.collectives if c.op == op) for s in compared.values()]
        rows.append([op, *(cell for size in moved for cell in ("", _gib(size / GIB)))])
    notes = [f"{COMPARED[name]}: {describe_strategy(name, s.plan.mesh)}" for name, s in compared.items()]
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


def _compared(job: TrainingJob, world_size: int, gpus_per_node: int) -> ComparedStrategy:
    plan = plan_run(job, world_size, gpus_per_node)
    return ComparedStrategy(plan, predict_memory(job, plan), simulate_run(job, plan))


def _plain(compared: ComparedStrategy) -> dict[str, Any]:
    return {
        "mesh": dataclasses.asdict(compared.plan.mesh),
        **{
            name: {"peak_memory_gib": side.peak_bytes / GIB, "memory": side.memory.gib()}
            for name, side in (("predicted", compared.predicted), ("measured", compared.simulation))
        },
        "collectives": totals(compared.simulation),
    }


def _gib(value: float) -> str:
    return f"{value:10.2f}"


ONLY = "unit"  # the key of units that only one plan has


@dataclass(frozen=True)
class Difference:
    """One difference: its place, key and two values. With the key "unit" one value is None: only the other
    plan has these units."""

    where: str
    key: str
    a: Any
    b: Any


def diff_plans(a: Plan, b: Plan) -> list[Difference]:
    """Return every difference between two plans: those of the plan itself first, then those of its units in
    the order of the forward. Empty if the plans are equal."""
    differences = list[Difference]()
    for key, value_a, value_b in _changes(a, b):
        if key == "tensor":
            differences += _diff_tensor(a, b)
        elif dataclasses.is_dataclass(value_a):
            differences += _diff_fields(key, value_a, value_b)
        elif key not in ("modules", "units"):
            differences.append(Difference("plan", key, value_a, value_b))
    if a.global_batch_size != b.global_batch_size:
        both = (a.global_batch_size, b.global_batch_size)
        differences.append(Difference("plan", "global_batch_size", *both))
    if a.modules != b.modules:
        differences.append(Difference("model", "modules", join_names(a.modules), join_names(b.modules)))
    return differences + _diff_units(a, b)


def describe_difference(difference: Difference) -> str:
    """Format a difference as one line."""
    where, key = difference.where, difference.key
    if key == ONLY:
        return f"{where}: only in the {'first' if difference.b is None else 'second'}"
    return f"{where}: {key} {_value(difference.a)} -> {_value(difference.b)}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, dict):
        return f"of {len(value)} patterns" if value else "none"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _diff_tensor(a: Plan, b: Plan) -> list[Difference]:
    """Return the differences of the tensor plans, by pattern if both plans have styles."""
    styles_a, styles_b = a.tensor.styles, b.tensor.styles
    if not (styles_a and styles_b):
        return _diff_fields("tensor", a.tensor, b.tensor)
    pairs = [
        (pattern, styles_a.get(pattern, "no style"), styles_b.get(pattern, "no style"))
        for pattern in {**styles_a, **styles_b}
    ]
    changed = [Difference("tensor", *pair) for pair in pairs if pair[1] != pair[2]]
    same_styles = dataclasses.replace(a.tensor, styles=styles_b)
    return _diff_fields("tensor", same_styles, b.tensor) + changed


def _diff_fields(where: str, a: Any, b: Any) -> list[Difference]:
    """Return the differences between two dataclasses of the same type, field by field."""
    return [Difference(where, *change) for change in _changes(a, b)]


def _diff_units(a: Plan, b: Plan) -> list[Difference]:
    """Return the differences between units of the same name, consecutive units with the same difference as
    one; then units of only one plan."""
    in_a, in_b = {unit.name: unit for unit in a.units}, {unit.name: unit for unit in b.units}
    shared = [name for name in in_a if name in in_b]
    differences = []
    for _, same in groupby(shared, key=lambda name: repr(_changes(in_a[name], in_b[name]))):
        names = list(same)
        differences += _diff_fields(_names(names), in_a[names[0]], in_b[names[0]])
    only_a, only_b = [name for name in in_a if name not in in_b], [name for name in in_b if name not in in_a]
    if only_a:
        differences.append(Difference(_names(only_a), ONLY, only_a, None))
    if only_b:
        differences.append(Difference(_names(only_b), ONLY, None, only_b))
    if shared != [name for name in in_b if name in in_a]:
        differences.append(Difference("units", "order", [*in_a], [*in_b]))
    return differences


def _changes(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Return key and both values of every field that differs."""
    fields = [(field.name, getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)]
    return [(key, value_a, value_b) for key, value_a, value_b in fields if _differ((value_a, value_b))]


def _differ(values: tuple[Any, Any]) -> bool:
    """Compare values with their types: in Python true equals 1, but resharding to 1 process is not `true`."""
    return repr(values[0]) != repr(values[1])


def _names(names: list[str]) -> str:
    """Format consecutive units by their first and last name."""
    return f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]} ({len(names)})"
