"""A plan as text: the YAML file, which reads back to an equal plan, and the table that runs print.

Consecutive units with the same settings whose names differ by one number share an entry: `layers.[0-31]`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.parallel.errors import PlanError, fold, one_line
from meshwright.parallel.plan.mistakes import Mistake, describe
from meshwright.parallel.plan.schema import ROOT, Plan, UnitPlan, gathers_in_float8, leaves_parameters
from meshwright.parallel.structure import convert
from meshwright.parallel.yaml_io import YamlError, load_mapping, to_yaml

T = TypeVar("T")
_RANGE = re.compile(r"(.*)\[(\d{1,9})-(\d{1,9})\](.*)")
_NUMBER = re.compile(r"(.*?)(\d+)([^\d]*)")
MAX_RANGE = 10_000  # units in an entry; the deepest published Llama has 126


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data for YAML or JSON."""
    units = [{"unit": name, **_plain(unit)} for name, unit in group_units(plan.units)]
    for unit in units:
        del unit["modules"]  # whose names are its own
    names = {key: join_names([name or ROOT for name in getattr(plan, key)]) for key in ("modules", "blocks")}
    return _plain(dataclasses.replace(plan, units=())) | names | {"units": units}


def _plain(value: Plan | UnitPlan) -> dict[str, Any]:
    """Return the fields by name, with lists for tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return plain


def plan_to_yaml(plan: Plan) -> str:
    return to_yaml(plan_to_dict(plan))


def diff_plans(a: Plan, b: Plan) -> dict[str, tuple[str, str]]:
    """Return the values that differ between two plans, as text, by field; {} if the plans are equal."""
    of_a, of_b = dict(_fields(a)), dict(_fields(b))
    pairs = {name: (of_a.get(name, "none"), of_b.get(name, "none")) for name in of_a | of_b}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _fields(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield each field of a plan with its value as text, that of units with the units of each value."""
    for key, value in plan_to_dict(plan).items():
        if key != "units":
            yield from _leaves(key, value)
    yield "global_batch_size", str(plan.global_batch_size)
    yield "units", ", ".join(join_names([unit.name for unit in plan.units]))
    for field in dataclasses.fields(UnitPlan)[1:]:  # all but the modules
        names: dict[str, list[str]] = {}
        for unit in plan.units:
            names.setdefault(value_text(getattr(unit, field.name)), []).append(unit.name)
        each = [f"{text} in {', '.join(join_names(units))}" for text, units in names.items()]
        yield f"units.{field.name}", "; ".join(each if each[1:] else names)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value_text(value)


