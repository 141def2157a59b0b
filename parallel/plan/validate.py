"""Every rule that a plan read from a file must keep, and whether it fits a model and a number of processes.

`make_plan` keeps them by construction, after checking the keys it starts from.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan import rules
from meshwright.parallel.plan.float8_rules import float8_mistakes
from meshwright.parallel.plan.rules import async_tp_mistakes, budget_mistakes, split_styles
from meshwright.parallel.plan.schema import (
    ACTIVATION_CHECKPOINTS,
    AXES,
    DTYPES,
    ModelUnits,
    Plan,
    UnitPlan,
    find_style,
    regathered,
)
from meshwright.parallel.plan.selective_policy import op_mistakes, saved_ops

_CHOOSE_LINEARS = (("float8", "linears"), ("float8", "min_dim"))
_OF_ALL_UNITS = (
    "cpu_offload",
    "storage_dtype",
    "attention",
    "loss_chunk_tokens",
    "fused_projections",
    "async_tp",
)


def check_plan(plan: Plan, model: ModelUnits, world_size: int, seq_len: int) -> None:
    """Raise PlanError with all mistakes unless `plan` makes sense and fits this model and number of
    processes."""
    mistakes = rules.compile_mistakes(plan.compile, "compile.") + _size_mistakes(plan, world_size)
    mistakes += rules.dtype_mistakes(plan.storage_dtype, "storage_dtype")
    mistakes += rules.storage_mistakes(plan.storage_dtype, [unit.param_dtype for unit in plan.units], "")
    gathered = "gathered_logits" in plan.tensor.styles.values()
    mistakes += rules.kernel_mistakes(plan.attention, plan.loss_chunk_tokens, gathered, model, "")
    model_mistakes = _model_mistakes(plan, model)
    mistakes += model_mistakes
    if not model_mistakes:  # the rest asks for the units' order, and names modules
        mistakes += async_tp_mistakes(plan, "") if plan.async_tp else []
        mistakes += float8_mistakes(plan, model, "float8: ")
        mistakes += _all_units_mistakes(plan, model)
        mistakes += _dtype_chain_mistakes(plan) + _style_mistakes(plan, model, seq_len)
    if mistakes:
        raise PlanError("\n".join(mistakes))


def key_mistakes(config: ParallelConfig, plan: Plan, model: ModelUnits) -> list[str]:
    """Keys of the config that say other than the plan file beside them, which decides: they would be ignored
    in silence."""
    default, mistakes = ParallelConfig(), []
    way_out = "leave the key out, or edit the file"
    for key in (
        field.name for field in dataclasses.fields(config) if field.name not in ("plan", "compile", "float8")
    ):
        asked = getattr(config, key)
        if asked in (getattr(default, key), "auto") or (key == "dp_shard" and asked == -1):
            continue
        planned = _planned(key, plan, model)
        if not planned:
            mistakes.append(
                f"parallel.{key}={_word(asked)} is decided by the plan file {config.plan}: {way_out}"
            )
        elif repr(asked) not in map(repr, planned):  # repr, because True == 1
            found = ", ".join(dict.fromkeys(map(_word, planned)))
            mistakes.append(
                f"parallel.{key}={_word(asked)}, but the plan file {config.plan} has {found}: {way_out}"
            )
    sections: dict[str, object] = {"compile": plan.compile, "float8": plan.float8}
    for section, whole in sections.items():
        for key, asked in vars(getattr(config, section)).items():
            if (section, key) in _CHOOSE_LINEARS:  # a file has the linears that they chose
                continue
            if asked != getattr(getattr(default, section), key) and asked != (value := getattr(whole, key)):
                mistakes.append(
                    f"parallel.{section}.{key}={_word(asked)}, but the plan file {config.plan} has "
                    f"{_word(value)}: {way_out}"
                )
    return mistakes


def _planned(key: str, plan: Plan, model: ModelUnits) -> list[object]:
    """What a plan has for a key of the config, in all units that the key is for; [] if a plan does not say it
    so."""
    units: Sequence[object] = plan.units
    if key == "reshard_after_forward":
        units = plan.units[:-1]  # the last is never resharded
    if key in ("activation_checkpoint", "activation_budget"):
        units = [unit for unit in plan.units if model.checkpointed.issuperset(unit.modules)]
    whole = (
        plan.mesh
        if key in AXES
        else plan.tensor
        if key == "sequence_parallel"
        else plan
        if key in _OF_ALL_UNITS
        else None
    )
    return [getattr(holder, key) for holder in (units if whole is None else [whole]) if hasattr(holder, key)]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size_mistakes(plan: Plan, world_size: int) -> list[str]:
    mistakes = [
        f"mesh: {axis}={degree} must be at least 1" for axis, degree in vars(plan.mesh).items() if degree < 1
    ]
    if not mistakes and plan.mesh.world_size != world_size:
        mistakes.append(
            f"the plan's mesh is for {plan.mesh.world_size} processes, this run has {world_size}: "
            "start that many, or make a new plan"
        )
    return mistakes


def _model_mistakes(plan: Plan, model: ModelUnits) -> list[str]:
    """Whether the plan's modules are the model's, and each is in exactly one unit."""
    if plan.modules != tuple(model.modules):
        odd = _first_difference(plan.modules, tuple(model.modules))
        return [
            f"the plan's modules are not this model's ({len(plan.modules)} against {len(model.modules)}; "
            f"first difference: {odd}): make a new plan for this model"
        ]
    used = Counter(module for unit in plan.units for module in unit.modules)
    mistakes = [
        f"unit {name}: module {name} is in {n} units, a module's parameters can be in one"
        for name, n in used.items()
        if n > 1
    ]
    for name in used.keys() - set(plan.modules):
        mistakes.append(f"unit {name}: this model has no module {name}.{rules.nearest(name, plan.modules)}")
    missing = [name for name in plan.modules if name not in used]
    if missing and not mistakes:  # a wrong name is not two mistakes
        mistakes.append(
            f"units: {', '.join(missing[:3])}{' ...' if missing[3:] else ''} is in no unit: give it one"
        )
    if mistakes:
        return sorted(mistakes)
    together = {module: unit for unit in model.units for module in unit if len(unit) > 1}
    for unit in plan.units:
        for module in unit.modules:
            if not set(together.get(module, ())) <= set(unit.modules):
                return [
                    f"unit {unit.name}: {' and '.join(together[module])} share a parameter, so they make one "
                    "unit"
                ]
    ends = [max(plan.modules.index(module) for module in unit.modules) for unit in plan.units]
    if ends != sorted(ends):
        i = next(i for i in range(1, len(ends)) if ends[i] < ends[i - 1])
        return [
            f"unit {plan.units[i].name} stands behind {plan.units[i - 1].name}, but the forward is done with "
            "it before: list units in that order"
        ]
    return []


def _first_difference(planned: tuple[str, ...], published: tuple[str, ...]) -> str:
    for one, other in zip(planned, published, strict=False):
        if one != other:
            return f"{one} instead of {other}"
    shorter = min(len(planned), len(published))
    return next(iter((*planned[shorter:], *published[shorter:])))


def _all_units_mistakes(plan: Plan, model: ModelUnits) -> list[str]:
    """Mistakes in single units, each said once with all the units that make it: an entry of the file may be
    many."""
    units: dict[str, list[str]] = {}
    for unit in plan.units:
        for mistake in _unit_mistakes(plan, unit, model):
            units.setdefault(mistake, []).append(unit.name)
    return [
        f"{f'unit {names[0]}' if len(names) == 1 else f'units {names[0]} to {names[-1]} ({len(names)})'}: "
        f"{mistake}"
        for mistake, names in units.items()
    ]


def _unit_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits) -> list[str]:
    mistakes = rules.reshard_mistakes(unit.reshard_after_forward, plan.mesh.dp_shard, plan.mesh.tp, "")
    for key in ("param_dtype", "reduce_dtype"):
        mistakes += rules.dtype_mistakes(getattr(unit, key), key)
    if unit.output_dtype != "same":
        mistakes += rules.dtype_mistakes(unit.output_dtype, "output_dtype")
    if unit.activation_checkpoint not in ACTIVATION_CHECKPOINTS:
        mistakes.append(
            f"activation_checkpoint={unit.activation_checkpoint} is not one of "
            f"{', '.join(ACTIVATION_CHECKPOINTS)}"
        )
    elif unit.activation_checkpoint != "none" and not model.checkpointed.issuperset(unit.modules):
        odd = sorted(set(unit.modules) - model.checkpointed)
        mistakes.append(
            f"activation_checkpoint={unit.activation_checkpoint} is for blocks, and {', '.join(odd)} is "
            "none: use none"
        )
    if unit.compiled and model.compiled.isdisjoint(unit.modules):
        mistakes.append("compiled=true, but nothing in it is compiled by this model: use false")
    if unit.compiled and not plan.compile.enabled:
        mistakes.append("compiled=true contradicts compile.enabled=false: change one of them")
    if unit.activation_checkpoint == "budget":
        mistakes += budget_mistakes(unit.activation_budget, unit.compiled, plan.compile.backend, "")
    elif unit.activation_budget != 1.0:
        mistakes.append(
            f"activation_budget={unit.activation_budget} is for activation_checkpoint=budget: use 1.0"
        )
    if unit.activation_checkpoint == "selective":
        mistakes += _saved_op_mistakes(unit.saved_ops)
    elif unit.saved_ops:
        mistakes.append(f"saved_ops={list(unit.saved_ops)} is for activation_checkpoint=selective: use []")
    return mistakes + _prefetch_mistakes(plan, unit, "forward") + _prefetch_mistakes(plan, unit, "backward")


def _saved_op_mistakes(ops: tuple[str, ...]) -> list[str]:
    """A plan names operators one by one: the policies' names are for the config."""
    if not ops:
        return ["saved_ops=[] keeps nothing: name operators, or use activation_checkpoint=full"]
    odd = [op for op in ops if "." not in op or saved_ops(op, ()) != (op,) or op_mistakes(op, ())]
    return [
        f"saved_ops: {op!r} is not an operator of this torch: name them one by one, as aten.mm or aten.mm/2"
        for op in odd
    ]


