"""All rules that a plan must keep, wherever it comes from, and whether it fits a model and a number of
processes."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan import rules
from meshwright.parallel.plan.float8_rules import float8_mistakes
from meshwright.parallel.plan.mistakes import Mistake, contradictions, file_line
from meshwright.parallel.plan.rules import nearest, split_styles
from meshwright.parallel.plan.schema import (
    ACTIVATION_CHECKPOINTS,
    DTYPES,
    MeshPlan,
    ModelUnits,
    Plan,
    UnitPlan,
    find_style,
    regathered,
)
from meshwright.parallel.plan.selective_policy import is_op


def validate(plan: Plan, model: ModelUnits, world_size: int, seq_len: int) -> list[Mistake]:
    """What keeps a plan from making sense, or from fitting this model and number of processes."""
    mistakes = [*_mesh_mistakes(plan.mesh, world_size)]
    if plan.micro_batch_size < 1:
        mistakes.append(Mistake("micro_batch_size", f"={plan.micro_batch_size} must be at least 1"))
    mistakes += rules.compile_mistakes(plan.compile)
    mistakes += rules.dtype_mistakes("storage_dtype", plan.storage_dtype)
    mistakes += rules.storage_mistakes(plan)
    mistakes += rules.kernel_mistakes(plan, model)
    if structure := [*_structure_mistakes(plan, model)]:
        return mistakes + structure  # the rest asks for the units' order, and names modules
    mistakes += _style_mistakes(plan, model, seq_len)
    mesh_fits = not any(mistake.field.startswith("mesh") for mistake in mistakes)
    mistakes += rules.async_tp_mistakes(plan)
    mistakes += float8_mistakes(plan, model, mesh_fits)
    mistakes += _all_units_mistakes(plan, model)
    mistakes += _dtype_chain_mistakes(plan)
    return mistakes


def plan_file_mistakes(
    plan: Plan, path: Path, config: ParallelConfig, model: ModelUnits, world_size: int, seq_len: int
) -> list[str]:
    """A line for each mistake in a plan file, and for each key of the config beside it that says other."""
    mistakes = validate(plan, model, world_size, seq_len)
    return contradictions(config, plan, model) + [f"plan file {path}: {file_line(m)}" for m in mistakes]


def _mesh_mistakes(mesh: MeshPlan, world_size: int) -> Iterator[Mistake]:
    low = {axis: degree for axis, degree in vars(mesh).items() if degree < 1}
    for axis, degree in low.items():
        says = f"={degree} must be at least 1"
        left = " (or -1: all that is left)" if axis == "dp_shard" else ""
        yield Mistake(f"mesh.{axis}", says, of_keys=says + left)
    if not low and mesh.world_size != world_size:
        here, degrees = f"{mesh.world_size} processes, this run has {world_size}", vars(mesh).items()
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees)
        yield Mistake(
            "mesh",
            f"the plan's mesh is for {here}: start that many, or make a new plan",
            of_keys=f": {product} is {here}: start {mesh.world_size}, or change the degrees "
            "(dp_shard=-1 takes what is left)",
        )


def _structure_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Whether the plan's modules are the model's, and each is in exactly one unit, in the forward's order."""
    planned, published = plan.modules, tuple(model.modules)
    used = Counter(module for unit in plan.units for module in unit.modules)
    if planned != published:
        odd = _first_difference(planned, published)
        yield Mistake(
            "modules",
            f"the plan's modules are not this model's ({len(planned)} against {len(published)}; first "
            f"difference: {odd}): make a new plan for this model",
        )
    elif wrong := sorted(name for name, n in used.items() if n > 1 or name not in published):
        for name in wrong:
            says = f"module {name} is in {used[name]} units, a module's parameters can be in one"
            if name not in published:
                says = f"this model has no module {name}.{nearest(name, published)}"
            yield Mistake("units.modules", says, (name,))
    elif missing := [name for name in published if name not in used]:
        few = f"{', '.join(missing[:3])}{' ...' if missing[3:] else ''}"
        yield Mistake("units", f": {few} is in no unit: give it one")
    else:
        yield from itertools.islice(_order_mistakes(plan, model), 1)


def _order_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Modules that share a parameter in two units, and units in another order than the forward's."""
    together = [modules for modules in model.units if len(modules) > 1]
    for unit, modules in itertools.product(plan.units, together):
        if 0 < len(set(modules).intersection(unit.modules)) < len(modules):
            yield Mistake(
                "units.modules",
                f"{' and '.join(modules)} share a parameter, so they make one unit",
                (unit.name,),
            )
    place = {module: i for i, module in enumerate(plan.modules)}
    for one, other in itertools.pairwise(plan.units):
        if max(place[module] for module in one.modules) > max(place[module] for module in other.modules):
            yield Mistake(
                "units",
                f"unit {other.name} stands behind {one.name}, but the forward is done with it before: list "
                "units in that order",
            )


