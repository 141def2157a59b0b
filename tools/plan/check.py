"""`python -m tools.plan --check`: compare the planner's collectives and memory with those of the real code on
a fake process group.

Both sides are eager, as the simulation is. Collectives with almost no bytes (of the loss and the gradient
norm) are shown without a limit.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import (
    Plan,
    UnitPlan,
    find_style,
    keeps_parameters,
    prefetch_schedule,
    regathered,
    sums_whole_gradients,
)
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload
from meshwright.parallel.sharded_model import FEW_VALUES
from meshwright.parallel.simulate.simulator import Simulation, eager_plan
from meshwright.parallel.tensor_parallel import weight_placement
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run
from meshwright.train.config import TrainingJob
from meshwright.train.model.build import freeze
from meshwright.train.model.choose import source_of
from meshwright.train.planning.predict import predict_memory, run_workload

EXACT, ABOUT = 0.01, 0.08  # allowed relative differences: of collectives and EXACT_KINDS, and of the peak
EXACT_KINDS = ("params", "grads", "optimizer")  # kinds of memory that can be computed exactly
SEQUENCE_STYLES = ("sequence", "whole_sequence")  # of norms that receive a rank's share of the tokens
TINY = 0.001  # share of all bytes sent below which a collective has no limit

Traffic = dict[tuple[str, str], tuple[int, float]]  # (op, axis) -> count and bytes


def relative_error(predicted: float, simulated: float) -> float:
    """Return predicted / simulated - 1; 0 if both are 0, infinity if only `simulated` is."""
    if simulated:
        return predicted / simulated - 1
    return float("inf") if predicted else 0.0


@dataclass(frozen=True)
class CheckedQuantity:
    """One quantity, predicted and simulated. `limit`: the allowed relative difference; None: any."""

    name: str
    predicted: float
    simulated: float
    limit: float | None

    @property
    def difference(self) -> float:
        """The difference relative to the simulated value; infinite if only that one is 0."""
        return relative_error(self.predicted, self.simulated)

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the limit."""
        return self.limit is None or abs(self.difference) <= self.limit


@dataclass(frozen=True)
class PlanCheck:
    """The result of a check: collectives by op and axis (count, then bytes), memory by kind, and the peak."""

    collectives: tuple[CheckedQuantity, ...]
    memory: tuple[CheckedQuantity, ...]

    @property
    def agrees(self) -> bool:
        """Whether all differences are within their limits."""
        return all(row.agrees for row in (*self.collectives, *self.memory))


def check_run(job: TrainingJob, plan: Plan) -> PlanCheck:
    """Compare one step of rank 0, predicted and simulated. The process must not have a process group."""
    plan = eager_plan(plan)
    simulation = simulate_run(job, plan)
    return compare(predict_traffic(job, plan), predict_memory(job, plan), simulation)


def compare(traffic: Traffic, memory: StepMemory, simulation: Simulation) -> PlanCheck:
    """Compare prediction and simulation."""
    return PlanCheck(tuple(_compare_traffic(traffic, simulation)), tuple(_compare_memory(memory, simulation)))


def _compare_traffic(predicted: Traffic, simulation: Simulation) -> Iterator[CheckedQuantity]:
    simulated = _count((c.op, c.axis, c.bytes) for c in simulation.collectives)
    tiny = TINY * sum(size for _, size in simulated.values())
    for key in sorted({*predicted, *simulated}, key=lambda key: -simulated.get(key, (0, 0.0))[1]):
        planned, real = predicted.get(key, (0, 0.0)), simulated.get(key, (0, 0.0))
        limit = EXACT if max(planned[1], real[1]) > tiny else None
        yield CheckedQuantity(f"{key[0]} {key[1]}, count", planned[0], real[0], limit)
        yield CheckedQuantity(f"{key[0]} {key[1]}, bytes", planned[1], real[1], limit)


def _compare_memory(predicted: StepMemory, simulation: Simulation) -> Iterator[CheckedQuantity]:
    simulated = dataclasses.asdict(simulation.memory)
    for kind, size in dataclasses.asdict(predicted.memory).items():
        yield CheckedQuantity(kind, size, simulated[kind], EXACT if kind in EXACT_KINDS else None)
    yield CheckedQuantity("peak", predicted.peak_bytes, simulation.peak_bytes, ABOUT)


