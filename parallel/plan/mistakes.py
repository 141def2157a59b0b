"""Mistakes in a plan, reported by field of the plan file or by config key, and which key decides which
field."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import value_text

# The config keys that decide a field of another name. The others decide one of the same name: parallel.tp
# that of the mesh, parallel.param_dtype that of every unit.
OTHER_KEYS = {
    "mesh": "parallel",
    "micro_batch_size": "train.micro_batch_size",
    "accumulation": "train.global_batch_size",
    "context.exchange": "parallel.cp_exchange",
    "tensor.styles": "parallel.tp_modules",
    "units.modules": "parallel.unit_min_params",
    "units.saved_ops": "parallel.selective_policy",
    "units.compiled": "parallel.compile.enabled",
}
_SELECTING = {"parallel.float8.linears", "parallel.float8.min_dim"}  # a plan lists the linears they select


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A rule that a plan breaks.

    Args:
        field: the plan's field, such as mesh.tp or units.param_dtype; a config key if no field has the value
        message: value, rule and fix: the text after the field's name ("=3 must divide ...") or a sentence
        units: names of the units that break the rule, if it is a rule for single units
    """

    field: str
    message: str
    units: tuple[str, ...] = ()


def file_line(mistake: Mistake) -> str:
    """Return the line that reports a mistake in a plan file: place, field, message."""
    (section, _, name), units = mistake.field.rpartition("."), mistake.units
    if units:
        unit_range = f"units {units[0]} to {units[-1]} ({len(units)})"
        place = f"{unit_range if len(units) > 1 else f'unit {units[0]}'}: "
    else:
        place = {"": "", "compile": "compile."}.get(section, f"{section}: ")
    return one_line(place + (name if mistake.message[0] in "=: " else "") + mistake.message)


def key_line(mistake: Mistake, strategy: str | None = None) -> str:
    """Return the line that reports a mistake in a plan made from config keys.

    `strategy`: the value of `parallel.strategy`, which decides the mesh if it is set.
    """
    if mistake.message[0] not in "=: ":
        return file_line(mistake)
    key = key_of(mistake.field)
    if strategy and mistake.field == "mesh":
        key = f"parallel.strategy={strategy}"
    return one_line(key + mistake.message)


def key_of(field: str) -> str:
    """Return the config key that decides a field of a plan, such as mesh.tp; a config key unchanged."""
    section, _, name = field.rpartition(".")
    if section.partition(".")[0] in ("parallel", "train"):
        return field
    return OTHER_KEYS.get(field, f"parallel.{field if section in ('compile', 'float8') else name}")


def planned_keys(plan: Plan) -> dict[str, list[Any]]:
    """Return, for each config key that a plan decides, its value in the plan: a single one, or those of all
    units in the order of the plan."""
    fields = {**vars(plan), **vars(plan.mesh), **vars(plan.tensor), "cp_exchange": plan.context.exchange}
    keys = {f"train.{name}": [getattr(plan, name)] for name in ("micro_batch_size", "global_batch_size")}
    for key in _values(ParallelConfig()).keys() - _SELECTING:
        section, _, name = key.removeprefix("parallel.").rpartition(".")
        of_plan = vars(getattr(plan, section)) if section else fields
        if name in of_plan:
            keys[key] = [of_plan[name]]
        elif hasattr(plan.units[0], name):
            keys[key] = [getattr(unit, name) for unit in plan.units]
    return keys


def contradictions(
    config: ParallelConfig, plan: Plan, model: ModelUnits, batch: Mapping[str, int | str]
) -> list[str]:
    """Return a line for each config key that contradicts the plan file, which would silently override it.
    `batch`: the keys of the batch's sizes in the section `train`."""
    blocks = [model.checkpointed.issuperset(unit.modules) for unit in plan.units]
    planned = planned_keys(plan)
    planned["parallel.reshard_after_forward"].pop()  # that of the last unit, which is never resharded
    for name in ("activation_checkpoint", "activation_budget"):
        key = f"parallel.{name}"
        planned[key] = [value for value, is_block in zip(planned[key], blocks, strict=True) if is_block]
    default, lines = _values(ParallelConfig()), []
    for key, requested in {**_values(config), **batch}.items():
        rest = key in ("parallel.dp_shard", "train.global_batch_size") and requested == -1
        left_open = rest or requested in (default.get(key, "auto"), "auto")
        found = planned.get(key, [])
        if left_open or key in _SELECTING or repr(requested) in map(repr, found):  # repr, because True == 1
            continue
        values = ", ".join(dict.fromkeys(map(value_text, found)))
        file = f"the plan file {config.plan}"
        rule = f", but {file} has {values}" if found else f" is decided by {file}"
        lines.append(f"{key}={value_text(requested)}{rule}: remove the key, or edit the file")
    return lines


def _values(config: ParallelConfig) -> dict[str, object]:
    """Return the values of all keys of the section `parallel`, by full name."""
    sections = {"": config, "compile.": config.compile, "float8.": config.float8}
    return {
        f"parallel.{section}{key}": value
        for section, holder in sections.items()
        for key, value in vars(holder).items()
        if key not in ("plan", "compile", "float8")
    }
