"""`python -m tools.plan --check`: compare the planner's collectives and memory with those of the real code on
a fake process group.

Both sides are eager, as the simulation is. Collectives with almost no bytes (of the loss and the gradient
norm) are shown without a limit.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from meshwright.parallel.fsdp import parameters_by_module
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import MicroBatch, Plan, UnitPlan, find_style, sums_whole_gradients
from meshwright.parallel.planner.cost_model import muon_rounds
from meshwright.parallel.planner.hardware import ALL_TO_ALL
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.parallel.planner.walk import StepSink, StepWalk
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload, MuonWorkload
from meshwright.parallel.sharded_model import FEW_VALUES
from meshwright.parallel.simulate.simulator import Simulation, eager_plan
from meshwright.parallel.tensor_parallel import weight_placement
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run
from meshwright.train.config import TrainingJob
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import predict_memory, run_workload
from meshwright.train.training import freeze

EXACT, ABOUT = 0.01, 0.08  # allowed relative differences: of collectives and EXACT_KINDS, and of the peak
EXACT_KINDS = ("params", "grads", "optimizer")  # kinds of memory that can be computed exactly
SEQUENCE_STYLES = ("sequence", "whole_sequence")  # of norms that receive a rank's share of the tokens
EXCHANGE = (ALL_TO_ALL, "world")  # of Muon
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
    def wrong(self) -> list[CheckedQuantity]:
        """The quantities that differ by more than their limits."""
        return [row for row in (*self.collectives, *self.memory) if not row.agrees]


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
    for key in sorted({**simulated, **predicted}, key=lambda key: -simulated.get(key, (0, 0.0))[1]):
        planned, real = predicted.get(key, (0, 0.0)), simulated.get(key, (0, 0.0))
        limit = EXACT if max(planned[1], real[1]) > tiny else None
        yield CheckedQuantity(f"{key[0]} {key[1]}, count", planned[0], real[0], limit)
        limit = limit if key != EXCHANGE else None  # predicted for the rank that owns the most matrices
        yield CheckedQuantity(f"{key[0]} {key[1]}, bytes", planned[1], real[1], limit)


def _compare_memory(predicted: StepMemory, simulation: Simulation) -> Iterator[CheckedQuantity]:
    simulated = dataclasses.asdict(simulation.memory)
    for kind, size in dataclasses.asdict(predicted.memory).items():
        yield CheckedQuantity(kind, size, simulated[kind], EXACT if kind in EXACT_KINDS else None)
    yield CheckedQuantity("peak", predicted.peak_bytes, simulation.peak_bytes, ABOUT)


def predict_traffic(job: TrainingJob, plan: Plan) -> Traffic:
    """Predict number and bytes of rank 0's collectives in one optimizer step by operation and axis, from a
    walk through it and the traced modules.

    Bytes are those of the unsharded tensor. The collectives of the loss and the gradient norm are left out,
    because they belong to no unit.
    """
    model = model_of(job.model).new()  # with the shapes of one tp rank, on the meta device
    freeze(model, job.freeze)
    apply_as_single_tp_rank(model, plan.tensor, plan.mesh.tp)
    work = run_workload(job, plan)
    sink = TrafficSink(plan, work, model)
    StepWalk(plan, sink, work.has_backward).step()
    return _count([*sink.sent, *_of_copies(plan, model), *_of_muon(plan, work.muon)])


class TrafficSink(StepSink):
    """The collectives of a walk through a step."""

    def __init__(self, plan: Plan, work: ModelWorkload, model: nn.Module) -> None:
        self.sent: list[tuple[str, str, float]] = []  # op, axis, bytes
        self._plan, self._work, self._mesh = plan, work, plan.mesh
        parameters_of = parameters_by_module(model, plan.modules)
        self._parameters = {
            unit.name: {
                parameter: find_style(plan.tensor, name.rpartition(".")[0])
                for module in unit.modules
                for name, parameter in parameters_of[module].items()
            }
            for unit in plan.units
        }

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """All-gather a unit's parameters, shared ones once."""
        if self._mesh.shards > 1:
            self._send(
                "all_gather", "dp_shard", map(self._padded, self._parameters[unit.name]), unit.param_dtype
            )

    def compute(self, module: str, phase: str) -> None:
        """Send what tensor and context parallelism send within a module."""
        for operation in getattr(self._work.modules[module], phase).operations:
            if operation.kind == "collective":
                size = operation.bytes.at(self._plan.micro_batch_size)
                self.sent.append((operation.name, operation.axis, size))

    def reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Reduce a unit's gradients. Those of norms are summed over tp before: each tp rank has the gradient
        of its heads, or with sequence parallelism of its tokens."""
        trained = {p: style for p, style in self._parameters[unit.name].items() if p.requires_grad}
        partial = ("per_head", *(SEQUENCE_STYLES if self._plan.tensor.sequence_parallel else ()))
        dtype = unit.reduce_dtype if sums_whole_gradients(unit, self._plan) else unit.param_dtype
        for parameter, style in trained.items():
            if style in partial:
                self._send("all_reduce", "tp", [parameter.numel()], dtype)
        values = [self._padded(parameter) for parameter in trained]
        if trained and self._mesh.shards > 1:
            self._send("reduce_scatter", "dp_shard", values, unit.reduce_dtype)
        if trained and self._mesh.dp_replicate > 1 and micro_batch.last:
            self._send("all_reduce", "dp_replicate", [sum(values) // self._mesh.shards], unit.reduce_dtype)

    def _send(self, op: str, axis: str, values: Iterable[int], dtype: str) -> None:
        self.sent.append((op, axis, sum(values) * DTYPE_BYTES[dtype]))

    def _padded(self, parameter: nn.Parameter) -> int:
        """Return the number of values sent: FSDP2 shards the first dimension, padded to equal rows per
        rank."""
        rows, shards = parameter.shape[0], self._mesh.shards
        return parameter.numel() // rows * (-(-rows // shards) * shards)


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


def _of_muon(plan: Plan, muon: MuonWorkload) -> Iterator[tuple[str, str, float]]:
    """Yield Muon's exchanges of matrices with their owners: to them, and to all ranks."""
    ranks = plan.mesh.world_size
    for each in muon_rounds(muon.blocks, ranks) if ranks > 1 else ():
        size = each.owned_values * DTYPE_BYTES[muon.dtype]
        yield from ((*EXCHANGE, size), (*EXCHANGE, size * plan.mesh.dp_replicate))


