"""Turn the verdicts on all keys into a config that plans, a launch command, and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from jsonargparse import Namespace

from meshwright.parallel.errors import PlanError, each_line, one_line
from meshwright.parallel.yaml_io import to_yaml
from meshwright.tools.import_accelerate.rules import Item
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run

LAUNCH_ORDER = ("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint")
NO_MODEL = (
    "the imported config has no model and no data: put a config with them before it, as in --config llama_8b "
    "--config CONFIG.yaml"
)
# PlanErrors about the default model and sequence length, which the config before this one may replace.
OF_THE_MODEL = (" must divide model.", " must divide train.seq_len")


@dataclass(frozen=True)
class Imported:
    """The converted config, nested as in YAML; the verdict on each accelerate key; launch command; notes."""

    source: str
    config: Mapping[str, Any]
    items: Sequence[Item]
    launch: str
    notes: Sequence[str]


def make_imported(source: str, items: Sequence[Item]) -> Imported:
    """Combine the verdicts and plan the result. Raises ConfigError with all refusals in one report."""
    if refusals := [item for item in items if item.verdict.kind == "refused"]:
        lines = [f"{source}: {_entry(item)}: {item.verdict.why}" for item in refusals]
        raise ConfigError(each_line("\n".join(lines)))
    settings = {key: value for item in items for key, value in item.verdict.settings.items()}
    options = {name: value for item in items for name, value in item.verdict.launch.items()}
    notes = [note for item in items for note in item.verdict.notes]
    try:
        notes += _plan(settings, int(options["--nproc-per-node"]) * int(options.get("--nnodes", "1")))
    except (ConfigError, PlanError) as error:
        lines = [one_line(f"{source}, imported: {line}") for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from None
    notes.append(NO_MODEL)
    return Imported(source, _nest(settings), items, launch_line(options), list(dict.fromkeys(notes)))


def _entry(item: Item) -> str:
    key = one_line(item.key, 300)
    return key if item.value is None else f"{key}={_plain(item.value)}"


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys as nested mappings, by section."""
    config = Namespace()
    for key in sorted(settings, key=lambda key: key.split(".")[0]):
        config[key] = settings[key]
    return config.as_dict()


def _plan(settings: Mapping[str, Any], processes: int) -> list[str]:
    """Plan the settings as train.main would, with the default model; return notes on errors that depend on
    the model.

    Raises ConfigError and PlanError for errors that no model can fix.
    """
    try:
        plan_run(parse_config([f"--{key}={_plain(value)}" for key, value in settings.items()]).job, processes)
    except PlanError as error:
        lines = str(error).splitlines()
        if not all(any(phrase in line for phrase in OF_THE_MODEL) for line in lines):
            raise
        return [f"checked with the default model only: {line}" for line in lines]
    return []


def launch_line(options: Mapping[str, str]) -> str:
    """Return the command that starts the run, the same on every machine."""
    known = {name: options[name] for name in LAUNCH_ORDER if name in options}
    variables = "".join(f"{k}={quote(v)} " for k, v in options.items() if k not in known)
    single = known == {"--nproc-per-node": "1"}
    torchrun = " ".join(["torchrun", *(f"{name} {quote(value)}" for name, value in known.items())])
    return f"{variables}{'python' if single else torchrun} -m train.main --config CONFIG.yaml"


def as_yaml(imported: Imported) -> str:
    """Return the config file, with its source and launch command as comments."""
    body = to_yaml(dict(imported.config))
    source = " ".join(imported.source.split())
    return f"# Imported from {source} by tools.import_accelerate. Launch:\n# {imported.launch}\n{body}"


def as_text(imported: Imported) -> str:
    """Return the report as text: a line for each key, then the notes and the launch command."""
    mapped, dropped = ["mapped:"], ["dropped:"]
    for item in imported.items:
        settings = {**item.verdict.settings, **item.verdict.launch}
        targets = ", ".join(f"{key}={_plain(value)}" for key, value in settings.items())
        if item.verdict.kind == "mapped":
            mapped.append(f"  {_entry(item)} -> {targets or 'nothing to set'}: {item.verdict.why}")
        else:
            dropped.append(f"  {_entry(item)}: {item.verdict.why}")
    notes = [f"note: {note}" for note in imported.notes]
    return "\n".join([*mapped, *dropped, *notes, "launch:", f"  {imported.launch}"])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else one_line(value, 300)
