"""The plan: the whole parallelisation as one frozen value, and every check of it.

`make_plan` is pure: config and sizes in, Plan out, or one PlanError that lists every mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel.config import CompileConfig, ParallelConfig

AXES = ("dp_replicate", "dp_shard", "tp")  # outermost first: neighbours in tp are neighbours in rank
DTYPES = ("float32", "bfloat16")
ACTIVATION_CHECKPOINTS = ("none", "full")


class PlanError(ValueError):
    """The parallelisation asked for cannot be: the message names rule, value, place and way out."""


@dataclass(frozen=True)
class MeshPlan:
    """Degrees of the mesh's axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class UnitPlan:
    """One FSDP unit: the modules whose parameters are gathered together, and how.

    `forward_prefetch` and `backward_prefetch` say how many units ahead the all-gathers are started.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | int
    forward_prefetch: int
    backward_prefetch: int
    activation_checkpoint: str
    compiled: bool
    param_dtype: str
    reduce_dtype: str

    @property
    def name(self) -> str:
        return "+".join(self.modules)


@dataclass(frozen=True)
class Plan:
    """The parallelisation of one model on one number of processes, units in the order in which the forward is
    done with them."""

    mesh: MeshPlan
    micro_batch_size: int
    accumulation: int
    compile: CompileConfig
    units: tuple[UnitPlan, ...]

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation * self.mesh.data_parallel


@dataclass(frozen=True)
class ModelUnits:
    """What a model publishes of itself for planning.

    `units`: modules of each FSDP unit, in the order in which the forward is done with them;
    `compiled` and `checkpointed`: which modules
    those treatments apply to.
    """

    units: Sequence[tuple[str, ...]]
    compiled: frozenset[str]
    checkpointed: frozenset[str]


def make_plan(
    config: ParallelConfig, model: ModelUnits, world_size: int, micro_batch_size: int | str, global_batch_size: int
) -> Plan:
    """Resolve what was asked into what is done.

    Batch sizes in sequences. A global batch of -1 is one micro batch per data-parallel rank; a micro batch of "auto"
    is a rank's whole share of the global batch, or 1 without one. Raises PlanError with all
    mistakes in one report.
    """
    mistakes = _mistakes_in(config)
    mesh, mesh_mistakes = _make_mesh(config, world_size)
    if micro_batch_size == "auto":
        micro_batch_size = 1 if global_batch_size == -1 else max(1, global_batch_size // mesh.data_parallel)
    micro_batch_size = int(micro_batch_size)
    accumulation, batch_mistakes = _make_accumulation(mesh, micro_batch_size, global_batch_size)
    mistakes += mesh_mistakes + (batch_mistakes if not mesh_mistakes else [])
    if mistakes:
        raise PlanError("\n".join(mistakes))
    units = tuple(_make_unit(config, model, modules) for modules in model.units)
    return Plan(mesh, micro_batch_size, accumulation, config.compile, units)


def check_plan(plan: Plan, model: ModelUnits, world_size: int) -> None:
    """Raise PlanError unless `plan`, read from a file, makes sense and fits this model and number of processes."""
    mistakes = _compile_mistakes(plan.compile)
    for unit in plan.units:
        mistakes += _reshard_mistakes(unit.reshard_after_forward, plan.mesh.dp_shard, f"unit {unit.name}: ")
    if plan.mesh.world_size != world_size:
        mistakes.append(f"the plan's mesh is for {plan.mesh.world_size} processes, this run has {world_size}: "
                        "start that many, or make a new plan")  # fmt: skip
    planned, published = [unit.modules for unit in plan.units], list(model.units)
    if planned != published:
        odd = next((p for p in planned if p not in published), None) or next(
            (m for m in published if m not in planned), "in another order")  # fmt: skip
        mistakes.append(f"the plan's units are not this model's ({len(planned)} against {len(published)}; "
                        f"first difference: {odd}): make a new plan for this model")  # fmt: skip
    if mistakes:
        raise PlanError("\n".join(mistakes))


def _resolve(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _mistakes_in(config: ParallelConfig) -> list[str]:
    mistakes = []
    for key in ("param_dtype", "reduce_dtype"):
        value = getattr(config, key)
        if value == "float16":
            mistakes.append(f"parallel.{key}=float16 needs a gradient scaler, which this trainer does not have: "
                            "use bfloat16, which has float32's range")  # fmt: skip
        elif value not in DTYPES:
            mistakes.append(f"parallel.{key}={value} is not one of {', '.join(DTYPES)}")
    for key in ("forward_prefetch", "backward_prefetch"):
        value = getattr(config, key)
        if value != "auto" and value < 0:
            mistakes.append(f"parallel.{key}={value} must be 0 (none) or a number of units ahead")
    return mistakes + _compile_mistakes(config.compile)


def _compile_mistakes(config: CompileConfig) -> list[str]:
    if config.mode == "default" or config.backend == "inductor":
        return []
    return [f"parallel.compile.mode={config.mode} is for backend inductor, not {config.backend}: leave it at default"]


def _reshard_mistakes(reshard: bool | int | str, shard: int, place: str) -> list[str]:
    """An int is a smaller group that keeps the parameters together: it must divide dp_shard and be neither end of it."""
    if type(reshard) is not int or (1 < reshard < shard and shard % reshard == 0):
        return []
    others = [str(d) for d in range(2, shard) if shard % d == 0]
    return [f"{place}reshard_after_forward={reshard} must divide dp_shard={shard} and be smaller: "
            f"use {', '.join(['true', 'false', *others])} (false is what groups of 1 would be)"]  # fmt: skip


def _make_mesh(config: ParallelConfig, world_size: int) -> tuple[MeshPlan, list[str]]:
    """Resolve the degrees; -1 takes what the others leave. Also the mistakes found on the way."""
    replicate, tp = _resolve(config.dp_replicate, 1), _resolve(config.tp, 1)
    shard = _resolve(config.dp_shard, -1)
    mistakes = [
        f"parallel.{axis}={degree} must be at least 1{' (or -1: all that is left)' if axis == 'dp_shard' else ''}"
        for axis, degree in zip(AXES, (replicate, shard, tp), strict=True)
        if degree < 1 and not (axis == "dp_shard" and degree == -1)
    ]
    if tp > 1:
        mistakes.append(f"parallel.tp={tp}: this version has no tensor parallelism yet, use 1")
    if mistakes:
        return MeshPlan(1, 1, 1), mistakes
    others = replicate * tp
    if shard == -1:
        shard = max(world_size // others, 1)
    mesh = MeshPlan(replicate, shard, tp)
    if mesh.world_size != world_size:
        degrees = " x ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES)
        mistakes.append(f"parallel: {degrees} is {mesh.world_size} processes, this run has {world_size}: "
                        f"start {mesh.world_size}, or change the degrees (dp_shard=-1 takes what is left)")  # fmt: skip
    return mesh, mistakes + _reshard_mistakes(config.reshard_after_forward, shard, "parallel.")


def _make_accumulation(mesh: MeshPlan, micro_batch_size: int, global_batch_size: int) -> tuple[int, list[str]]:
    per_micro_step = micro_batch_size * mesh.data_parallel
    if micro_batch_size < 1:
        return 1, [f"train.micro_batch_size={micro_batch_size} must be at least 1"]
    if global_batch_size == -1:
        return 1, []
    if global_batch_size < 1 or global_batch_size % per_micro_step:
        nearest = max(1, round(global_batch_size / per_micro_step)) * per_micro_step
        return 1, [f"train.global_batch_size={global_batch_size} must be a multiple of micro_batch_size x data-parallel "
                   f"degree = {micro_batch_size} x {mesh.data_parallel}: the nearest is {nearest}, or use -1"]  # fmt: skip
    return global_batch_size // per_micro_step, []


def _make_unit(config: ParallelConfig, model: ModelUnits, modules: tuple[str, ...]) -> UnitPlan:
    # The forward's last unit is the backward's first: freeing it in between would gather it twice in a row.
    reshard = modules != tuple(model.units[-1]) and _resolve(config.reshard_after_forward, True)
    checkpointed = model.checkpointed.issuperset(modules)
    return UnitPlan(
        modules=modules,
        reshard_after_forward=reshard,
        forward_prefetch=_resolve(config.forward_prefetch, 1),
        backward_prefetch=_resolve(config.backward_prefetch, 1),
        activation_checkpoint=_resolve(config.activation_checkpoint, "none") if checkpointed else "none",
        compiled=config.compile.enabled and not model.compiled.isdisjoint(modules),
        param_dtype=config.param_dtype,
        reduce_dtype=config.reduce_dtype,
    )