def value_text(value: Any) -> str:
    """Return a value of a plan or of a key as in YAML: null, true, [a, b]."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def load_plan(path: Path) -> Plan:
    """Read a plan file and check its keys and types; `plan_file_mistakes` checks the rules. Raises PlanError
    that lists all mistakes, each with the file and, where known, the line, key or value."""
    try:
        data = load_mapping(path)
    except YamlError as error:
        raise PlanError(f"plan file {error}") from None
    mistakes = list[str]()
    for key in ("modules", "blocks"):
        if isinstance(data.get(key), list):
            data[key] = [*map(_module_name, _read_names(data[key], key, mistakes))]
    if isinstance(data.get("units"), list):
        data["units"] = _read_units(data["units"], mistakes)
    plan: Plan = convert(Plan, data, "", mistakes)
    if mistakes:
        raise PlanError("\n".join(describe(Mistake("", mistake), path) for mistake in mistakes))
    return plan


def group_units(units: Sequence[UnitPlan]) -> list[tuple[str, UnitPlan]]:
    """Group consecutive units with the same settings: (name of the entry, its first unit)."""
    groups = _group_ranges(units, attrgetter("name"), lambda unit: repr(unit.settings))  # because True == 1
    return [(_range_name([unit.name for unit in group]), group[0]) for group in groups]


def join_names(names: Sequence[str]) -> list[str]:
    """Join consecutive numbered names into ranges such as layers.[0-31]."""
    return list(map(_range_name, _group_ranges(names, str, lambda _: "")))


def _group_ranges(items: Sequence[T], name: Callable[[T], str], alike: Callable[[T], Any]) -> list[list[T]]:
    """Group consecutive items whose names differ by one number and that are alike."""
    groups: list[list[T]] = []
    for item in items:
        if groups and _is_next(name(groups[-1][-1]), name(item)) and alike(groups[-1][0]) == alike(item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _range_name(names: Sequence[str]) -> str:
    """Return layers.[0-31] for layers.0 to layers.31; a single name unchanged."""
    if len(names) == 1:
        return names[0]
    before, low, after = _NUMBER.fullmatch(names[0]).groups()  # type: ignore[union-attr]
    return f"{before}[{low}-{int(low) + len(names) - 1}]{after}"


def _is_next(name: str, following: str) -> bool:
    """Whether `following` is `name` with its number increased by 1."""
    match = _NUMBER.fullmatch(name)
    if not match:
        return False
    before, number, after = match.groups()
    if str(int(number)) != number:  # 09 would be read back as 9
        return False
    return following == f"{before}{int(number) + 1}{after}"


def _read_units(entries: list[Any], mistakes: list[str]) -> list[UnitPlan]:
    """Return the units that the entries stand for, each with the settings of its entry."""
    units = list[UnitPlan]()
    for entry in entries:
        name, wrong = entry.get("unit") if isinstance(entry, dict) else None, list[str]()
        if not isinstance(name, str):
            shown = one_line(repr(entry), 200)
            mistakes.append(f"units: each entry needs a key 'unit' with a name, not {shown}")
            continue
        if "modules" in entry:
            wrong.append(
                "unknown key modules: remove it; the unit's name lists its modules, as in first+second"
            )
        settings = {key: value for key, value in entry.items() if key not in ("unit", "modules")}
        first = convert(UnitPlan, {"modules": [], **settings}, "", wrong)
        mistakes += [f"unit {name}: {each}" for each in wrong]
        names = _read_names([name], "units", mistakes)
        if not wrong:
            modules = [tuple(map(_module_name, each.split("+"))) for each in names]
            units += [dataclasses.replace(first, modules=each) for each in modules]
    return units


def _module_name(text: str) -> str:
    return "" if text == ROOT else text


def _read_names(entries: list[Any], key: str, mistakes: list[str]) -> list[Any]:
    """Return the names that entries such as layers.[0-31] stand for."""
    names = []
    for entry in entries:
        match = _RANGE.fullmatch(entry) if isinstance(entry, str) else None
        if not match:
            names.append(entry)
            continue
        before, low, high, after = match[1], int(match[2]), int(match[3]), match[4]
        if not 0 <= high - low < MAX_RANGE - len(names):
            mistakes.append(f"{key}: {entry} must be a range, low to high; {MAX_RANGE} units are the limit")
            return []
        names += [f"{before}{i}{after}" for i in range(low, high + 1)]
    return names


HEAD = ("unit", "dtype", "reduce", "reshard", "prefetch fwd/bwd", "activation checkpoint", "compiled")


def plan_to_table(plan: Plan) -> str:
    """Return the table that runs print: lines on mesh, batch and kernels, a line with the settings that all
    units share, then a row per group of units with the others. It fits 80 columns, unless names are long."""
    rows = [_table_row(name, unit, plan.compile.backend) for name, unit in group_units(plan.units)]
    units, *settings = zip(HEAD, *rows, strict=True)
    shared = [f"{column[0]} {column[1]}" for column in settings if len(set(column[1:])) == 1]
    differing = [column for column in settings if len(set(column[1:])) > 1]
    lines = _about_all_units(plan)
    if shared:
        lines.append(f"all units: {', '.join(shared)}")
    head, *rows = map(list, zip(units, *differing, strict=True))
    return "\n".join(
        [*(fold(re.split("(?<=[,;]) | (?==)", line)) for line in lines), format_table(head, rows)]
    )


Plan.__str__ = plan_to_table  # type: ignore[method-assign, assignment]  # what print(plan) shows


def _about_all_units(plan: Plan) -> list[str]:
    mesh, plural = plan.mesh, "es" if plan.mesh.world_size > 1 else ""
    degrees = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in mesh.axes)
    batch = (
        f"{plan.global_batch_size} sequence{'s' * (plan.global_batch_size > 1)} = micro batch "
        f"{plan.micro_batch_size} x data parallel {mesh.data_parallel} x accumulation {plan.accumulation}"
    )
    first = [f"mesh: {degrees} = {mesh.world_size} process{plural}", f"global batch: {batch}"]
    if plan.tensor.styles:
        unsplit = [pattern for pattern, style in plan.tensor.styles.items() if style.startswith("whole_")]
        first.append(
            f"tensor parallel: sequence parallel {'on' if plan.tensor.sequence_parallel else 'off'}, loss "
            f"parallel {'on' if 'loss' in plan.tensor.styles.values() else 'off'}"
            + (f", not split: {', '.join(unsplit)}" if unsplit else "")
        )
    if mesh.cp > 1:
        first.append(
            f"context parallel: each rank has 1/{mesh.cp} of a sequence's tokens; exchange around attention: "
            f"{plan.context.exchange}"
        )
    if plan.cpu_offload:
        first.append("cpu offload: sharded parameters, gradients and optimizer state in host memory")
    chunk = plan.loss_chunk_tokens
    loss = f"loss {chunk} tokens at a time" if chunk else "loss of all tokens at once"
    kernels = f"attention {plan.attention}, {loss}" if plan.attention else "the model's own"
    alone = ", which FSDP2 leaves alone" if leaves_parameters(plan) else ""
    first.append(f"kernels: {kernels}; parameters stored in {plan.storage_dtype}{alone}")
    if plan.unsharded:
        first.append(f"unsharded: {', '.join(plan.unsharded)}")
    fused = ["projections with the same input are one product"] if plan.fused_projections else []
    if options := [*fused, *(["async tp"] if plan.async_tp else [])]:
        first.append(", ".join(options))
    if plan.float8.linears:
        gathered = ", gathered in float8 too" if gathers_in_float8(plan) else ""
        first.append(f"float8 {plan.float8.recipe}{gathered}: {', '.join(plan.float8.linears)}")
    return first


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with left-aligned columns, two spaces apart, under their headings."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
    return "\n".join(lines)


def _table_row(name: str, unit: UnitPlan, backend: str) -> list[str]:
    output = "" if unit.output_dtype == "same" else f" -> {unit.output_dtype}"
    prefetch = f"{_format_prefetch(unit.forward_prefetch)}/{_format_prefetch(unit.backward_prefetch)}"
    modules = name.split("+")
    return [
        "+...+".join([modules[0], modules[-1]]) if modules[2:] else name,
        unit.param_dtype + output,
        unit.reduce_dtype + (" once" if unit.reduce_gradients == "last_micro_batch" else ""),
        str(unit.reshard_after_forward).lower() + ("" if unit.reshard_after_backward else "/false"),
        prefetch,
        _format_activations(unit),
        backend if unit.compiled else "no",
    ]


def _format_prefetch(prefetch: int | tuple[str, ...]) -> str:
    return str(prefetch) if isinstance(prefetch, int) else f"[{' '.join(prefetch)}]"


def _format_activations(unit: UnitPlan) -> str:
    if unit.activation_checkpoint == "selective":
        return f"selective ({len(unit.saved_ops)} ops kept)"
    if unit.activation_checkpoint == "budget":
        return f"budget {unit.activation_budget}"
    return unit.activation_checkpoint