def _prefetch_mistakes(plan: Plan, unit: UnitPlan, phase: str) -> list[str]:
    """A list of units to prefetch names units that will be gathered later in that phase, in that order, once
    each."""
    place = f"{phase}_prefetch"
    asked = getattr(unit, place)
    if isinstance(asked, int):
        return [] if asked >= 0 else [f"{place}={asked} must be 0 (none) or a number of units ahead"]
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    names = [other.name for other in order]
    mistakes = [
        f"{place} names {name}, which is no unit of this plan.{rules.nearest(name, names)}"
        for name in asked
        if name not in names
    ]
    mistakes += [f"{place} names {name} twice" for name, n in Counter(asked).items() if n > 1]
    here = names.index(unit.name)
    by_name = {other.name: other for other in order}
    for name in dict.fromkeys(n for n in asked if n in by_name):
        if name == unit.name:
            mistakes.append(f"{place} names the unit itself, which is gathered already: leave it out")
        elif names.index(name) < here:
            mistakes.append(f"{place} names {name}, which the {phase} needs before: name later ones")
        elif plan.mesh.dp_shard == 1:
            mistakes.append(
                f"{place} names {name}, which dp_shard=1 leaves unsharded: there is nothing to gather, use 0"
            )
        elif phase == "backward" and not regathered(by_name[name]):
            mistakes.append(
                f"{place} names {name}, which stays gathered after its forward "
                "(reshard_after_forward=false): there is nothing to gather, leave it out"
            )
    known = [names.index(name) for name in asked if name in names]
    if not mistakes and known != sorted(known):
        mistakes.append(
            f"{place}={list(asked)} is not in the order in which the {phase} needs them: "
            f"{', '.join(sorted(asked, key=names.index))}"
        )
    return mistakes


