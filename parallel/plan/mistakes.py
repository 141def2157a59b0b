"""Mistakes in a plan, reported by field of the plan file or by config key."""

import dataclasses
from collections.abc import Sequence

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import AXES, ModelUnits, Plan

_PLAN_FIELDS = (
    *("cpu_offload", "storage_dtype", "attention", "loss_chunk_tokens", "fused_projections", "async_tp"),
    *("float8.recipe", "float8.linears", "float8.all_gather"),
    *(f"compile.{field.name}" for field in dataclasses.fields(CompileConfig)),
)
_UNIT_FIELDS = (
    *("reshard_after_forward", "reshard_after_backward", "reduce_gradients"),
    *("forward_prefetch", "backward_prefetch", "activation_checkpoint"),
    *("activation_budget", "param_dtype", "reduce_dtype"),
)
# The config key that decides each field of a plan.
KEYS = {
    "mesh": "parallel",
    **{f"mesh.{axis}": f"parallel.{axis}" for axis in AXES},
    "micro_batch_size": "train.micro_batch_size",
    "accumulation": "train.global_batch_size",
    "tensor.sequence_parallel": "parallel.sequence_parallel",
    "context.exchange": "parallel.cp_exchange",
    "tensor.styles": "parallel.tp_modules",
    **{field: f"parallel.{field}" for field in _PLAN_FIELDS},
    **{f"units.{field}": f"parallel.{field}" for field in _UNIT_FIELDS},
    "units.modules": "parallel.unit_min_params",
    "units.saved_ops": "parallel.selective_policy",
    "units.compiled": "parallel.compile.enabled",
}
_LINEAR_FILTERS = (
    "parallel.float8.linears",
    "parallel.float8.min_dim",
)  # a plan file lists the linears that they select


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A rule that a plan breaks.

    Args:
        field: the plan's field, such as mesh.tp or units.param_dtype; a config key if no field has the value
        message: value, rule and fix: the text after the field's name ("=3 must divide ...") or a sentence
        units: names of the units that break the rule, if it is a rule for single units
        key_message: the message for a plan made from config keys, if it differs
    """

    field: str
    message: str
    units: tuple[str, ...] = ()
    key_message: str = ""


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
    message = mistake.key_message or mistake.message
    if message[0] not in "=: ":
        return file_line(mistake)
    key = KEYS.get(mistake.field, mistake.field)
    if strategy and mistake.field == "mesh":
        key = f"parallel.strategy={strategy}"
    return one_line(key + message)


def contradictions(config: ParallelConfig, plan: Plan, model: ModelUnits) -> list[str]:
    """Return a line for each config key that contradicts the plan file, which would silently override it."""
    default, lines = _values(ParallelConfig()), []
    for key, requested in _values(config).items():
        left_open = requested in (default[key], "auto") or (key == "parallel.dp_shard" and requested == -1)
        if left_open or key in _LINEAR_FILTERS:
            continue
        planned = _planned_values(key, plan, model)
        if repr(requested) in map(repr, planned):  # repr, because True == 1
            continue
        values = ", ".join(dict.fromkeys(map(_format_value, planned)))
        file = f"the plan file {config.plan}"
        rule = f", but {file} has {values}" if planned else f" is decided by {file}"
        lines.append(f"{key}={_format_value(requested)}{rule}: remove the key, or edit the file")
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


def _planned_values(key: str, plan: Plan, model: ModelUnits) -> list[object]:
    """Return the plan's values for a config key, in all units to which the key applies; [] if the plan has no
    field of that name."""
    if key == "parallel.cp_exchange":  # whose field has a shorter name
        return [plan.context.exchange]
    for field, decided_by in KEYS.items():
        section, _, name = field.rpartition(".")
        if decided_by != key or name != key.rpartition(".")[2]:
            continue
        if section != "units":
            return [getattr(getattr(plan, section) if section else plan, name)]
        units: Sequence[object] = plan.units
        if name == "reshard_after_forward":
            units = plan.units[:-1]  # the last is never resharded
        if name in ("activation_checkpoint", "activation_budget"):
            units = [unit for unit in plan.units if model.checkpointed.issuperset(unit.modules)]
        return [getattr(unit, name) for unit in units]
    return []


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