def _first_difference(planned: tuple[str, ...], published: tuple[str, ...]) -> str:
    for one, other in zip(planned, published, strict=False):
        if one != other:
            return f"{one} instead of {other}"
    shorter = min(len(planned), len(published))
    return next(iter((*planned[shorter:], *published[shorter:])))


def _all_units_mistakes(plan: Plan, model: ModelUnits) -> list[Mistake]:
    """Mistakes in single units, each once with all the units that make it: an entry of the file may be
    many."""
    units: dict[Mistake, list[str]] = {}
    for unit in plan.units:
        for mistake in _unit_mistakes(plan, unit, model):
            units.setdefault(mistake, []).append(unit.name)
    return [dataclasses.replace(mistake, units=tuple(names)) for mistake, names in units.items()]


def _unit_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits) -> Iterator[Mistake]:
    yield from rules.reshard_mistakes(unit.reshard_after_forward, plan.mesh)
    yield from rules.dtype_mistakes("units.param_dtype", unit.param_dtype)
    yield from rules.dtype_mistakes("units.reduce_dtype", unit.reduce_dtype)
    if unit.output_dtype != "same":
        yield from rules.dtype_mistakes("units.output_dtype", unit.output_dtype)
    yield from _activation_mistakes(plan, unit, model)
    if unit.compiled and model.compiled.isdisjoint(unit.modules):
        yield Mistake("units.compiled", "=true, but nothing in it is compiled by this model: use false")
    if unit.compiled and not plan.compile.enabled:
        yield Mistake("units.compiled", "=true contradicts compile.enabled=false: change one of them")
    yield from _prefetch_mistakes(plan, unit, "forward")
    yield from _prefetch_mistakes(plan, unit, "backward")


def _activation_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits) -> Iterator[Mistake]:
    """Activation checkpointing that there is not, or not for this unit, and what one kind of it needs and the
    others do not."""
    mode, budget, ops = unit.activation_checkpoint, unit.activation_budget, unit.saved_ops
    if mode != "none" and mode in ACTIVATION_CHECKPOINTS and not model.checkpointed.issuperset(unit.modules):
        odd = ", ".join(sorted(set(unit.modules) - model.checkpointed))
        yield Mistake("units.activation_checkpoint", f"={mode} is for blocks, and {odd} is none: use none")
    yield from rules.choice_mistakes("units.activation_checkpoint", mode, ACTIVATION_CHECKPOINTS)
    if mode == "budget":
        yield from rules.budget_mistakes(unit, plan.compile.backend)
    elif budget != 1.0:
        yield Mistake("units.activation_budget", f"={budget} is for activation_checkpoint=budget: use 1.0")
    if mode != "selective" and ops:
        yield Mistake("units.saved_ops", f"={list(ops)} is for activation_checkpoint=selective: use []")
    elif mode == "selective" and not ops:
        yield Mistake(
            "units.saved_ops", "=[] keeps nothing: name operators, or use activation_checkpoint=full"
        )
    for op in ops if mode == "selective" else ():
        if not is_op(op):  # the policies' names are for the config
            yield Mistake(
                "units.saved_ops",
                f": {op!r} is not an operator of this torch: name them one by one, as aten.mm or aten.mm/2",
            )


def _prefetch_mistakes(plan: Plan, unit: UnitPlan, phase: str) -> Iterator[Mistake]:
    """A list of units to prefetch names units that will be gathered later in that phase, in that order, once
    each."""
    key = f"{phase}_prefetch"
    field, asked = f"units.{key}", getattr(unit, key)
    if isinstance(asked, int):
        if asked < 0:
            yield Mistake(field, f"={asked} must be 0 (none) or a number of units ahead")
        return
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    names, by_name = [other.name for other in order], {other.name: other for other in order}
    wrong = []
    for name, times in Counter(asked).items():
        if name not in by_name:
            wrong.append(f"names {name}, which is no unit of this plan.{nearest(name, names)}")
        elif name == unit.name:
            wrong.append("names the unit itself, which is gathered already: leave it out")
        elif names.index(name) < names.index(unit.name):
            wrong.append(f"names {name}, which the {phase} needs before: name later ones")
        elif plan.mesh.dp_shard == 1:
            nothing = "there is nothing to gather, use 0"
            wrong.append(f"names {name}, which dp_shard=1 leaves unsharded: {nothing}")
        elif phase == "backward" and not regathered(by_name[name]):
            wrong.append(
                f"names {name}, which stays gathered after its forward (reshard_after_forward=false): there "
                "is nothing to gather, leave it out"
            )
        if times > 1:
            wrong.append(f"names {name} twice")
    yield from (Mistake(field, f" {says}") for says in wrong)
    if not wrong and (right := sorted(asked, key=names.index)) != list(asked):
        needs = f"is not in the order in which the {phase} needs them: {', '.join(right)}"
        yield Mistake(field, f"={list(asked)} {needs}")


