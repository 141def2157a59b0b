"""The differences between two plans."""

import dataclasses
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import join_names

ONLY = "unit"  # the key of units that only one plan has


@dataclass(frozen=True)
class Difference:
    """One difference: its place, key and two values. With the key "unit" one value is None: only the other
    plan has these units."""

    where: str
    key: str
    a: Any
    b: Any


def diff_plans(a: Plan, b: Plan) -> list[Difference]:
    """Return every difference between two plans: those of the plan itself first, then those of its units in
    the order of the forward. Empty if the plans are equal."""
    differences = list[Difference]()
    for key, value_a, value_b in _changes(a, b):
        if key == "tensor":
            differences += _diff_tensor(a, b)
        elif dataclasses.is_dataclass(value_a):
            differences += _diff_fields(key, value_a, value_b)
        elif key not in ("modules", "units"):
            differences.append(Difference("plan", key, value_a, value_b))
    if a.global_batch_size != b.global_batch_size:
        both = (a.global_batch_size, b.global_batch_size)
        differences.append(Difference("plan", "global_batch_size", *both))
    if a.modules != b.modules:
        differences.append(Difference("model", "modules", join_names(a.modules), join_names(b.modules)))
    return differences + _diff_units(a, b)


def describe_difference(difference: Difference) -> str:
    """Format a difference as one line."""
    where, key = difference.where, difference.key
    if key == ONLY:
        return f"{where}: only in the {'first' if difference.b is None else 'second'}"
    return f"{where}: {key} {_value(difference.a)} -> {_value(difference.b)}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, dict):
        return f"of {len(value)} patterns" if value else "none"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _diff_tensor(a: Plan, b: Plan) -> list[Difference]:
    """Return the differences of the tensor plans, by pattern if both plans have styles."""
    styles_a, styles_b = a.tensor.styles, b.tensor.styles
    if not (styles_a and styles_b):
        return _diff_fields("tensor", a.tensor, b.tensor)
    pairs = [
        (pattern, styles_a.get(pattern, "no style"), styles_b.get(pattern, "no style"))
        for pattern in {**styles_a, **styles_b}
    ]
    changed = [Difference("tensor", *pair) for pair in pairs if pair[1] != pair[2]]
    same_styles = dataclasses.replace(a.tensor, styles=styles_b)
    return _diff_fields("tensor", same_styles, b.tensor) + changed


def _diff_fields(where: str, a: Any, b: Any) -> list[Difference]:
    """Return the differences between two dataclasses of the same type, field by field."""
    return [Difference(where, *change) for change in _changes(a, b)]


def _diff_units(a: Plan, b: Plan) -> list[Difference]:
    """Return the differences between units of the same name, consecutive units with the same difference as
    one; then units of only one plan."""
    in_a, in_b = {unit.name: unit for unit in a.units}, {unit.name: unit for unit in b.units}
    shared = [name for name in in_a if name in in_b]
    differences = []
    for _, same in groupby(shared, key=lambda name: repr(_changes(in_a[name], in_b[name]))):
        names = list(same)
        differences += _diff_fields(_names(names), in_a[names[0]], in_b[names[0]])
    only_a, only_b = [name for name in in_a if name not in in_b], [name for name in in_b if name not in in_a]
    if only_a:
        differences.append(Difference(_names(only_a), ONLY, only_a, None))
    if only_b:
        differences.append(Difference(_names(only_b), ONLY, None, only_b))
    if shared != [name for name in in_b if name in in_a]:
        differences.append(Difference("units", "order", [*in_a], [*in_b]))
    return differences


def _changes(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Return key and both values of every field that differs."""
    fields = [(field.name, getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)]
    return [(key, value_a, value_b) for key, value_a, value_b in fields if _differ((value_a, value_b))]


def _differ(values: tuple[Any, Any]) -> bool:
    """Compare values with their types: in Python true equals 1, but resharding to 1 process is not `true`."""
    return repr(values[0]) != repr(values[1])


def _names(names: list[str]) -> str:
    """Format consecutive units by their first and last name."""
    return f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]} ({len(names)})"
