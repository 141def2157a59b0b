"""Config and sizes in, plan out: every choice that a key leaves open is made here.

`make_plan` is pure, and raises one PlanError that lists all mistakes: what no plan can say, and what
`validate` finds in the plan.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.parallel.config import Float8Config, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.float8_rules import asked_mistakes, make_float8
from meshwright.parallel.plan.mistakes import Mistake, key_line
from meshwright.parallel.plan.rules import nearest, split_styles
from meshwright.parallel.plan.schema import MeshPlan, ModelUnits, Plan, TensorPlan, UnitPlan
from meshwright.parallel.plan.selective_policy import blocks_of_every, policy_mistakes, saved_ops
from meshwright.parallel.plan.strategy import resolve_strategy
from meshwright.parallel.plan.validate import validate

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


def make_plan(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> Plan:
    """Resolve what was asked into what is done. Raises PlanError with all mistakes in one report."""
    config, mistakes = _settle(config, model, shape)
    plan = _make_plan(config, model, shape)
    found = validate(plan, model, shape.world_size, shape.seq_len)
    if plan.mesh.world_size != shape.world_size and config.dp_shard in ("auto", -1):
        # nobody asked for this dp_shard, which will be another: what must divide it is not a second mistake
        found = [mistake for mistake in found if mistake.field != "units.reshard_after_forward"]
    mistakes += [*found, *_batch_mistakes(plan, shape)]
    if mistakes:
        raise PlanError("\n".join(key_line(mistake, config.strategy) for mistake in mistakes))
    return plan


def _settle(
    config: ParallelConfig, model: ModelUnits, shape: RunShape
) -> tuple[ParallelConfig, list[Mistake]]:
    """The config with the strategy in its keys and without what no plan can say, and the mistakes in that.
    `validate` finds all others, in the plan."""
    mistakes = list[Mistake]()
    if config.strategy:
        tp = max(_resolve(config.tp, 1), 1)
        config, mistakes = resolve_strategy(config, tp, shape.world_size, shape.gpus_per_node)
    for part in dict.fromkeys(config.tp_modules):
        if model.styles and part not in model.styles:
            hint = nearest(part, model.styles) or f" It has {', '.join(model.styles)}."
            mistakes.append(Mistake("parallel.tp_modules", f": {part} is not a part of this model.{hint}"))
    if config.unit_min_params < 0:
        mistakes.append(
            Mistake(
                "parallel.unit_min_params", f"={config.unit_min_params} must be 0 (a unit per block) or more"
            )
        )
    blocks, mode = config.activation_checkpoint_blocks, config.activation_checkpoint
    says = ""
    if blocks != "auto" and not 0 <= blocks <= len(model.checkpointed):
        says = f"={blocks} must be auto (all) or a number of blocks: there are {len(model.checkpointed)}"
    elif blocks != "auto" and mode in ("auto", "none"):
        says = f"={blocks} is for an activation_checkpoint, which is {mode}: name one, or use auto"
    if says:
        mistakes.append(Mistake("parallel.activation_checkpoint_blocks", says))
        config = dataclasses.replace(config, activation_checkpoint_blocks="auto")
    if mode == "selective" and (wrong := [*policy_mistakes(config.selective_policy, model.attention_ops)]):
        mistakes += wrong
        config = dataclasses.replace(config, activation_checkpoint="none")
    if wrong := [*asked_mistakes(config.float8, model)]:
        mistakes += wrong
        config = dataclasses.replace(config, float8=Float8Config())
    return config, mistakes


def _batch_mistakes(plan: Plan, shape: RunShape) -> Iterator[Mistake]:
    """Sequences of a micro batch on every rank, several times over, are the global batch. A mesh or a micro
    batch that `validate` refuses is not two mistakes."""
    mesh, micro, asked = plan.mesh, plan.micro_batch_size, shape.global_batch_size
    if micro < 1 or min(vars(mesh).values()) < 1 or mesh.world_size != shape.world_size:
        return
    once = micro * mesh.data_parallel
    if asked != -1 and (asked <= 0 or asked % once):
        yield Mistake(
            "train.global_batch_size",
            f"={asked} must be a multiple of micro_batch_size x data-parallel degree = "
            f"{micro} x {mesh.data_parallel}: the nearest is {max(1, round(asked / once)) * once}, or use -1",
        )


def _make_plan(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> Plan:
    """All that the keys say, right or wrong."""
    mesh = _make_mesh(config, shape.world_size)
    data_parallel = max(mesh.data_parallel, 1)
    micro_batch_size: Any = shape.micro_batch_size
    if micro_batch_size == "auto":
        micro_batch_size = (
            1 if shape.global_batch_size == -1 else max(1, shape.global_batch_size // data_parallel)
        )
    once = max(micro_batch_size, 1) * data_parallel
    tensor = _make_tensor(config, model, mesh.tp)
    return Plan(
        mesh=mesh,
        micro_batch_size=micro_batch_size,
        accumulation=1 if shape.global_batch_size == -1 else shape.global_batch_size // once,
        tensor=tensor,
        cpu_offload=config.cpu_offload,
        storage_dtype=config.storage_dtype,
        attention=_resolve(config.attention, shape.attention),
        loss_chunk_tokens=_loss_chunk(config, micro_batch_size * shape.seq_len, tensor),
        fused_projections=config.fused_projections,
        async_tp=config.async_tp,
        float8=make_float8(config.float8, model, tensor, mesh.tp),
        compile=config.compile,
        modules=tuple(model.modules),
        units=_make_units(config, model, shape),
    )


def _resolve(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _loss_chunk(config: ParallelConfig, tokens: int, tensor: TensorPlan) -> int:
    """Tokens whose logits are there at a time. Gathered logits, and those of a micro batch no longer than a
    chunk, are made at once: compiled with what follows, that is faster."""
    at_once = "gathered_logits" in tensor.styles.values() or tokens <= LOSS_CHUNK_TOKENS
    return int(_resolve(config.loss_chunk_tokens, 0 if at_once else LOSS_CHUNK_TOKENS))


def _make_mesh(config: ParallelConfig, world_size: int) -> MeshPlan:
    """The degrees; a dp_shard of -1 takes what the others leave."""
    replicate, tp = _resolve(config.dp_replicate, 1), _resolve(config.tp, 1)
    shard = _resolve(config.dp_shard, -1)
    if shard == -1:
        shard = max(world_size // max(replicate * tp, 1), 1)
    return MeshPlan(replicate, shard, tp)


def _make_tensor(config: ParallelConfig, model: ModelUnits, tp: int) -> TensorPlan:
    """The style of every weight; parts that are not split get the styles of whole weights."""
    if tp <= 1:
        return TensorPlan(sequence_parallel=False, styles={})
    styles: dict[str, str] = {}
    for part, table in model.styles.items():
        styles |= split_styles(table, whole=part not in config.tp_modules, gathered=not config.loss_parallel)
    return TensorPlan(config.sequence_parallel, styles)


def _make_units(config: ParallelConfig, model: ModelUnits, shape: RunShape) -> tuple[UnitPlan, ...]:
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
                param_dtype=_resolve(config.param_dtype, shape.param_dtype),
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
