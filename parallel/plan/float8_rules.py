"""Which linears multiply in float8, and what such a plan must keep to."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from math import prod

from meshwright.parallel.config import Float8Config
from meshwright.parallel.plan.schema import Float8Plan, ModelUnits, Plan, TensorPlan

MULTIPLE = 16  # of every dim of a product in float8: torch._scaled_mm


def make_float8(asked: Float8Config, model: ModelUnits, tensor: TensorPlan, tp: int) -> Float8Plan:
    """The linears whose names are asked for, and of which one tp rank's part is large enough."""
    if asked.recipe == "none":
        return Float8Plan("none", (), asked.all_gather, ())
    large = {p for p in model.linears if min(_part(p, model.linears[p], tensor.styles, tp)) >= asked.min_dim}
    chosen = tuple(p for p in _matching(asked.linears, model) if p in large)
    tokens = _gathered_tokens(chosen, model, tensor) if asked.all_gather and tensor.sequence_parallel else ()
    return Float8Plan(asked.recipe, chosen, asked.all_gather, tokens)


def _gathered_tokens(chosen: Collection[str], model: ModelUnits, tensor: TensorPlan) -> tuple[str, ...]:
    """Norms before split parts all of whose linears are chosen, and chosen linears behind which gradients are
    gathered."""
    norms = [
        pattern
        for table in model.styles.values()
        for pattern, style in table.items()
        if style == "sequence"
        and tensor.styles.get(pattern) == style
        and {p for p, other in table.items() if other == "colwise"} & model.linears.keys() <= set(chosen)
        and "colwise" in table.values()
    ]
    return (*norms, *(pattern for pattern in chosen if tensor.styles.get(pattern) == "rowwise"))


def key_mistakes(asked: Float8Config, model: ModelUnits, place: str) -> list[str]:
    """Patterns that are the name of nothing, and a size that is none."""
    mistakes = [f"{place}min_dim={asked.min_dim} must be at least 1"] if asked.min_dim < 1 else []
    return mistakes + [
        f"{place}linears: {pattern} is the name of no linear in a block. There are {', '.join(model.linears)}"
        for pattern in asked.linears
        if not _matching([pattern], model)
    ]


def float8_mistakes(plan: Plan, model: ModelUnits, place: str) -> list[str]:
    """Whether a plan's products can be in float8. `place` is what stands in front of its keys."""
    chosen = plan.float8
    if chosen.recipe not in ("none", "tensorwise", "rowwise"):
        return [f"{place}recipe={chosen.recipe} is not one of none, tensorwise, rowwise"]
    if chosen.recipe == "none":
        says_more = bool(chosen.linears or chosen.all_gather or chosen.tokens)
        return [
            f"{place}recipe=none has no linears and sends nothing in float8: use a recipe, or no linears and "
            "all_gather=false"
        ] * says_more
    if unknown := [p for p in chosen.linears if p not in model.linears]:
        return [f"{place}linears: {unknown[0]} is none of {', '.join(model.linears)}"]
    mistakes = []
    if not chosen.linears:
        mistakes.append(
            f"{place}recipe={chosen.recipe} multiplies nothing in float8: no linear of a tp rank is large "
            "enough. Lower min_dim or tp, or use none"
        )
    for pattern in chosen.linears:
        part = _part(pattern, model.linears[pattern], plan.tensor.styles, plan.mesh.tp)
        if odd := [str(dim) for dim in part if dim % MULTIPLE]:
            mistakes.append(
                f"{place}linears: {pattern} has {' and '.join(odd)} inputs or outputs on a rank, and float8 "
                f"products need multiples of {MULTIPLE}: leave it out, or change the model's shape or tp"
            )
    if chosen.recipe == "rowwise" and any(unit.param_dtype == "float32" for unit in plan.units):
        mistakes.append(
            f"{place}recipe=rowwise gives bfloat16 (torch._scaled_mm), and param_dtype is float32: use "
            "bfloat16"
        )
    if plan.fused_projections:
        mistakes.append(
            f"{place}recipe={chosen.recipe} scales each weight, and fused_projections=true multiplies "
            "several as one: use one of the two"
        )
    for pattern in chosen.tokens:
        if (
            plan.tensor.styles.get(pattern) not in ("sequence", "rowwise")
            or not plan.tensor.sequence_parallel
        ):
            mistakes.append(f"{place}tokens: tensor parallelism gathers nothing at {pattern}: leave it out")
    return mistakes + (_gather_mistakes(plan, model, place) if chosen.all_gather else [])


def count_float8(plan: Plan, linears: Mapping[str, tuple[int, int]]) -> int:
    """Parameters of a block, on one tp rank, whose products are in float8. `linears` as in ModelUnits."""
    return sum(
        prod(_part(pattern, linears[pattern], plan.tensor.styles, plan.mesh.tp))
        for pattern in plan.float8.linears
    )


def _gather_mistakes(plan: Plan, model: ModelUnits, place: str) -> list[str]:
    """What FSDP2's all-gather of float8 weights cannot do."""
    mistakes = []
    if plan.float8.recipe == "rowwise":
        mistakes.append(
            f"{place}all_gather=true needs one scale for a tensor, and recipe=rowwise has one for a row: use "
            "false"
        )
    if any(type(unit.reshard_after_forward) is int for unit in plan.units):
        mistakes.append(
            f"{place}all_gather=true cannot be gathered again within smaller groups, which torch's FSDP2 has "
            "not written: use reshard_after_forward true or false"
        )
    for pattern in plan.float8.linears:
        rows = _part(pattern, model.linears[pattern], plan.tensor.styles, plan.mesh.tp)[0]
        if rows % plan.mesh.dp_shard:
            mistakes.append(
                f"{place}all_gather=true needs equal shards: dp_shard={plan.mesh.dp_shard} must divide the "
                f"{rows} outputs of {pattern} on a tp rank, or use false"
            )
    return mistakes


def _matching(patterns: Iterable[str], model: ModelUnits) -> list[str]:
    return [name for name in model.linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _part(pattern: str, size: tuple[int, int], styles: Mapping[str, str], tp: int) -> tuple[int, int]:
    """Outputs and inputs of one tp rank's part of a linear."""
    outputs, inputs = size
    style = styles.get(pattern, "")
    return (outputs // tp if style == "colwise" else outputs, inputs // tp if style == "rowwise" else inputs)
