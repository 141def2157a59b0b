"""Checks a plan from any source against all rules, a model and a number of processes."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan import rules
from meshwright.parallel.plan.float8_rules import float8_mistakes
from meshwright.parallel.plan.mistakes import SELECTING, Mistake, describe, key_values, planned_keys
from meshwright.parallel.plan.rules import nearest, split_styles
from meshwright.parallel.plan.schema import (
    ROOT,
    MeshPlan,
    ModelUnits,
    Plan,
    UnitPlan,
    ends_forward,
    find_style,
    last_places,
    only_look_up,
    regathered,
    without_containers,
)
from meshwright.parallel.plan.selective_policy import saved_ops_mistakes
from meshwright.parallel.plan.serialize import value_text


def validate(plan: Plan, model: ModelUnits, world_size: int, seq_len: int) -> list[Mistake]:
    """Return the mistakes in a plan for this model and number of processes; [] if there are none. The types
    of its values are checked before, where it is made or read."""
    mistakes = [*_mesh_mistakes(plan.mesh, world_size)]
    mistakes += rules.compile_mistakes(plan.compile)
    mistakes += rules.storage_mistakes(plan)
    mistakes += rules.kernel_mistakes(plan, model)
    if structure := [*_structure_mistakes(plan, model)]:
        return mistakes + structure  # the other rules rely on modules and the order of units
    mistakes += _style_mistakes(plan, model, seq_len)
    mistakes += rules.context_mistakes(plan, model, seq_len)
    mistakes += rules.written_mistakes(plan.mesh, model.written)
    mistakes += rules.unsharded_mistakes(plan, model)
    mistakes += rules.async_tp_mistakes(plan)
    mistakes += float8_mistakes(plan, model, not any(each.field.startswith("mesh") for each in mistakes))
    mistakes += _all_units_mistakes(plan, model, world_size)
    mistakes += _dtype_chain_mistakes(plan)
    return mistakes


def plan_file_mistakes(
    plan: Plan,
    path: Path,
    config: ParallelConfig,
    model: ModelUnits,
    world_size: int,
    seq_len: int,
    batch: Mapping[str, int | str] | None = None,
) -> list[str]:
    """Return a line for each config key that contradicts a plan file, and for each mistake in the file.
    `batch`: the keys of the batch's sizes in the section `train`."""
    keys = {**key_values(config), **(batch if batch and plan.mesh.world_size == world_size else {})}
    mistakes = [*_contradictions(keys, plan, model, f"the plan file {config.plan}")]
    mistakes += validate(plan, model, world_size, seq_len)
    return [describe(mistake, path) for mistake in mistakes]


def _contradictions(
    keys: Mapping[str, object], plan: Plan, model: ModelUnits, file: str
) -> Iterator[Mistake]:
    """Check that no config key contradicts the plan file, which would silently override it."""
    default, planned = key_values(ParallelConfig()), planned_keys(plan)
    resharded = [unit for unit in plan.units if not ends_forward(unit.modules, plan.modules)]
    planned["parallel.reshard_after_forward"] = [unit.reshard_after_forward for unit in resharded]
    for key in ("parallel.activation_checkpoint", "parallel.activation_budget"):  # of blocks only
        of_units = zip(planned[key], plan.units, strict=True)
        planned[key] = [value for value, unit in of_units if model.checkpointed.issuperset(unit.modules)]
    for key, requested in keys.items():
        rest = key in ("parallel.dp_shard", "train.global_batch_size") and requested == -1
        left_open = rest or requested in (default.get(key, "auto"), "auto")
        found = planned.get(key, [])
        if left_open or key in SELECTING or repr(requested) in map(repr, found):  # repr, because True == 1
            continue
        values = ", ".join(dict.fromkeys(map(value_text, found)))
        rule = f", but {file} has {values}" if found else f" is decided by {file}"
        yield Mistake(key, f"={value_text(requested)}{rule}: remove the key, or edit the file")


