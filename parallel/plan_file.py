"""A plan as text: the YAML file, which reads back to an equal plan, and the table for people.

Units that are treated alike and differ only by one number in their names share an entry: `layers.[0-31]`.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from parallel.config import CompileConfig
from parallel.plan import ACTIVATION_CHECKPOINTS, AXES, DTYPES, MeshPlan, Plan, PlanError, UnitPlan
from parallel.strict_yaml import YamlError, load_mapping

_RANGE = re.compile(r"(.*)\[(\d+)-(\d+)\](.*)")
_NUMBER = re.compile(r"(.*?)(\d+)([^\d]*)")
MAX_RANGE = 10_000  # units of one entry; the deepest published Llama has 126
_CHOICES = {"param_dtype": DTYPES, "reduce_dtype": DTYPES, "activation_checkpoint": ACTIVATION_CHECKPOINTS}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, ready for YAML or JSON."""
    return {
        "mesh": dataclasses.asdict(plan.mesh),
        "micro_batch_size": plan.micro_batch_size,
        "accumulation": plan.accumulation,
        "compile": dataclasses.asdict(plan.compile),
        "units": [{"unit": name, **_treatment(unit)} for name, unit in group_units(plan.units)],
    }


def plan_to_yaml(plan: Plan) -> str:
    """The plan file's text."""
    return yaml.safe_dump(plan_to_dict(plan), sort_keys=False)


def load_plan(path: Path) -> Plan:
    """Read a plan file; raises PlanError with file, key and value for anything that is not a plan."""
    try:
        data = load_mapping(path)
        _check_keys(data, ("mesh", "micro_batch_size", "accumulation", "compile", "units"), "the plan")
        if not isinstance(data["units"], list):
            raise PlanError("units must be a list")
        return Plan(
            mesh=_read(MeshPlan, data["mesh"], "mesh"),
            micro_batch_size=_read_count(data, "micro_batch_size"),
            accumulation=_read_count(data, "accumulation"),
            compile=_read(CompileConfig, data["compile"], "compile"),
            units=tuple(unit for entry in data["units"] for unit in _read_units(entry)),
        )
    except YamlError as error:
        raise PlanError(f"plan file {error}") from None
    except PlanError as error:
        raise PlanError(f"plan file {path}: {error}") from None


def group_units(units: Sequence[UnitPlan]) -> list[tuple[str, UnitPlan]]:
    """Neighbouring units treated alike as one entry: its name, and the first unit it stands for."""
    groups: list[tuple[str, UnitPlan]] = []
    first = 0
    for end in range(1, len(units) + 1):
        if end < len(units) and _follows(units[end - 1], units[end]):
            continue
        name = units[first].name
        if end - first > 1:
            before, low, after = _NUMBER.fullmatch(name).groups()  # type: ignore[union-attr]
            name = f"{before}[{low}-{int(low) + end - first - 1}]{after}"
        groups.append((name, units[first]))
        first = end
    return groups


def _treatment(unit: UnitPlan) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(unit).items() if k != "modules"}


def _follows(one: UnitPlan, other: UnitPlan) -> bool:
    """Whether `other` is treated like `one` and its name is one's with the number one higher."""
    match = _NUMBER.fullmatch(one.name)
    if not match or repr(_treatment(one)) != repr(_treatment(other)):  # repr, because True == 1
        return False
    before, number, after = match.groups()
    if str(int(number)) != number:  # 09 would come back as 9
        return False
    return other.name == f"{before}{int(number) + 1}{after}"


def _read_units(entry: Any) -> list[UnitPlan]:
    if not isinstance(entry, dict) or not isinstance(entry.get("unit"), str):
        raise PlanError(f"units: each entry needs a key 'unit' with a name, got {entry!r}")
    name = entry["unit"]
    match = _RANGE.fullmatch(name)
    names = [name]
    if "modules" in entry:
        raise PlanError(f"unit {name} has unknown key modules: its name says them, as in first+second")
    if match:
        before, low, high, after = match.groups()
        if int(high) - int(low) >= MAX_RANGE:
            raise PlanError(f"unit {name}: a range of more than {MAX_RANGE} units")
        names = [f"{before}{i}{after}" for i in range(int(low), int(high) + 1)]
    treatment = {key: value for key, value in entry.items() if key != "unit"}
    return [_read(UnitPlan, {"modules": tuple(n.split("+")), **treatment}, f"unit {name}") for n in names]


def _read(cls: type, data: Any, place: str) -> Any:
    """Build a frozen dataclass from a mapping, every key present and of the field's type."""
    if not isinstance(data, dict):
        raise PlanError(f"{place} must be a mapping, got {data!r}")
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    _check_keys(data, tuple(fields), place)
    for key, value in data.items():
        wanted = fields[key]
        fits = isinstance(value, wanted) if isinstance(wanted, type) else isinstance(value, (bool, int, tuple))
        if not fits or (wanted is int and (isinstance(value, bool) or value < 0)):
            name = wanted.__name__ if isinstance(wanted, type) else wanted
            raise PlanError(f"{place}: {key}={value!r} must be a{' non-negative' if wanted is int else ''} {name}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise PlanError(f"{place}: {key}={value!r} must be one of {', '.join(_CHOICES[key])}")
    return cls(**data)


def _read_count(data: dict[str, Any], key: str) -> int:
    if type(data[key]) is not int or data[key] < 1:
        raise PlanError(f"{key}={data[key]!r} must be a positive integer")
    return int(data[key])


def _check_keys(data: dict[str, Any], wanted: Sequence[str], place: str) -> None:
    missing, unknown = set(wanted) - set(data), {str(key) for key in data} - set(wanted)
    if missing or unknown:
        parts = [f"{word} {', '.join(sorted(keys))}" for word, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise PlanError(f"{place} {' and '.join(parts)}; its keys are {', '.join(wanted)}")


def plan_to_table(plan: Plan) -> str:
    """The plan for people: the mesh and the batch in a line each, then one row per group of equal units."""
    mesh, plural = plan.mesh, "es" if plan.mesh.world_size > 1 else ""
    head = ["unit", "dtype", "reduce", "reshard", "prefetch fwd/bwd", "activation checkpoint", "compiled"]
    rows = [[name, u.param_dtype, u.reduce_dtype, str(u.reshard_after_forward).lower(),
             f"{u.forward_prefetch}/{u.backward_prefetch}", u.activation_checkpoint,
             plan.compile.backend if u.compiled else "-"] for name, u in group_units(plan.units)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    degrees = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES)
    batch = (f"{plan.global_batch_size} sequences = micro batch {plan.micro_batch_size} x data parallel "
             f"{mesh.data_parallel} x accumulation {plan.accumulation}")  # fmt: skip
    return "\n".join([f"mesh: {degrees} = {mesh.world_size} process{plural}", f"global batch: {batch}", *lines])