def _dtype_chain_mistakes(plan: Plan) -> list[str]:
    """Each module computes in the dtype that the one before it hands on: nothing casts in between."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    mistakes = []
    for before, after in zip(plan.modules, plan.modules[1:], strict=False):
        one, other = unit_of[before], unit_of[after]
        out = one.param_dtype if one.output_dtype == "same" or len(one.modules) > 1 else one.output_dtype
        if one is not other and out != other.param_dtype and {out, other.param_dtype} <= set(DTYPES):
            cast = f"set output_dtype={other.param_dtype} on {one.name}, or " if len(one.modules) == 1 else ""
            mistakes.append(
                f"unit {one.name} hands on {out}, but unit {other.name} computes in {other.param_dtype}: "
                f"{cast}give both the same param_dtype"
            )
    for unit in plan.units:
        if unit.output_dtype != "same" and len(unit.modules) > 1:
            mistakes.append(
                f"unit {unit.name}: output_dtype={unit.output_dtype} is for units of one module: use same"
            )
    last = unit_of[plan.modules[-1]]
    if last.output_dtype not in ("same", "float32"):
        mistakes.append(f"unit {last.name}: output_dtype={last.output_dtype} would round the loss: use same")
    return mistakes


def _style_mistakes(plan: Plan, model: ModelUnits, seq_len: int) -> list[str]:
    """The table of tensor-parallel styles names this model's weights, part by part either split or whole."""
    styles = plan.tensor.styles
    if plan.mesh.tp < 1:
        return []
    if plan.mesh.tp == 1 and plan.tensor.sequence_parallel:
        return [
            "tensor: sequence_parallel=true shares tokens out among tp ranks, and tp=1 has one: use false"
        ]
    if (plan.mesh.tp == 1) != (not styles):
        return [
            f"tensor: {'tp=1 has no styles' if styles else 'tp > 1 needs the styles of the weights'}: make a "
            "new plan"
        ]
    patterns = [pattern for table in model.styles.values() for pattern in table]
    mistakes = [
        f"tensor: {pattern}: {style} is no style.{rules.nearest(style, (*rules.STYLE_NAMES, 'loss'))}"
        for pattern, style in styles.items()
        if style not in (*rules.STYLE_NAMES, "loss")
    ]
    mistakes += [
        f"tensor: {pattern} is not one of this model's patterns.{rules.nearest(pattern, patterns)}"
        for pattern in styles
        if pattern not in patterns
    ]
    if mistakes or not styles:
        return mistakes
    split = []
    for part, table in model.styles.items():
        allowed = [split_styles(table), split_styles(table, gathered=True), split_styles(table, whole=True)]
        asked = {pattern: style for pattern in table if (style := find_style(plan.tensor, pattern))}
        if asked not in allowed:
            mistakes.append(_part_mistake(part, asked, allowed))
        elif asked != allowed[2]:
            split.append(part)
    if not mistakes and 0 < len(model.shared_parts.intersection(split)) < len(model.shared_parts):
        mistakes.append(
            f"tensor: {' and '.join(sorted(model.shared_parts))} share a weight: split both or neither"
        )
    return mistakes + rules.tensor_mistakes(
        plan.mesh.tp, split, seq_len * plan.tensor.sequence_parallel, model, "mesh: "
    )


def _part_mistake(part: str, asked: dict[str, str], allowed: list[dict[str, str]]) -> str:
    """A part is split or whole in all of its weights: what differs from the nearer of the two."""

    def differences(wanted: dict[str, str]) -> list[str]:
        return [
            f"{pattern} is {asked.get(pattern, 'missing')}, must be {wanted.get(pattern, 'left out')}"
            for pattern in {**asked, **wanted}
            if asked.get(pattern) != wanted.get(pattern)
        ]

    nearer = min(map(differences, allowed), key=len)
    return f"tensor: part {part} must be split or whole, all of it: {'; '.join(nearer)}"
