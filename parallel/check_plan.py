"""Every rule that a plan read from a file must keep, and whether it fits a model and a number of processes.

`make_plan` keeps them by construction, after checking the keys it starts from.
"""

import difflib
from collections import Counter
from collections.abc import Iterable

from parallel.plan import ACTIVATION_CHECKPOINTS, ModelUnits, Plan, PlanError, UnitPlan, regathered
from parallel.rules import budget_mistakes, compile_mistakes, dtype_mistakes, reshard_mistakes, tensor_mistakes
from parallel.selective import op_mistakes
from parallel.tensor import STYLES, find_style, split_styles


def check_plan(plan: Plan, model: ModelUnits, world_size: int, seq_len: int) -> None:
    """Raise PlanError with all mistakes unless `plan` makes sense and fits this model and number of processes."""
    mistakes = compile_mistakes(plan.compile, "compile.") + _size_mistakes(plan, world_size)
    model_mistakes = _model_mistakes(plan, model)
    mistakes += model_mistakes
    if not model_mistakes:  # the rest asks for the units' order, and names modules
        mistakes += [mistake for unit in plan.units for mistake in _unit_mistakes(plan, unit, model)]
        mistakes += _dtype_chain_mistakes(plan) + _style_mistakes(plan, model, seq_len)
    if mistakes:
        raise PlanError("\n".join(dict.fromkeys(mistakes)))


def _size_mistakes(plan: Plan, world_size: int) -> list[str]:
    mistakes = [f"mesh: {axis}={degree} must be at least 1" for axis, degree in vars(plan.mesh).items() if degree < 1]
    if not mistakes and plan.mesh.world_size != world_size:
        mistakes.append(f"the plan's mesh is for {plan.mesh.world_size} processes, this run has {world_size}: "
                        "start that many, or make a new plan")  # fmt: skip
    return mistakes


def _model_mistakes(plan: Plan, model: ModelUnits) -> list[str]:
    """Whether the plan's modules are the model's, and each is in exactly one unit."""
    if plan.modules != tuple(model.modules):
        odd = _first_difference(plan.modules, tuple(model.modules))
        return [f"the plan's modules are not this model's ({len(plan.modules)} against {len(model.modules)}; "
                f"first difference: {odd}): make a new plan for this model"]  # fmt: skip
    used = Counter(module for unit in plan.units for module in unit.modules)
    mistakes = [f"unit {name}: module {name} is in {n} units, a module's parameters can be in one"
                for name, n in used.items() if n > 1]  # fmt: skip
    for name in used.keys() - set(plan.modules):
        mistakes.append(f"unit {name}: this model has no module {name}.{_nearest(name, plan.modules)}")
    missing = [name for name in plan.modules if name not in used]
    if missing:
        mistakes.append(f"units: {', '.join(missing[:3])}{' ...' if missing[3:] else ''} is in no unit: give it one")
    if mistakes:
        return sorted(mistakes)
    together = {module: unit for unit in model.units for module in unit if len(unit) > 1}
    for unit in plan.units:
        for module in unit.modules:
            if not set(together.get(module, ())) <= set(unit.modules):
                return [f"unit {unit.name}: {' and '.join(together[module])} share a parameter, so they make one unit"]
    ends = [max(plan.modules.index(module) for module in unit.modules) for unit in plan.units]
    if ends != sorted(ends):
        i = next(i for i in range(1, len(ends)) if ends[i] < ends[i - 1])
        return [f"unit {plan.units[i].name} stands behind {plan.units[i - 1].name}, but the forward is done with it before: "
                "list units in that order"]  # fmt: skip
    return []


def _first_difference(planned: tuple[str, ...], published: tuple[str, ...]) -> str:
    for one, other in zip(planned, published, strict=False):
        if one != other:
            return f"{one} instead of {other}"
    shorter = min(len(planned), len(published))
    return next(iter((*planned[shorter:], *published[shorter:])))


def _unit_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits) -> list[str]:
    place = f"unit {unit.name}: "
    mistakes = reshard_mistakes(unit.reshard_after_forward, plan.mesh.dp_shard, place)
    for key in ("param_dtype", "reduce_dtype"):
        mistakes += dtype_mistakes(getattr(unit, key), place + key)
    if unit.output_dtype != "same":
        mistakes += dtype_mistakes(unit.output_dtype, f"{place}output_dtype")
    if unit.activation_checkpoint not in ACTIVATION_CHECKPOINTS:
        mistakes.append(f"{place}activation_checkpoint={unit.activation_checkpoint} is not one of "
                        f"{', '.join(ACTIVATION_CHECKPOINTS)}")  # fmt: skip
    elif unit.activation_checkpoint != "none" and not model.checkpointed.issuperset(unit.modules):
        odd = sorted(set(unit.modules) - model.checkpointed)
        mistakes.append(f"{place}activation_checkpoint={unit.activation_checkpoint} is for blocks, which {', '.join(odd)} "
                        "is not: use none")  # fmt: skip
    if unit.compiled and model.compiled.isdisjoint(unit.modules):
        mistakes.append(f"{place}compiled=true, but nothing in it is compiled by this model: use false")
    if unit.compiled and not plan.compile.enabled:
        mistakes.append(f"{place}compiled=true contradicts compile.enabled=false")
    if unit.activation_checkpoint == "budget":
        mistakes += budget_mistakes(unit.activation_budget, unit.compiled, plan.compile.backend, place)
    elif unit.activation_budget != 1.0:
        mistakes.append(f"{place}activation_budget={unit.activation_budget} is for activation_checkpoint=budget: use 1.0")
    if unit.activation_checkpoint == "selective":
        mistakes += op_mistakes(",".join(unit.saved_ops), (), f"{place}saved_ops")
    elif unit.saved_ops:
        mistakes.append(f"{place}saved_ops is for activation_checkpoint=selective: use []")
    return mistakes + _prefetch_mistakes(plan, unit, "forward") + _prefetch_mistakes(plan, unit, "backward")


