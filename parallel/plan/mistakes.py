"""What is wrong with a plan, said in the words of its file or of the keys that it was made from."""

import dataclasses
from collections.abc import Sequence

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import AXES, ModelUnits, Plan

_OF_PLAN = (
    *("cpu_offload", "storage_dtype", "attention", "loss_chunk_tokens", "fused_projections", "async_tp"),
    *("float8.recipe", "float8.linears", "float8.all_gather"),
    *(f"compile.{field.name}" for field in dataclasses.fields(CompileConfig)),
)
_OF_UNITS = (
    *("reshard_after_forward", "forward_prefetch", "backward_prefetch", "activation_checkpoint"),
    *("activation_budget", "param_dtype", "reduce_dtype"),
)
# The key of the config that decides each field of a plan.
KEYS = {
    "mesh": "parallel",
    **{f"mesh.{axis}": f"parallel.{axis}" for axis in AXES},
    "micro_batch_size": "train.micro_batch_size",
    "accumulation": "train.global_batch_size",
    "tensor.sequence_parallel": "parallel.sequence_parallel",
    "tensor.styles": "parallel.tp_modules",
    **{field: f"parallel.{field}" for field in _OF_PLAN},
    **{f"units.{field}": f"parallel.{field}" for field in _OF_UNITS},
    "units.modules": "parallel.unit_min_params",
    "units.saved_ops": "parallel.selective_policy",
    "units.compiled": "parallel.compile.enabled",
}
_CHOOSE_LINEARS = ("parallel.float8.linears", "parallel.float8.min_dim")  # a file has what they chose


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A rule that a plan breaks.

    Args:
        field: of the plan, such as mesh.tp or units.param_dtype; a key where no field has what it says
        says: value, rule and way out: what follows the field's name ("=3 must divide ...") or a sentence
        units: names of the units that break it, if it is about single ones
        of_keys: the same for a plan made from keys, where that is another
    """

    field: str
    says: str
    units: tuple[str, ...] = ()
    of_keys: str = ""


def file_line(mistake: Mistake) -> str:
    """The mistake in a plan file, with its place."""
    (section, _, name), units = mistake.field.rpartition("."), mistake.units
    if units:
        many = f"units {units[0]} to {units[-1]} ({len(units)})"
        place = f"{many if len(units) > 1 else f'unit {units[0]}'}: "
    else:
        place = {"": "", "compile": "compile."}.get(section, f"{section}: ")
    return one_line(place + (name if mistake.says[0] in "=: " else "") + mistake.says)


def key_line(mistake: Mistake, strategy: str | None = None) -> str:
    """The mistake in a plan made from keys: that of the field in its place. A `strategy` decides the mesh."""
    says = mistake.of_keys or mistake.says
    if says[0] not in "=: ":
        return file_line(mistake)
    key = KEYS.get(mistake.field, mistake.field)
    if strategy and mistake.field == "mesh":
        key = f"parallel.strategy={strategy}"
    return one_line(key + says)


def contradictions(config: ParallelConfig, plan: Plan, model: ModelUnits) -> list[str]:
    """Keys of the config that say other than the plan file beside them, which decides: they would be ignored
    in silence."""
    default, lines = _values(ParallelConfig()), []
    for key, asked in _values(config).items():
        left_open = asked in (default[key], "auto") or (key == "parallel.dp_shard" and asked == -1)
        if left_open or key in _CHOOSE_LINEARS:
            continue
        planned = _planned(key, plan, model)
        if repr(asked) in map(repr, planned):  # repr, because True == 1
            continue
        found = ", ".join(dict.fromkeys(map(_word, planned)))
        file = f"the plan file {config.plan}"
        why = f", but {file} has {found}" if planned else f" is decided by {file}"
        lines.append(f"{key}={_word(asked)}{why}: leave the key out, or edit the file")
    return lines


def _values(config: ParallelConfig) -> dict[str, object]:
    """Values of all keys, by their names in the config."""
    sections = {"": config, "compile.": config.compile, "float8.": config.float8}
    return {
        f"parallel.{section}{key}": value
        for section, holder in sections.items()
        for key, value in vars(holder).items()
        if key not in ("plan", "compile", "float8")
    }


def _planned(key: str, plan: Plan, model: ModelUnits) -> list[object]:
    """What a plan has for a key of the config, in all units that the key is for; [] if it has no field of
    that name."""
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


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