def predict_traffic(job: TrainingJob, plan: Plan) -> Traffic:
    """Predict number and bytes of rank 0's collectives in one optimizer step by operation and axis, from the
    plan's units and the traced modules.

    Bytes are those of the unsharded tensor. The collectives of the loss and the gradient norm are left out,
    because they belong to no unit.
    """
    work = run_workload(job, plan)
    model = _one_rank(job, plan)
    no_backward = {name for name in plan.modules if not work.has_backward((name,))}
    of_units = (
        _of_unit(unit, plan, _parameters(model, unit), count_gathers(unit, plan, no_backward))
        for unit in plan.units
    )
    return _count(
        [
            *chain.from_iterable(of_units),
            *_of_modules(plan, work, no_backward),
            *_of_norms(plan, model),
            *_of_copies(plan, model),
        ]
    )


def count_gathers(unit: UnitPlan, plan: Plan, no_backward: set[str]) -> int:
    """Return the number of a unit's all-gathers in a step of n micro batches: n for the forwards, or 1 if it
    stays gathered from one to the next, and n for the backwards that need or prefetch it again."""
    needs = not no_backward.issuperset(unit.modules)
    ahead = prefetch_schedule(plan, "backward")
    prefetched = any(
        unit in ahead[other.name] for other in plan.units if not no_backward.issuperset(other.modules)
    )
    kept = keeps_parameters(unit, plan) and (needs or unit.reshard_after_forward is False)
    forwards = 1 if kept else plan.accumulation
    return forwards + plan.accumulation * (regathered(unit) and (needs or prefetched))


def _of_unit(
    unit: UnitPlan, plan: Plan, parameters: Sequence[nn.Parameter], gathers: int
) -> Iterator[tuple[str, str, float]]:
    """Yield the all-gathers and reductions of a unit: every micro batch reduce-scatters, or only the last one
    if it sums whole gradients; the last one all-reduces (train.step)."""
    mesh = plan.mesh
    full = sum(_padded(parameter, mesh.shards) for parameter in parameters) * DTYPE_BYTES[unit.param_dtype]
    trained = (
        sum(_padded(p, mesh.shards) for p in parameters if p.requires_grad) * DTYPE_BYTES[unit.reduce_dtype]
    )
    if mesh.shards > 1:
        yield from [("all_gather", "dp_shard", full)] * gathers
        if trained:
            reductions = 1 if sums_whole_gradients(unit, plan) else plan.accumulation
            yield from [("reduce_scatter", "dp_shard", trained)] * reductions
    if mesh.dp_replicate > 1 and trained:
        yield "all_reduce", "dp_replicate", trained / mesh.shards


def _of_norms(plan: Plan, model: nn.Module) -> Iterator[tuple[str, str, float]]:
    """Yield the all-reduces of norm gradients. Each tp rank has the gradient of its heads, or with sequence
    parallelism of its tokens; FSDP2 sums them over tp before each reduction: in param_dtype, or the sums in
    reduce_dtype."""
    partial = ("per_head", *SEQUENCE_STYLES) if plan.tensor.sequence_parallel else ("per_head",)
    for unit in plan.units:
        for name, parameter in chain.from_iterable(
            model.get_submodule(m).named_parameters(m) for m in unit.modules
        ):
            if find_style(plan.tensor, name.rpartition(".")[0]) in partial and parameter.requires_grad:
                sums = sums_whole_gradients(unit, plan)
                size = parameter.numel() * DTYPE_BYTES[unit.reduce_dtype if sums else unit.param_dtype]
                yield from [("all_reduce", "tp", size)] * (1 if sums else plan.accumulation)


