"""Mistakes in a plan, reported by field of the plan file or by config key, and which key decides which
field."""

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import Plan

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
    **dict.fromkeys(("", "modules", "units"), ""),
}
SELECTING = {"parallel.float8.linears", "parallel.float8.min_dim"}  # a plan lists the linears they select


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A rule that a plan breaks.

    Args:
        field: the plan's field, such as mesh.tp or units.param_dtype; a config key if no field has the value;
            "" if no single one is wrong
        message: value, rule and fix: the text after the field's name, such as "=3 must divide ..."
        units: names of the units that break the rule, if it is a rule for single units
    """

    field: str
    message: str
    units: tuple[str, ...] = ()


def describe(mistake: Mistake, file: Path | None = None, strategy: str | None = None) -> str:
    """Return the line that reports a mistake: the plan file with field and units or, without a file, the
    config key that decides the field.

    `strategy`: the value of `parallel.strategy`, which decides the mesh if it is set.
    """
    key, units = key_of(mistake.field), mistake.units
    if key and (file is None or key == mistake.field):
        place = f"parallel.strategy={strategy}" if strategy and mistake.field == "mesh" else key
        return one_line(place + mistake.message)
    place = f"plan file {file}: " if file else ""
    if units:
        place += f"units {units[0]} to {units[-1]} ({len(units)})" if units[1:] else f"unit {units[0]}"
        place += mistake.field.removeprefix("units").replace(".", ": ")
    else:
        place += mistake.field
    return one_line(place + mistake.message)


def key_of(field: str) -> str:
    """Return the config key that decides a field of a plan, such as mesh.tp, or "" if the model does; a
    config key unchanged."""
    section, _, name = field.rpartition(".")
    if section.partition(".")[0] in ("parallel", "train"):
        return field
    return OTHER_KEYS.get(field, f"parallel.{field if section in ('compile', 'float8') else name}")


def planned_keys(plan: Plan) -> dict[str, list[Any]]:
    """Return, for each config key that a plan decides, its value in the plan: a single one, or those of all
    units in the order of the plan."""
    fields = {**vars(plan), **vars(plan.mesh), **vars(plan.tensor), "cp_exchange": plan.context.exchange}
    keys = {f"train.{name}": [getattr(plan, name)] for name in ("micro_batch_size", "global_batch_size")}
    for key in key_values(ParallelConfig()).keys() - SELECTING:
        section, _, name = key.removeprefix("parallel.").rpartition(".")
        of_plan = vars(getattr(plan, section)) if section else fields
        if name in of_plan:
            keys[key] = [of_plan[name]]
        elif hasattr(plan.units[0], name):
            keys[key] = [getattr(unit, name) for unit in plan.units]
    return keys


def key_values(config: ParallelConfig) -> dict[str, object]:
    """Return the values of all keys of the section `parallel`, by full name."""
    sections = {"": config, "compile.": config.compile, "float8.": config.float8}
    return {
        f"parallel.{section}{key}": value
        for section, holder in sections.items()
        for key, value in vars(holder).items()
        if key not in ("plan", "compile", "float8")
    }
