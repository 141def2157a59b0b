"""What differs between two plans."""

import dataclasses
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from parallel.plan import Plan, UnitPlan


@dataclass(frozen=True)
class Difference:
    """One difference: where it is, which key, and its two values. None on one side: only the other plan has it."""

    where: str
    key: str
    a: Any
    b: Any


def diff_plans(a: Plan, b: Plan) -> list[Difference]:
    """Every difference from `a` to `b`: mesh, batch, compile, then units in the order of the forward. Empty if equal."""
    differences = _diff_fields("mesh", a.mesh, b.mesh)
    for key in ("micro_batch_size", "accumulation", "global_batch_size"):
        if getattr(a, key) != getattr(b, key):
            differences.append(Difference("batch", key, getattr(a, key), getattr(b, key)))
    if a.cpu_offload != b.cpu_offload:
        differences.append(Difference("plan", "cpu_offload", a.cpu_offload, b.cpu_offload))
    differences += _diff_fields("tensor", a.tensor, b.tensor) + _diff_fields("compile", a.compile, b.compile)
    return differences + _diff_units(a, b)


def _diff_fields(where: str, a: Any, b: Any) -> list[Difference]:
    """Differences between two dataclasses of the same kind, field by field."""
    keys = [field.name for field in dataclasses.fields(a)]
    return [Difference(where, key, getattr(a, key), getattr(b, key)) for key in keys if getattr(a, key) != getattr(b, key)]


def _diff_units(a: Plan, b: Plan) -> list[Difference]:
    """Differences between units of the same name, neighbours that differ alike as one; then units of one plan only."""
    in_a, in_b = {unit.name: unit for unit in a.units}, {unit.name: unit for unit in b.units}
    shared = [name for name in in_a if name in in_b]
    differences = []
    for changes, names in groupby(shared, key=lambda name: _changes(in_a[name], in_b[name])):
        where = _names(list(names))
        differences += [Difference(where, key, one, other) for key, one, other in changes]
    only_a, only_b = [name for name in in_a if name not in in_b], [name for name in in_b if name not in in_a]
    if only_a:
        differences.append(Difference(_names(only_a), "unit", only_a, None))
    if only_b:
        differences.append(Difference(_names(only_b), "unit", None, only_b))
    if shared != [name for name in in_b if name in in_a]:
        differences.append(Difference("units", "order", [*in_a], [*in_b]))
    return differences


def _changes(a: UnitPlan, b: UnitPlan) -> tuple[tuple[str, Any, Any], ...]:
    """Key and both values, typed: to Python false equals 0, to a plan resharding to 1 process is not `true`."""
    pairs = ((field.name, getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return tuple((key, one, other) for key, one, other in pairs if (type(one), one) != (type(other), other))


def _names(names: list[str]) -> str:
    """Neighbouring units by their first and last name."""
    return f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]} ({len(names)})"