def _count(sent: Iterable[tuple[str, str, float]]) -> Traffic:
    traffic: Traffic = {}
    for op, axis, size in sent:
        count, total = traffic.get((op, axis), (0, 0.0))
        traffic[op, axis] = count + 1, total + size
    return traffic


def as_text(check: PlanCheck) -> str:
    """Return both tables, and the verdict."""
    collectives = [_cells(row) for row in check.collectives if row.limit is not None]
    small = [
        f"{row.name.removesuffix(', count')} {row.predicted:g} predicted, {row.simulated:g} simulated"
        for row in check.collectives
        if row.limit is None and row.name.endswith("count")
    ]
    sides = ("predicted", "simulated", "difference")
    parts = [
        "the plan without compilation: predicted, and simulated with the real code on a fake process group",
        format_table(("collectives", *sides), collectives)
        if collectives
        else "no collectives above 0.1% of all bytes sent",
        format_table(("memory", *sides), [*map(_cells, check.memory)]),
        *(["not checked, below 0.1% of all bytes sent: " + "; ".join(small)] if small else []),
    ]
    if check.wrong:
        wrong = (f"{row.name} differs by {row.difference:+.1%}" for row in check.wrong)
        return "\n\n".join([*parts, f"check failed: {'; '.join(wrong)}"])
    passed = (
        f"check passed: {', '.join(EXACT_KINDS)} and collectives within {EXACT:.0%}, peak within "
        f"{ABOUT:.0%} ({check.memory[-1].difference:+.1%})"
    )
    return "\n\n".join([*parts, passed])


def _cells(row: CheckedQuantity) -> tuple[str, ...]:
    unit, digits = (1, 0) if row.name.endswith("count") else (GIB, 4)
    over = "" if row.agrees else f"  over {row.limit:.0%}"
    sides = (f"{side / unit:10,.{digits}f}" for side in (row.predicted, row.simulated))
    return (row.name.replace("bytes", "GiB"), *sides, f"{row.difference:+8.2%}{over}")


def as_json(check: PlanCheck) -> dict[str, Any]:
    """Return the check as plain data, with counts and bytes."""
    rows = {"collectives": check.collectives, "memory": check.memory}
    return {"agrees": not check.wrong} | {
        part: list(map(_plain, quantities)) for part, quantities in rows.items()
    }


def _plain(row: CheckedQuantity) -> Mapping[str, Any]:
    difference = row.difference if row.difference != float("inf") else None
    return dataclasses.asdict(row) | {"difference": difference, "agrees": row.agrees}
