"""Which linears multiply in float8, and what such a plan must keep to."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from meshwright.parallel.config import Float8Config
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.rules import choice_mistakes
from meshwright.parallel.plan.schema import Float8Plan, ModelUnits, Plan, TensorPlan

RECIPES = ("tensorwise", "rowwise")
MULTIPLE = 16  # of every dim of a product in float8: torch._scaled_mm


def make_float8(asked: Float8Config, model: ModelUnits, tensor: TensorPlan, tp: int) -> Float8Plan:
    """The linears whose names are asked for, and of which one tp rank's part is large enough."""
    if asked.recipe == "none":
        return Float8Plan("none", (), asked.all_gather)
    large = {p for p in model.linears if min(_part(p, model.linears[p], tensor.styles, tp)) >= asked.min_dim}
    chosen = tuple(p for p in _matching(asked.linears, model) if p in large)
    return Float8Plan(asked.recipe, chosen, asked.all_gather)


def asked_mistakes(asked: Float8Config, model: ModelUnits) -> Iterator[Mistake]:
    """Patterns that are the name of nothing, and a size that is none: no linears can be chosen."""
    if asked.recipe != "none" and asked.min_dim < 1:
        yield Mistake("parallel.float8.min_dim", f"={asked.min_dim} must be at least 1")
    for pattern in dict.fromkeys(asked.linears) if asked.recipe != "none" else ():
        if not _matching([pattern], model):
            there_are = f"There are {', '.join(model.linears)}"
            yield Mistake("float8.linears", f": {pattern} is the name of no linear in a block. {there_are}")


def float8_mistakes(plan: Plan, model: ModelUnits, mesh_fits: bool) -> Iterator[Mistake]:
    """Whether a plan's products can be in float8. Without a mesh that fits, nothing is said of the sizes that
    follow from its degrees."""
    chosen, recipe = plan.float8, f"={plan.float8.recipe}"
    if chosen.recipe == "none":
        if chosen.linears or chosen.all_gather:
            yield Mistake(
                "float8.recipe",
                "=none has no linears and sends nothing in float8: use a recipe, or no linears and "
                "all_gather=false",
            )
    elif chosen.recipe not in RECIPES:
        yield from choice_mistakes("float8.recipe", chosen.recipe, ("none", *RECIPES))
    elif unknown := [p for p in chosen.linears if p not in model.linears]:
        yield Mistake("float8.linears", f": {unknown[0]} is none of {', '.join(model.linears)}")
    else:
        yield from _size_mistakes(plan, model) if mesh_fits else ()
        if chosen.recipe == "rowwise" and any(unit.param_dtype == "float32" for unit in plan.units):
            yield Mistake(
                "float8.recipe",
                f"{recipe} gives bfloat16 (torch._scaled_mm), and param_dtype is float32: use bfloat16",
            )
        if plan.fused_projections:
            yield Mistake(
                "float8.recipe",
                f"{recipe} scales each weight, and fused_projections=true multiplies several as one: use one "
                "of the two",
            )
        yield from _gather_mistakes(plan) if chosen.all_gather else ()


def _size_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Parts of a tp rank, and shards of them, that no product or all-gather in float8 takes."""
    chosen, shard = plan.float8, plan.mesh.dp_shard
    if not chosen.linears:
        yield Mistake(
            "float8.recipe",
            f"={chosen.recipe} multiplies nothing in float8: no linear of a tp rank is large enough. "
            "Lower min_dim or tp, or use none",
        )
    for pattern in chosen.linears:
        part = _part(pattern, model.linears[pattern], plan.tensor.styles, plan.mesh.tp)
        if odd := [str(dim) for dim in part if dim % MULTIPLE]:
            yield Mistake(
                "float8.linears",
                f": {pattern} has {' and '.join(odd)} inputs or outputs on a rank, and float8 "
                f"products need multiples of {MULTIPLE}: leave it out, or change the model's shape or tp",
            )
        if chosen.all_gather and part[0] % shard:
            yield Mistake(
                "float8.all_gather",
                f"=true needs equal shards: dp_shard={shard} must divide the {part[0]} outputs of "
                f"{pattern} on a tp rank, or use false",
            )


def _gather_mistakes(plan: Plan) -> Iterator[Mistake]:
    """What FSDP2's all-gather of float8 weights cannot do."""
    if plan.float8.recipe == "rowwise":
        yield Mistake(
            "float8.all_gather",
            "=true needs one scale for a tensor, and recipe=rowwise has one for a row: use false",
        )
    if any(type(unit.reshard_after_forward) is int for unit in plan.units):
        yield Mistake(
            "float8.all_gather",
            "=true cannot be gathered again within smaller groups, which torch's FSDP2 has not "
            "written: use reshard_after_forward true or false",
        )


def count_float8(plan: Plan, linears: Mapping[str, tuple[int, int]]) -> int:
    """Parameters of a block, on one tp rank, whose products are in float8. `linears` as in ModelUnits."""
    return sum(
        prod(_part(pattern, linears[pattern], plan.tensor.styles, plan.mesh.tp))
        for pattern in plan.float8.linears
    )


def _matching(patterns: Iterable[str], model: ModelUnits) -> list[str]:
    return [name for name in model.linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _part(pattern: str, size: tuple[int, int], styles: Mapping[str, str], tp: int) -> tuple[int, int]:
    """Outputs and inputs of one tp rank's part of a linear."""
    outputs, inputs = size
    style, tp = styles.get(pattern, ""), max(tp, 1)
    return (outputs // tp if style == "colwise" else outputs, inputs // tp if style == "rowwise" else inputs)
