"""Makes a plan from a config and sizes, and resolves every key that is left at auto.

`make_plan` is pure and raises one PlanError that lists all mistakes: those that a plan cannot express, and
those that `validate` finds in the plan.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.parallel.config import TP_MODULES, Auto, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.float8_rules import make_float8
from meshwright.parallel.plan.mistakes import Mistake, describe
from meshwright.parallel.plan.rules import heads_of_rank, nearest, split_styles, splits_tokens
from meshwright.parallel.plan.schema import (
    ContextPlan,
    MeshPlan,
    ModelUnits,
    Plan,
    TensorPlan,
    UnitPlan,
    ends_forward,
    only_look_up,
)
from meshwright.parallel.plan.selective_policy import blocks_of_every, saved_ops
from meshwright.parallel.plan.strategy import resolve_strategy
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.structure import Count, Integer, convert_fields

LOSS_CHUNK_TOKENS = 2048  # large enough for matrix products at full speed


@dataclasses.dataclass(frozen=True)
class RunShape:
    """The sizes of a run that a plan is made for.

    Args:
        world_size: processes
        gpus_per_node: processes that share a node
        seq_len: tokens per sequence
        micro_batch_size: sequences; "auto" is a rank's full share of the global batch, or 1 without one
        global_batch_size: sequences per optimizer step; -1 is one micro batch per data-parallel rank
        attention: the kernel that `auto` resolves to on the devices of the run
        param_dtype: the dtype that `auto` resolves to there
        dynamic: what compile.dynamic=null resolves to; None leaves it to torch
    """

    world_size: Count
    gpus_per_node: Count
    seq_len: Count
    micro_batch_size: Auto | Count = 1
    global_batch_size: Integer = -1
    attention: str = "cpu"
    param_dtype: str = "float32"
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        convert_fields(self, "")


def make_plan(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> Plan:
    """Resolve a config into a plan. Raises PlanError that lists all mistakes, one line each."""
    config, mistakes = _resolve_config(config, model, shape)
    plan = _make_plan(config, model, shape)
    mistakes += validate(plan, model, shape.world_size, shape.seq_len)
    if plan.mesh.world_size == shape.world_size:
        mistakes += _batch_mistakes(plan, shape)
    if mistakes:
        raise PlanError("\n".join(describe(mistake, strategy=config.strategy) for mistake in mistakes))
    return plan


def _resolve_config(
    config: ParallelConfig, model: ModelUnits, shape: RunShape
) -> tuple[ParallelConfig, list[Mistake]]:
    """Return the config with the strategy's settings in its keys, and mistakes that a plan cannot express;
    `validate` finds all others in the plan."""
    mistakes = list[Mistake]()
    if config.strategy:
        inner = _resolve(config.tp, 1) * _resolve(config.cp, 1)
        config, mistakes = resolve_strategy(config, inner, shape.world_size, shape.gpus_per_node)
    for part in dict.fromkeys(() if config.tp_modules == TP_MODULES else config.tp_modules):
        if model.styles and part not in model.styles:
            hint = nearest(part, model.styles) or f" Use {', '.join(model.styles)}."
            mistakes.append(Mistake("parallel.tp_modules", f": {part} is not a part of this model.{hint}"))
    blocks, mode = config.activation_checkpoint_blocks, config.activation_checkpoint
    message = ""
    if blocks != "auto" and blocks > len(model.checkpointed):
        message = f"={blocks} must be auto (all) or a number of blocks from 0 to {len(model.checkpointed)}"
    elif blocks != "auto" and mode in ("auto", "none"):
        message = (
            f"={blocks} needs activation checkpointing, but activation_checkpoint={mode}: set it, or use auto"
        )
    if message:
        mistakes.append(Mistake("parallel.activation_checkpoint_blocks", message))
    return config, mistakes


def _batch_mistakes(plan: Plan, shape: RunShape) -> Iterator[Mistake]:
    """Check that the global batch is a multiple of micro batch size x data-parallel degree."""
    mesh, micro, global_batch = plan.mesh, plan.micro_batch_size, shape.global_batch_size
    per_pass = micro * mesh.data_parallel
    if global_batch != -1 and (global_batch <= 0 or global_batch % per_pass):
        yield Mistake(
            "train.global_batch_size",
            f"={global_batch} must be a multiple of micro_batch_size x data-parallel degree = "
            f"{micro} x {mesh.data_parallel}: the nearest is "
            f"{max(1, round(global_batch / per_pass)) * per_pass}; -1 is one micro batch per rank",
        )


def _make_plan(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> Plan:
    """Make the plan from the keys as they are, right or wrong."""
    mesh = _make_mesh(config, shape.world_size)
    micro_batch_size: Any = shape.micro_batch_size
    if micro_batch_size == "auto":
        micro_batch_size = (
            1 if shape.global_batch_size == -1 else max(1, shape.global_batch_size // mesh.data_parallel)
        )
    per_pass = micro_batch_size * mesh.data_parallel
    tensor = _make_tensor(config, model, mesh.tp)
    context = _make_context(config, model, mesh, tensor)
    gathers = context.exchange == "gather"
    kernel = model.shifted_kernels.get(shape.attention, shape.attention) if gathers else shape.attention
    tokens, dynamic = micro_batch_size * shape.seq_len // mesh.cp, config.compile.dynamic
    return Plan(
        mesh=mesh,
        micro_batch_size=micro_batch_size,
        accumulation=1 if shape.global_batch_size == -1 else shape.global_batch_size // per_pass,
        tensor=tensor,
        cpu_offload=config.cpu_offload,
        storage_dtype=config.storage_dtype,
        attention=_resolve(config.attention, kernel if model.attention_kernels else ""),
        loss_chunk_tokens=_loss_chunk(config, tokens, tensor, has_loss=bool(model.attention_kernels)),
        fused_projections=config.fused_projections,
        async_tp=config.async_tp,
        float8=make_float8(config.float8, model, tensor, mesh.tp),
        compile=dataclasses.replace(config.compile, dynamic=shape.dynamic if dynamic is None else dynamic),
        modules=tuple(model.modules),
        units=_make_units(config, model, shape),
        unsharded=model.unsharded,
        blocks=model.blocks,
        context=context,
    )


def _resolve(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _loss_chunk(config: ParallelConfig, tokens: int, tensor: TensorPlan, has_loss: bool) -> int:
    """Return the number of tokens whose logits exist at the same time; 0 is all.

    Gathered logits, and those of a micro batch no longer than one chunk, are computed in one product, which
    is faster because it is compiled together with the loss.
    """
    unchunked = "gathered_logits" in tensor.styles.values() or tokens <= LOSS_CHUNK_TOKENS or not has_loss
    return int(_resolve(config.loss_chunk_tokens, 0 if unchunked else LOSS_CHUNK_TOKENS))


def _make_mesh(config: ParallelConfig, world_size: int) -> MeshPlan:
    """Return the degrees; dp_shard=-1 takes all processes that the other degrees leave."""
    replicate, tp, cp = (_resolve(degree, 1) for degree in (config.dp_replicate, config.tp, config.cp))
    shard = _resolve(config.dp_shard, -1)
    if shard == -1:
        shard = max(world_size // (replicate * tp * cp), 1)
    return MeshPlan(replicate, shard, tp, cp)


def _make_context(
    config: ParallelConfig, model: ModelUnits, mesh: MeshPlan, tensor: TensorPlan
) -> ContextPlan:
    """Return the exchange around attention: of heads if every rank gets whole ones, else by gathering."""
    if mesh.cp == 1:
        return ContextPlan()
    heads = heads_of_rank(tensor, mesh.tp, model).values()
    possible = all(each % mesh.cp == 0 for each in heads) or not model.shifted_kernels
    return ContextPlan(_resolve(config.cp_exchange, "heads" if possible else "gather"), model.attention_cores)


def on_mesh(plan: Plan, mesh: MeshPlan, config: ParallelConfig, model: ModelUnits) -> Plan:
    """Return the plan on another mesh of as many processes, with the same global batch if the mesh divides
    it."""
    tensor = _make_tensor(config, model, mesh.tp)
    per_pass = plan.micro_batch_size * mesh.data_parallel
    return dataclasses.replace(
        plan,
        mesh=mesh,
        accumulation=plan.global_batch_size // per_pass,
        tensor=tensor,
        context=_make_context(config, model, mesh, tensor),
    )


def _make_tensor(config: ParallelConfig, model: ModelUnits, tp: int) -> TensorPlan:
    """Return the style of every weight; parts that are not split get the `whole_` styles."""
    if tp == 1:
        return TensorPlan(sequence_parallel=False, styles={})
    styles: dict[str, str] = {}
    for part, table in model.styles.items():
        unsplit = part in TP_MODULES and part not in config.tp_modules
        styles |= split_styles(table, unsplit=unsplit, gathered=not config.loss_parallel)
    return TensorPlan(config.sequence_parallel and splits_tokens(styles), styles)


def _make_units(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> tuple[UnitPlan, ...]:
    groups = _join_small(model.units, model, config.unit_min_params)
    units = [
        UnitPlan(
            modules=modules,
            reshard_after_forward=not ends_forward(modules, model.modules)
            and _resolve(config.reshard_after_forward, True),
            unshard_in_backward=not only_look_up(modules, model),
            reshard_after_backward=_resolve(config.reshard_after_backward, True),
            reduce_gradients=_resolve(config.reduce_gradients, "every_micro_batch"),
            forward_prefetch=_resolve(config.forward_prefetch, 1),
            backward_prefetch=_resolve(config.backward_prefetch, 1),
            activation_checkpoint="none",
            saved_ops=(),
            activation_budget=1.0,
            compiled=config.compile.enabled and not model.compiled.isdisjoint(modules),
            param_dtype=_resolve(config.param_dtype, shape.param_dtype),
            reduce_dtype=config.reduce_dtype,
            output_dtype="same",
        )
        for modules in groups
    ]
    blocks = _resolve(config.activation_checkpoint_blocks, len(groups))
    mode = _resolve(config.activation_checkpoint, "none")
    return with_activation_checkpoint(units, mode, config, model, blocks)


def with_activation_checkpoint(
    units: Sequence[UnitPlan], mode: str, config: ParallelConfig, model: ModelUnits, most: int | None = None
) -> tuple[UnitPlan, ...]:
    """Return the units with a mode of activation checkpointing, and with the config's policy or budget for
    it, in the first `most` units of blocks (None: in all)."""
    every, ops = 0, tuple[str, ...]()
    if mode == "selective":
        every = blocks_of_every(config.selective_policy)
        ops = saved_ops(config.selective_policy, model.attention_ops)
    changed, blocks = [], 0
    for unit in units:
        of_blocks = model.checkpointed.issuperset(unit.modules)
        blocks += of_blocks
        unit_mode = mode if of_blocks and (most is None or blocks <= most) else "none"
        if every and unit_mode != "none":
            unit_mode = "full" if blocks % every == 0 else "none"
        settings = {
            "activation_checkpoint": unit_mode,
            "saved_ops": ops if unit_mode == "selective" else (),
            "activation_budget": config.activation_budget if unit_mode == "budget" else 1.0,
        }
        changed.append(dataclasses.replace(unit, **settings))  # type: ignore[arg-type]
    return tuple(changed)


def count_blocks(config: ParallelConfig, model: ModelUnits) -> int:
    """Return the number of units that can use activation checkpointing."""
    groups = _join_small(model.units, model, config.unit_min_params)
    return sum(map(model.checkpointed.issuperset, groups))


def _join_small(
    units: Sequence[tuple[str, ...]], model: ModelUnits, min_params: int
) -> list[tuple[str, ...]]:
    """Join neighboring blocks, in order, until each unit has at least `min_params` parameters (the last may
    have fewer). Embedding and head stay separate from the blocks: only blocks are activation-checkpointed."""
    joined: list[tuple[str, ...]] = []
    for unit in units:
        blocks = joined and model.checkpointed.issuperset(joined[-1] + unit)
        if blocks and sum(model.modules[name] for name in joined[-1]) < min_params:
            joined[-1] += unit
        else:
            joined.append(unit)
    return joined
