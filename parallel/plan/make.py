"""Config and sizes in, plan out: every choice a key leaves open is made here, and every mistake is found.

`make_plan` is pure, and raises one PlanError that lists all mistakes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.parallel.config import Float8Config, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan import rules
from meshwright.parallel.plan.float8_rules import float8_mistakes, key_mistakes, make_float8
from meshwright.parallel.plan.rules import async_tp_mistakes, budget_mistakes, split_styles
from meshwright.parallel.plan.schema import AXES, NO_FLOAT8, MeshPlan, ModelUnits, Plan, TensorPlan, UnitPlan
from meshwright.parallel.plan.selective_policy import blocks_of_every, op_mistakes, saved_ops
from meshwright.parallel.plan.strategy import resolve_strategy

LOSS_CHUNK_TOKENS = 2048  # enough for matrix products at full speed


@dataclasses.dataclass(frozen=True)
class RunShape:
    """What a plan is made for: processes, and how many of them share a node; tokens per sequence; sequences
    per micro batch and per optimizer step; the attention kernel and the dtype that are best on its devices.

    A global batch of -1 is one micro batch per data-parallel rank; a micro batch of "auto" is a rank's whole
    share of the global batch, or 1 without one.
    """

    world_size: int
    gpus_per_node: int
    seq_len: int
    micro_batch_size: int | str = 1
    global_batch_size: int = -1
    attention: str = "cpu"
    param_dtype: str = "float32"


def make_plan(config: ParallelConfig, model: ModelUnits, job: RunShape) -> Plan:
    """Resolve what was asked into what is done. Raises PlanError with all mistakes in one report."""
    mistakes = list[str]()
    if config.strategy:
        tp = max(_resolve(config.tp, 1), 1)
        config, mistakes = resolve_strategy(config, tp, job.world_size, job.gpus_per_node)
    mistakes += _key_mistakes(config, model, job)
    mesh, mesh_mistakes = _make_mesh(config, job.world_size)
    mistakes += mesh_mistakes
    parts = [part for part in config.tp_modules if part in model.tp_divides]
    tokens = job.seq_len if config.sequence_parallel else 0
    mistakes += rules.tensor_mistakes(_resolve(config.tp, 1), parts, tokens, model, "parallel.")
    if not mesh_mistakes or mesh.dp_shard == config.dp_shard:
        mistakes += rules.reshard_mistakes(config.reshard_after_forward, mesh.dp_shard, mesh.tp, "parallel.")
    micro_batch_size: Any = job.micro_batch_size
    if micro_batch_size == "auto":
        micro_batch_size = (
            1 if job.global_batch_size == -1 else max(1, job.global_batch_size // mesh.data_parallel)
        )
    if not mesh_mistakes:
        mistakes += rules.batch_mistakes(int(micro_batch_size), job.global_batch_size, mesh.data_parallel)
    if mistakes:
        raise PlanError("\n".join(mistakes))
    once = micro_batch_size * mesh.data_parallel
    tensor = _make_tensor(config, model, mesh.tp)
    plan = Plan(
        mesh=mesh,
        micro_batch_size=micro_batch_size,
        accumulation=1 if job.global_batch_size == -1 else job.global_batch_size // once,
        tensor=tensor,
        cpu_offload=config.cpu_offload,
        storage_dtype=config.storage_dtype,
        attention=_resolve(config.attention, job.attention),
        loss_chunk_tokens=_loss_chunk(config, micro_batch_size * job.seq_len, mesh.tp),
        fused_projections=config.fused_projections,
        async_tp=config.async_tp,
        float8=NO_FLOAT8
        if config.float8 == Float8Config()
        else make_float8(config.float8, model, tensor, mesh.tp),
        compile=config.compile,
        modules=tuple(model.modules),
        units=_make_units(config, model, job),
    )
    if plan.async_tp:
        mistakes += async_tp_mistakes(plan, "parallel.")
    if plan.float8 != NO_FLOAT8:
        mistakes += float8_mistakes(plan, model, "parallel.float8.")
    if mistakes:
        raise PlanError("\n".join(mistakes))
    return plan


def _resolve(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _loss_chunk(config: ParallelConfig, tokens: int, tp: int) -> int:
    """Tokens whose logits are there at a time. Gathered logits, and those of a micro batch no longer than a
    chunk, are made at once: compiled with what follows, that is faster."""
    at_once = _logits_gathered(config, tp) or tokens <= LOSS_CHUNK_TOKENS
    return int(_resolve(config.loss_chunk_tokens, 0 if at_once else LOSS_CHUNK_TOKENS))


def _logits_gathered(config: ParallelConfig, tp: int) -> bool:
    return tp > 1 and "head" in config.tp_modules and not config.loss_parallel


def _key_mistakes(config: ParallelConfig, model: ModelUnits, job: RunShape) -> list[str]:
    """Mistakes in single keys, and in pairs that have nothing to do with degrees."""
    mistakes = []
    param_dtype = _resolve(config.param_dtype, job.param_dtype)
    for key, value in vars(config).items():
        if key in ("storage_dtype", "reduce_dtype") or (key == "param_dtype" and value != "auto"):
            mistakes += rules.dtype_mistakes(value, f"parallel.{key}")
    mistakes += rules.storage_mistakes(config.storage_dtype, [param_dtype], "parallel.")
    attention, chunk = (
        _resolve(config.attention, model.attention_kernels[0]),
        _resolve(config.loss_chunk_tokens, 0),
    )
    mistakes += rules.kernel_mistakes(
        attention, chunk, _logits_gathered(config, _resolve(config.tp, 1)), model, "parallel."
    )
    for key in ("forward_prefetch", "backward_prefetch"):
        if (value := getattr(config, key)) != "auto" and value < 0:
            mistakes.append(f"parallel.{key}={value} must be 0 (none) or a number of units ahead")
    if config.activation_checkpoint_blocks != "auto":
        mistakes += _blocks_mistakes(
            config.activation_checkpoint_blocks, config.activation_checkpoint, len(model.checkpointed)
        )
    if config.unit_min_params < 0:
        mistakes.append(
            f"parallel.unit_min_params={config.unit_min_params} must be 0 (a unit per block) or more"
        )
    for part in config.tp_modules:
        if model.styles and part not in model.styles:
            hint = rules.nearest(part, model.styles) or f" It has {', '.join(model.styles)}."
            mistakes.append(f"parallel.tp_modules: {part} is not a part of this model.{hint}")
    shared = sorted(model.shared_parts)
    if (
        _resolve(config.tp, 1) > 1
        and shared
        and 0 < len(model.shared_parts.intersection(config.tp_modules)) < len(shared)
    ):
        mistakes.append(
            f"parallel.tp_modules={list(config.tp_modules)}: {' and '.join(shared)} share a weight in this "
            "model, so tensor parallelism splits both or neither"
        )
    if config.activation_checkpoint == "selective":
        mistakes += op_mistakes(config.selective_policy, model.attention_ops)
    if config.activation_checkpoint == "budget":
        mistakes += budget_mistakes(
            config.activation_budget, config.compile.enabled, config.compile.backend, "parallel."
        )
    if config.float8.recipe != "none":
        mistakes += key_mistakes(config.float8, model, "parallel.float8.")
    return mistakes + rules.compile_mistakes(config.compile, "parallel.compile.")


def _blocks_mistakes(blocks: int, mode: str, there_are: int) -> list[str]:
    if not 0 <= blocks <= there_are:
        return [
            f"parallel.activation_checkpoint_blocks={blocks} must be auto (all) or a number of blocks: there are "
            f"{there_are}"
        ]
    if mode in ("auto", "none"):
        return [
            f"parallel.activation_checkpoint_blocks={blocks} is for an activation_checkpoint, which is {mode}: name "
            "one, or use auto"
        ]
    return []


def _make_mesh(config: ParallelConfig, world_size: int) -> tuple[MeshPlan, list[str]]:
    """Resolve the degrees; -1 takes what the others leave. Also the mistakes found on the way."""
    replicate, tp = _resolve(config.dp_replicate, 1), _resolve(config.tp, 1)
    shard = _resolve(config.dp_shard, -1)
    mistakes = [
        f"parallel.{axis}={degree} must be at least "
        f"1{' (or -1: all that is left)' if axis == 'dp_shard' else ''}"
        for axis, degree in zip(AXES, (replicate, shard, tp), strict=True)
        if degree < 1 and not (axis == "dp_shard" and degree == -1)
    ]
    if mistakes:
        return MeshPlan(1, 1, 1), mistakes
    if shard == -1:
        shard = max(world_size // (replicate * tp), 1)
    mesh = MeshPlan(replicate, shard, tp)
    if mesh.world_size != world_size:
        degrees = " x ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES)
        place = f"parallel.strategy={config.strategy}" if config.strategy else "parallel"
        mistakes.append(
            f"{place}: {degrees} is {mesh.world_size} processes, this run has {world_size}: "
            f"start {mesh.world_size}, or change the degrees (dp_shard=-1 takes what is left)"
        )
    return mesh, mistakes


def _make_tensor(config: ParallelConfig, model: ModelUnits, tp: int) -> TensorPlan:
    """The style of every weight; parts that are not split get the styles of whole weights."""
    if tp == 1:
        return TensorPlan(sequence_parallel=False, styles={})
    styles: dict[str, str] = {}
    for part, table in model.styles.items():
        styles |= split_styles(table, whole=part not in config.tp_modules, gathered=not config.loss_parallel)
    return TensorPlan(config.sequence_parallel, styles)


def _make_units(config: ParallelConfig, model: ModelUnits, job: RunShape) -> tuple[UnitPlan, ...]:
    groups = _join_small(model.units, model, config.unit_min_params)
    mode = _resolve(config.activation_checkpoint, "none")
    most = _resolve(config.activation_checkpoint_blocks, len(groups))
    every, ops = 0, tuple[str, ...]()
    if mode == "selective":
        every, ops = (
            blocks_of_every(config.selective_policy),
            saved_ops(config.selective_policy, model.attention_ops),
        )
    units, blocks = [], 0
    for modules in groups:
        here = mode if model.checkpointed.issuperset(modules) else "none"
        if here != "none":
            blocks += 1
            if every:
                here = "full" if blocks % every == 0 else "none"
            if blocks > most:
                here = "none"
        units.append(
            UnitPlan(
                modules=modules,
                # The forward's last unit is the backward's first: freeing it in between would gather it twice
                # in a row.
                reshard_after_forward=modules != groups[-1] and _resolve(config.reshard_after_forward, True),
                forward_prefetch=_resolve(config.forward_prefetch, 1),
                backward_prefetch=_resolve(config.backward_prefetch, 1),
                activation_checkpoint=here,
                saved_ops=ops if here == "selective" else (),
                activation_budget=config.activation_budget if here == "budget" else 1.0,
                compiled=config.compile.enabled and not model.compiled.isdisjoint(modules),
                param_dtype=_resolve(config.param_dtype, job.param_dtype),
                reduce_dtype=config.reduce_dtype,
                output_dtype="same",
            )
        )
    return tuple(units)


def _join_small(units: Sequence[tuple[str, ...]], model: ModelUnits, least: int) -> list[tuple[str, ...]]:
    """Neighbouring blocks joined, in order, until each unit has at least `least` parameters (the last may
    have fewer). Embedding and head stay apart from the blocks, which alone are checkpointed."""
    joined: list[tuple[str, ...]] = []
    for unit in units:
        blocks = joined and model.checkpointed.issuperset(joined[-1] + unit)
        if blocks and sum(model.modules[name] for name in joined[-1]) < least:
            joined[-1] += unit
        else:
            joined.append(unit)
    return joined