def _mesh_mistakes(mesh: MeshPlan, world_size: int) -> Iterator[Mistake]:
    if mesh.world_size != world_size:
        product = " x ".join(f"{axis}={getattr(mesh, axis)}" for axis in mesh.axes)
        rest = "" if world_size % (mesh.world_size // mesh.dp_shard) else " (dp_shard=-1 takes the rest)"
        yield Mistake(
            "mesh",
            f": {product} is {mesh.world_size} processes, but this run has {world_size}: use "
            f"{mesh.world_size} processes, or a plan with other degrees{rest}",
        )


def _structure_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that modules are those of the model, each in exactly one unit, in the order of the forward."""
    published = tuple(model.modules)
    lists = {"modules": (plan.modules, published), "blocks": (plan.blocks or model.blocks, model.blocks)}
    used = Counter(module for unit in plan.units for module in unit.modules)
    if wrong_lists := {key: pair for key, pair in lists.items() if pair[0] != pair[1]}:
        key, (planned, own) = next(iter(wrong_lists.items()))
        pairs = itertools.zip_longest(planned, own, fillvalue="nothing")
        difference = next(f"{a or ROOT} instead of {b or ROOT}" for a, b in pairs if a != b)
        yield Mistake(
            key,
            f": these are not the {key} of this model ({len(planned)}, the model has {len(own)}; "
            f"first difference: {difference}): make a new plan for this model",
        )
    elif wrong := sorted(name for name, n in used.items() if n > 1 or name not in published):
        for name in wrong:
            message = f": module {name or ROOT} is in {used[name]} units, but must be in one: list it once"
            if name not in published:
                message = f": this model has no module {name}.{nearest(name, published)}"
            yield Mistake("units", message, (name,))
    elif missing := [name for name in published if name not in used]:
        shown = f"{', '.join(name or ROOT for name in missing[:3])}{' ...' if missing[3:] else ''}"
        yield Mistake("units", f": {shown} is in no unit: add it to one")
    else:
        yield from itertools.islice(_order_mistakes(plan, model), 1)


def _order_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that modules that share a parameter are in one unit, and the order of the units."""
    sharing = [modules for modules in model.units if len(modules) > 1]
    for unit, modules in itertools.product(plan.units, sharing):
        if 0 < len(set(modules).intersection(unit.modules)) < len(modules):
            message = f": {' and '.join(modules)} share a parameter: put them in one unit"
            yield Mistake("units", message, (unit.name,))
    place = last_places(plan.modules)
    for unit, following in itertools.pairwise(plan.units):
        if max(place[module] for module in unit.modules) > max(place[module] for module in following.modules):
            yield Mistake(
                "units",
                f" is listed after {unit.name}, but the forward finishes with it earlier: list units in the "
                "order of the forward",
                (following.name,),
            )


def _all_units_mistakes(plan: Plan, model: ModelUnits, world_size: int) -> list[Mistake]:
    """Return the mistakes in units, each once with all its units: an entry of the file may stand for many."""
    units: dict[Mistake, list[str]] = {}
    for unit in plan.units:
        for mistake in _unit_mistakes(plan, unit, model, world_size):
            units.setdefault(mistake, []).append(unit.name)
    return [dataclasses.replace(mistake, units=tuple(names)) for mistake, names in units.items()]


def _unit_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits, world_size: int) -> Iterator[Mistake]:
    if plan.mesh.world_size == world_size:
        yield from rules.reshard_mistakes(unit.reshard_after_forward, plan.mesh)
    if not unit.unshard_in_backward and not only_look_up(unit.modules, model):
        yield Mistake(
            "units.unshard_in_backward",
            "=false is for units of embeddings: the backward of other modules reads their weights: use true",
        )
    if unit.output_dtype != "same" and len(unit.modules) > 1:
        yield Mistake("units.output_dtype", f"={unit.output_dtype} is for units of one module: use same")
    yield from _activation_mistakes(plan, unit, model)
    if unit.compiled and model.compiled.isdisjoint(unit.modules):
        yield Mistake("units.compiled", "=true, but this model compiles none of its modules: use false")
    if unit.compiled and not plan.compile.enabled:
        yield Mistake("units.compiled", "=true contradicts compile.enabled=false: change one of them")
    yield from _prefetch_mistakes(plan, unit, "forward")
    yield from _prefetch_mistakes(plan, unit, "backward")