def _prefetch_mistakes(plan: Plan, unit: UnitPlan, phase: str) -> list[str]:
    """A list of units to prefetch names units that will be gathered later in that phase, in that order, once each."""
    key = f"{phase}_prefetch"
    asked, place = getattr(unit, key), f"unit {unit.name}: {key}"
    if isinstance(asked, int):
        return [] if asked >= 0 else [f"{place}={asked} must be 0 (none) or a number of units ahead"]
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    names = [other.name for other in order]
    mistakes = [f"{place} names {name}, which is no unit of this plan.{_nearest(name, names)}"
                for name in asked if name not in names]  # fmt: skip
    mistakes += [f"{place} names {name} twice" for name, n in Counter(asked).items() if n > 1]
    here = names.index(unit.name)
    by_name = {other.name: other for other in order}
    for name in dict.fromkeys(n for n in asked if n in by_name):
        if name == unit.name:
            mistakes.append(f"{place} names the unit itself, which is gathered already: leave it out")
        elif names.index(name) < here:
            mistakes.append(f"{place} names {name}, which the {phase} needs before: name later ones")
        elif plan.mesh.dp_shard == 1:
            mistakes.append(f"{place} names {name}, which dp_shard=1 leaves unsharded: there is nothing to gather, use 0")
        elif phase == "backward" and not regathered(by_name[name]):
            mistakes.append(f"{place} names {name}, which stays gathered after its forward (reshard_after_forward=false): "
                            "there is nothing to gather, leave it out")  # fmt: skip
    known = [names.index(name) for name in asked if name in names]
    if not mistakes and known != sorted(known):
        mistakes.append(f"{place}={list(asked)} is not in the order in which the {phase} needs them: "
                        f"{', '.join(sorted(asked, key=names.index))}")  # fmt: skip
    return mistakes


def _dtype_chain_mistakes(plan: Plan) -> list[str]:
    """Each module computes in the dtype that the one before it hands on: nothing casts in between."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    mistakes = []
    for before, after in zip(plan.modules, plan.modules[1:], strict=False):
        one, other = unit_of[before], unit_of[after]
        out = one.param_dtype if one.output_dtype == "same" or len(one.modules) > 1 else one.output_dtype
        if one is not other and out != other.param_dtype:
            mistakes.append(f"unit {one.name} hands on {out}, but unit {other.name} computes in {other.param_dtype}: "
                            f"set output_dtype={other.param_dtype} on {one.name}, or the same param_dtype")  # fmt: skip
    for unit in plan.units:
        if unit.output_dtype != "same" and len(unit.modules) > 1:
            mistakes.append(f"unit {unit.name}: output_dtype={unit.output_dtype} is for units of one module: use same")
    last = unit_of[plan.modules[-1]]
    if last.output_dtype not in ("same", "float32"):
        mistakes.append(f"unit {last.name}: output_dtype={last.output_dtype} would round the loss: use same")
    return mistakes


def _style_mistakes(plan: Plan, model: ModelUnits, seq_len: int) -> list[str]:
    """The table of tensor-parallel styles names this model's weights, part by part either split or whole."""
    styles = plan.tensor.styles
    if (plan.mesh.tp == 1) != (not styles):
        return [f"tensor: {'tp=1 has no styles' if styles else 'tp > 1 needs the styles of the weights'}: make a new plan"]
    known = (*STYLES, "loss")
    mistakes = [f"tensor: {pattern}: {style} is no style.{_nearest(style, known)}"
                for pattern, style in styles.items() if style not in known]  # fmt: skip
    split = []
    for part, table in model.styles.items() if styles else ():
        allowed = [split_styles(table), split_styles(table, gathered=True), split_styles(table, whole=True)]
        asked = {pattern: style for pattern in table if (style := find_style(plan.tensor, pattern))}
        if asked not in allowed:
            mistakes.append(f"tensor: part {part} must be split ({allowed[0]}) or whole ({allowed[2]}), not {asked}")
        elif asked != allowed[2]:
            split.append(part)
    odd = [pattern for pattern in styles if not any(pattern in table for table in model.styles.values())]
    mistakes += [f"tensor: {pattern} matches no weight of this model" for pattern in odd]
    if 0 < len(model.shared_parts.intersection(split)) < len(model.shared_parts):
        mistakes.append(f"tensor: {' and '.join(sorted(model.shared_parts))} share a weight: split both or neither")
    return mistakes + tensor_mistakes(plan.mesh.tp, split, plan.tensor.sequence_parallel, model, seq_len)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
