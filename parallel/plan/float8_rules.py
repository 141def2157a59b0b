"""The choice of linears that multiply in float8, and the rules for such a plan."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from meshwright.parallel.config import Float8Config
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.schema import Float8Plan, ModelUnits, Plan, TensorPlan

MULTIPLE = 16  # every dimension of a float8 product must be a multiple of it (torch._scaled_mm)


def make_float8(config: Float8Config, model: ModelUnits, tensor: TensorPlan, tp: int) -> Float8Plan:
    """Choose the linears that match the patterns and whose local part on a tp rank is large enough. A pattern
    that matches none is kept, for the check of the plan to report."""
    if config.recipe == "none":
        return Float8Plan("none", (), config.all_gather)
    large = {
        p for p in model.linears if min(_local_size(p, model.linears[p], tensor.styles, tp)) >= config.min_dim
    }
    chosen = [p for p in _matching(config.linears, model) if p in large]
    unknown = [p for p in dict.fromkeys(config.linears) if not _matching([p], model)]
    return Float8Plan(config.recipe, (*chosen, *unknown), config.all_gather)


def float8_mistakes(plan: Plan, model: ModelUnits, right_mesh: bool) -> Iterator[Mistake]:
    """Check the plan's float8 section; sizes on a rank only if the degrees of the mesh are right."""
    float8, recipe = plan.float8, f"={plan.float8.recipe}"
    if float8.recipe == "none":
        if float8.linears or float8.all_gather:
            yield Mistake(
                "float8.recipe",
                "=none has no linears and gathers nothing in float8: choose a recipe, or use no linears and "
                "all_gather=false",
            )
    elif unknown := [p for p in float8.linears if p not in model.linears]:
        for pattern in unknown:
            known = f"use {', '.join(model.linears)}"
            yield Mistake("float8.linears", f": {pattern} matches no linear of a block: {known}")
    else:
        yield from _size_mistakes(plan, model) if right_mesh else ()
        if float8.recipe == "rowwise" and any(unit.param_dtype == "float32" for unit in plan.units):
            yield Mistake(
                "float8.recipe",
                f"{recipe} returns bfloat16 (torch._scaled_mm), but param_dtype is float32: use "
                "param_dtype=bfloat16",
            )
        if plan.fused_projections:
            yield Mistake(
                "float8.recipe",
                f"{recipe} scales each weight separately, but fused_projections=true multiplies several as "
                "one: use one of the two",
            )
        yield from _gather_mistakes(plan) if float8.all_gather else ()


def _size_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check the sizes of each linear's local part and of its shards."""
    float8, shards = plan.float8, plan.mesh.shards
    if not float8.linears:
        yield Mistake(
            "float8.recipe",
            f"={float8.recipe} multiplies nothing in float8: no linear of a tp rank is large enough: "
            "lower min_dim or tp, or use none",
        )
    for pattern in float8.linears:
        part = _local_size(pattern, model.linears[pattern], plan.tensor.styles, plan.mesh.tp)
        if unaligned := [str(size) for size in part if size % MULTIPLE]:
            yield Mistake(
                "float8.linears",
                f": {pattern} has {' and '.join(unaligned)} inputs or outputs on a rank, but float8 "
                f"products need multiples of {MULTIPLE}: leave it out, or change the model's shape or tp",
            )
        if float8.all_gather and part[0] % shards:
            yield Mistake(
                "float8.all_gather",
                f"=true needs equal shards: dp_shard={plan.mesh.dp_shard} x cp={plan.mesh.cp} must divide "
                f"the {part[0]} outputs of {pattern} on a tp rank, or use false",
            )


def _gather_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Check for plans that FSDP2's all-gather of float8 weights does not support."""
    if plan.float8.recipe == "rowwise":
        yield Mistake(
            "float8.all_gather",
            "=true needs one scale per tensor, but recipe=rowwise has one per row: use "
            "float8.all_gather=false",
        )
    if any(type(unit.reshard_after_forward) is int for unit in plan.units):
        yield Mistake(
            "float8.all_gather",
            "=true does not work with an int reshard_after_forward: FSDP2 does not implement the all-gather "
            "of float8 weights within smaller groups: use reshard_after_forward true or false",
        )


def count_float8(plan: Plan, linears: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of a block's parameters on one tp rank that multiply in float8.

    `linears`: as in ModelUnits.
    """
    return sum(
        prod(_local_size(pattern, linears[pattern], plan.tensor.styles, plan.mesh.tp))
        for pattern in plan.float8.linears
    )


def _matching(patterns: Iterable[str], model: ModelUnits) -> list[str]:
    return [name for name in model.linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _local_size(pattern: str, size: tuple[int, int], styles: Mapping[str, str], tp: int) -> tuple[int, int]:
    """Return the outputs and inputs of a linear's local part on one tp rank."""
    outputs, inputs = size
    style = styles.get(pattern, "")
    return (outputs // tp if style == "colwise" else outputs, inputs // tp if style == "rowwise" else inputs)