def _activation_mistakes(plan: Plan, unit: UnitPlan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that activation checkpointing has only the settings of its kind, and fits the unit."""
    mode, budget, ops = unit.activation_checkpoint, unit.activation_budget, unit.saved_ops
    if mode != "none" and not model.checkpointed.issuperset(unit.modules):
        others = ", ".join(sorted(set(unit.modules) - model.checkpointed))
        yield Mistake(
            "units.activation_checkpoint", f"={mode} is for blocks, but {others} is not one: use none"
        )
    if mode == "budget":
        if not unit.compiled:
            yield Mistake(
                "units.activation_checkpoint",
                "=budget is applied by the compiler, but compiling is off: use full, selective or "
                "compile.enabled=true",
            )
        elif plan.compile.backend not in rules.BUDGET_BACKENDS:
            yield Mistake(
                "units.activation_checkpoint",
                "=budget needs a compile backend that chooses which activations to keep "
                f"({', '.join(rules.BUDGET_BACKENDS)}), not {plan.compile.backend}",
            )
    elif budget != 1.0:
        yield Mistake("units.activation_budget", f"={budget} is for activation_checkpoint=budget: use 1.0")
    if mode != "selective" and ops:
        yield Mistake("units.saved_ops", f"={list(ops)} is for activation_checkpoint=selective: use []")
    elif mode == "selective":
        yield from saved_ops_mistakes(ops)


def _prefetch_mistakes(plan: Plan, unit: UnitPlan, phase: str) -> Iterator[Mistake]:
    """Check that a prefetch list names units gathered later in that phase, in that order, once each."""
    key = f"{phase}_prefetch"
    field, prefetch = f"units.{key}", getattr(unit, key)
    if isinstance(prefetch, int):
        return
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    names, by_name = [other.name for other in order], {other.name: other for other in order}
    wrong = []
    for name, times in Counter(prefetch).items():
        if name not in by_name:
            wrong.append(f"names {name}, which is not a unit of this plan.{nearest(name, names)}")
        elif name == unit.name:
            wrong.append("names the unit itself, which is already gathered: remove it")
        elif names.index(name) < names.index(unit.name):
            wrong.append(f"names {name}, which the {phase} needs earlier: list later units")
        elif plan.mesh.shards == 1:
            nothing = "there is nothing to gather, use 0"
            wrong.append(f"names {name}, which dp_shard=1 leaves unsharded: {nothing}")
        elif phase == "backward" and not regathered(by_name[name]):
            reason = "the backward does not need gathered (unshard_in_backward=false)"
            if by_name[name].unshard_in_backward:
                reason = "stays gathered after its forward (reshard_after_forward=false)"
            wrong.append(f"names {name}, which {reason}: there is nothing to gather, remove it")
        if times > 1:
            wrong.append(f"names {name} twice: list it once")
    yield from (Mistake(field, f" {message}") for message in wrong)
    if not wrong and (ordered := sorted(prefetch, key=names.index)) != list(prefetch):
        rule = f"is not in the order in which the {phase} needs them: use {', '.join(ordered)}"
        yield Mistake(field, f"={list(prefetch)} {rule}")


def _dtype_chain_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Check that the second module computes in the dtype that the first returns, and that the last one does
    not cast the loss. Each module's hidden state is cast, but not what a model makes of its embeddings'
    dtype for all blocks, such as transformers' RoPE tables: in float32 they would not fit bfloat16 blocks."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    modules = without_containers(plan.modules)
    unit, following = unit_of[modules[0]], unit_of[modules[:2][-1]]
    out = unit.param_dtype if unit.output_dtype == "same" or len(unit.modules) > 1 else unit.output_dtype
    if unit is not following and (out, following.param_dtype) == ("float32", "bfloat16"):
        cast = "set output_dtype=bfloat16 on it, or " if len(unit.modules) == 1 else ""
        yield Mistake(
            "units",
            f" returns float32, but unit {following.name} computes in bfloat16: {cast}set the same "
            "param_dtype on both",
            (unit.name,),
        )
    last = unit_of[plan.modules[-1]]
    if last.output_dtype not in ("same", "float32"):
        yield Mistake(
            "units.output_dtype", f"={last.output_dtype} would round the loss: use same", (last.name,)
        )


def _style_mistakes(plan: Plan, model: ModelUnits, seq_len: int) -> Iterator[Mistake]:
    """Check that tensor-parallel styles name the model's weights, and split a part fully or not at all."""
    styles, tp = plan.tensor.styles, plan.mesh.tp
    if tp == 1:
        if styles or plan.tensor.sequence_parallel:
            yield Mistake("tensor", ": tp=1 splits nothing: use sequence_parallel=false and styles={}")
        return
    if not model.styles:
        why = model.why_no_styles or (
            "this model has no tensor-parallel styles: use 1, or describe(..., styles={...}), or the key "
            "model.styles (docs/your-model.md)"
        )
        yield Mistake("mesh.tp", f"={tp}, but {why}")
        return
    if not styles:
        yield Mistake("tensor.styles", ": tp > 1 needs the styles of the weights: make a new plan")
        return
    if plan.tensor.sequence_parallel and not rules.splits_tokens(styles):
        yield Mistake(
            "tensor.sequence_parallel",
            "=true, but this model computes positions or masks from all tokens: use false",
        )
    patterns = [pattern for table in model.styles.values() for pattern in table]
    if unknown := [pattern for pattern in styles if pattern not in patterns]:
        for pattern in unknown:
            message = f": {pattern} is not one of this model's patterns.{nearest(pattern, patterns)}"
            yield Mistake("tensor.styles", message)
        return
    wrong, split = [], []
    for part, table in model.styles.items():
        allowed = [split_styles(table), split_styles(table, gathered=True), split_styles(table, unsplit=True)]
        styles_of_part = {pattern: style for pattern in table if (style := find_style(plan.tensor, pattern))}
        if styles_of_part not in allowed:
            wrong.append(_part_message(part, styles_of_part, allowed))
        elif styles_of_part != allowed[2]:
            split.append(part)
    yield from (Mistake("tensor.styles", message) for message in wrong)
    whole = model.shared_parts.difference(split)
    if not wrong and whole and whole != model.shared_parts:
        parts = f"{' and '.join(model.shared_parts - whole)} but not {' and '.join(whole)}"
        yield Mistake("tensor.styles", f" splits {parts}, which share a weight: split both or neither")
    tokens = seq_len // plan.mesh.cp * plan.tensor.sequence_parallel
    yield from rules.tensor_mistakes(tp, split, tokens, model)


def _part_message(part: str, styles: dict[str, str], allowed: list[dict[str, str]]) -> str:
    """Return how the styles of a part differ from the nearest allowed table: all weights split, or none."""

    def differences(expected: dict[str, str]) -> list[str]:
        return [
            f"{pattern} is {styles.get(pattern, 'missing')}, must be {expected.get(pattern, 'left out')}"
            for pattern in {**styles, **expected}
            if styles.get(pattern) != expected.get(pattern)
        ]

    fewest = min(map(differences, allowed), key=len)
    return f": part {part} must be split in all of its weights or in none: {'; '.join(fewest)}"