def _of_copies(plan: Plan, model: nn.Module) -> Iterator[tuple[str, str, float]]:
    """Yield the all-reduces that make the gradients of weights with identical copies on the tp ranks equal
    (`ShardedModel`): one for all small ones, one for each other."""
    if plan.mesh.tp == 1:
        return
    together = 0
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        style = find_style(plan.tensor, module)
        placement = weight_placement(style, key) if style else Replicate()
        if parameter.requires_grad and placement.is_replicate():
            rows = -(-parameter.shape[0] // plan.mesh.shards)  # on rank 0
            values = rows * (parameter.numel() // parameter.shape[0])
            if values < FEW_VALUES:
                together += values
            else:
                yield "all_reduce", "tp", values * DTYPE_BYTES[plan.storage_dtype]
    if together:
        yield "all_reduce", "tp", together * DTYPE_BYTES[plan.storage_dtype]


def _padded(parameter: nn.Parameter, shards: int) -> int:
    """Return the number of values sent: FSDP2 shards the first dimension, padded to equal rows per rank."""
    rows = parameter.shape[0]
    return parameter.numel() // rows * (-(-rows // shards) * shards)


def _of_modules(plan: Plan, work: ModelWorkload, no_backward: set[str]) -> Iterator[tuple[str, str, float]]:
    """Yield the collectives of tensor and context parallelism within modules."""
    for name in plan.modules:
        module = work.modules[name]
        for phase in (module.forward, *([] if name in no_backward else [module.backward])):
            for operation in phase.operations:
                if operation.kind == "collective":
                    size = operation.bytes.at(plan.micro_batch_size)
                    yield from [(operation.name, operation.axis, size)] * plan.accumulation


def _one_rank(job: TrainingJob, plan: Plan) -> nn.Module:
    """Return the model with the shapes of one tp rank, on the meta device."""
    model = source_of(job.model).new()
    freeze(model, job.freeze)
    apply_as_single_tp_rank(model, plan.tensor, plan.mesh.tp)
    return model


def _parameters(model: nn.Module, unit: UnitPlan) -> list[nn.Parameter]:
    """Return a unit's parameters, shared ones once."""
    return list(dict.fromkeys(p for name in unit.modules for p in model.get_submodule(name).parameters()))


def _count(sent: Any) -> Traffic:
    counts, sizes = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], float](float)
    for op, axis, size in sent:
        counts[op, axis] += 1
        sizes[op, axis] += size
    return {key: (counts[key], sizes[key]) for key in sizes}


def check_text(check: PlanCheck) -> str:
    """Return both tables, and the verdict."""
    limited = [row for row in check.collectives if row.limit is not None]
    unlimited = [row for row in check.collectives if row.limit is None]
    parts = [
        "the plan without compilation: predicted, and simulated with the real code on a fake process group"
    ]
    head = ("collectives", "predicted", "simulated", "difference")
    parts.append(
        format_table(head, [_cells(row, GIB if "bytes" in row.name else 1) for row in limited])
        if limited
        else "no collectives above 0.1% of all bytes sent"
    )
    parts.append(format_table(("memory", *head[1:]), [_cells(row, GIB) for row in check.memory]))
    if unlimited:
        small = [
            f"{row.name.removesuffix(', count')} {row.predicted:g} predicted, {row.simulated:g} simulated"
            for row in unlimited
            if row.name.endswith("count")
        ]
        parts.append("not checked, below 0.1% of all bytes sent: " + "; ".join(small))
    return "\n\n".join([*parts, _verdict(check)])


def _verdict(check: PlanCheck) -> str:
    wrong = [row for row in (*check.collectives, *check.memory) if not row.agrees]
    if not wrong:
        return (
            f"check passed: {', '.join(EXACT_KINDS)} and collectives within {EXACT:.0%}, peak within "
            f"{ABOUT:.0%} ({check.memory[-1].difference:+.1%})"
        )
    return "check failed: " + "; ".join(f"{row.name} differs by {row.difference:+.1%}" for row in wrong)


def _cells(row: CheckedQuantity, unit: int) -> tuple[str, ...]:
    name = row.name.replace("bytes", "GiB") if unit > 1 else row.name
    digits = 4 if unit > 1 else 0
    mark = "" if row.limit is None else "" if row.agrees else f"  over {row.limit:.0%}"
    sides = (f"{side / unit:10,.{digits}f}" for side in (row.predicted, row.simulated))
    return (name, *sides, f"{row.difference:+8.2%}{mark}")


def check_json(check: PlanCheck) -> dict[str, Any]:
    """Return the check as plain data, with counts and bytes."""
    return {
        "agrees": check.agrees,
        "collectives": [_plain(row) for row in check.collectives],
        "memory": [_plain(row) for row in check.memory],
    }


def _plain(row: CheckedQuantity) -> Mapping[str, Any]:
    difference = row.difference if row.difference != float("inf") else None
    return dataclasses.asdict(row) | {"difference": difference, "agrees": row.agrees}