def _dtype_chain_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Each module computes in the dtype that the one before it hands on: nothing casts in between."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    for before, after in itertools.pairwise(plan.modules):
        one, other = unit_of[before], unit_of[after]
        out = one.param_dtype if one.output_dtype == "same" or len(one.modules) > 1 else one.output_dtype
        if one is not other and out != other.param_dtype and {out, other.param_dtype} <= set(DTYPES):
            cast = f"set output_dtype={other.param_dtype} on {one.name}, or " if len(one.modules) == 1 else ""
            yield Mistake(
                "units",
                f"unit {one.name} hands on {out}, but unit {other.name} computes in {other.param_dtype}: "
                f"{cast}give both the same param_dtype",
            )
    for unit in plan.units:
        if unit.output_dtype != "same" and len(unit.modules) > 1:
            yield Mistake(
                "units.output_dtype",
                f"={unit.output_dtype} is for units of one module: use same",
                (unit.name,),
            )
    last = unit_of[plan.modules[-1]]
    if last.output_dtype not in ("same", "float32"):
        yield Mistake(
            "units.output_dtype", f"={last.output_dtype} would round the loss: use same", (last.name,)
        )


def _style_mistakes(plan: Plan, model: ModelUnits, seq_len: int) -> Iterator[Mistake]:
    """The table of tensor-parallel styles names this model's weights, part by part either split or whole."""
    styles, tp, known = plan.tensor.styles, plan.mesh.tp, (*rules.STYLE_NAMES, "loss")
    if tp == 1 and plan.tensor.sequence_parallel:
        yield Mistake(
            "tensor.sequence_parallel", "=true shares tokens out among tp ranks, and tp=1 has one: use false"
        )
    elif tp == 1 and styles:
        yield Mistake("tensor.styles", "tp=1 has no styles: make a new plan")
    elif tp > 1 and not styles and model.styles:
        yield Mistake("tensor.styles", "tp > 1 needs the styles of the weights: make a new plan")
    if tp <= 1 or not styles:
        return
    patterns = [pattern for table in model.styles.values() for pattern in table]
    wrong = [
        f"{p}: {style} is no style.{nearest(style, known)}"
        for p, style in styles.items()
        if style not in known
    ]
    wrong += [
        f"{p} is not one of this model's patterns.{nearest(p, patterns)}" for p in styles if p not in patterns
    ]
    if wrong:
        yield from (Mistake("tensor.styles", says) for says in wrong)
        return
    split = []
    for part, table in model.styles.items():
        allowed = [split_styles(table), split_styles(table, gathered=True), split_styles(table, whole=True)]
        asked = {pattern: style for pattern in table if (style := find_style(plan.tensor, pattern))}
        if asked not in allowed:
            wrong.append(_part_mistake(part, asked, allowed))
        elif asked != allowed[2]:
            split.append(part)
    yield from (Mistake("tensor.styles", says) for says in wrong)
    if not wrong and 0 < len(model.shared_parts.intersection(split)) < len(model.shared_parts):
        share = f"{' and '.join(sorted(model.shared_parts))} share a weight"
        of_keys = f"={split}: {share} in this model, so tensor parallelism splits both or neither"
        yield Mistake("tensor.styles", f"{share}: split both or neither", of_keys=of_keys)
    tokens = seq_len * plan.tensor.sequence_parallel
    yield from rules.tensor_mistakes(tp, split, tokens, model)


def _part_mistake(part: str, asked: dict[str, str], allowed: list[dict[str, str]]) -> str:
    """A part is split or whole in all of its weights: what differs from the nearer of the two."""

    def differences(wanted: dict[str, str]) -> list[str]:
        return [
            f"{pattern} is {asked.get(pattern, 'missing')}, must be {wanted.get(pattern, 'left out')}"
            for pattern in {**asked, **wanted}
            if asked.get(pattern) != wanted.get(pattern)
        ]

    nearer = min(map(differences, allowed), key=len)
    return f"part {part} must be split or whole, all of it: {'; '.join(nearer)}"
