"""From what became of each key to a config that plans, how to launch it, and a report."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from meshwright.parallel.errors import PlanError, one_line
from meshwright.tools.import_accelerate.rules import Item, refused
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run

SECTION_ORDER = ("run", "model", "parallel", "optim", "train")
LAUNCH_ORDER = ("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint")
NO_MODEL = (
    "model and data are not in what was imported: start with a config that has them, as in --config "
    "llama_8b --config {}"
)
GPUS_PER_NODE = 8  # what a machine has at most, where the other trainer's config does not say


@dataclass(frozen=True)
class Imported:
    """A config of ours, nested as in YAML; what became of each key of theirs; how to launch it; what to
    know."""

    source: str
    config: Mapping[str, Any]
    items: Sequence[Item]
    launch: str
    notes: Sequence[str]


def make_imported(source: str, items: Sequence[Item], config_name: str) -> Imported:
    """Put the verdicts together and plan the result. Raises ConfigError with all refusals in one report."""
    refusals = [
        f"{source}: {_entry(item)}: {item.verdict.why}"
        for item in [*items, *_contradictions(items)]
        if item.verdict.kind == "refused"
    ]
    if refusals:
        raise ConfigError("\n".join(refusals))
    settings = {key: value for item in items for key, value in item.verdict.settings.items()}
    options = {name: value for item in items for name, value in item.verdict.launch.items()}
    config, processes = _nest(settings), _process_count(settings, options)
    notes = [note for item in items for note in item.verdict.notes]
    try:
        notes += _plan(config, options.get("--config"), processes or _fewest(settings))
    except (ConfigError, PlanError) as error:
        raise ConfigError(
            "\n".join(f"{source}, imported: {line}" for line in str(error).splitlines())
        ) from None
    if "--config" not in options:
        notes.append(NO_MODEL.format(config_name))
    line = launch_line(options, processes, config_name)
    if "NODES" in line:
        notes.append(_spread(settings, processes))
    return Imported(source, config, items, line, list(dict.fromkeys(notes)))


def _entry(item: Item) -> str:
    key = one_line(item.key, 300)
    return key if item.value is None else f"{key}={_plain(item.value)}"


def _contradictions(items: Sequence[Item]) -> list[Item]:
    """Refusals of keys that set one of ours to another value than a key before them."""
    first: dict[str, Item] = {}
    found = []
    for item in items:
        for key, value in item.verdict.settings.items():
            before = first.setdefault(key, item)
            if before.verdict.settings[key] != value:
                found.append(
                    Item(item.key, item.value, refused(f"it contradicts {_entry(before)}: both set {key}"))
                )
    return found


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings, sections in the order of our configs."""
    config: dict[str, Any] = {}
    for key, value in sorted(settings.items(), key=lambda entry: SECTION_ORDER.index(entry[0].split(".")[0])):
        *sections, name = key.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return config


def _process_count(settings: Mapping[str, Any], options: Mapping[str, str]) -> int | None:
    """Processes of the run: as launched, or as the degrees multiply; None where dp_shard takes all that are
    left."""
    if "--nproc-per-node" in options:
        return int(options["--nproc-per-node"]) * int(options.get("--nnodes", "1"))
    return None if settings.get("parallel.dp_shard", -1) == -1 else _fewest(settings)


def _fewest(settings: Mapping[str, Any]) -> int:
    """The product of the degrees, with 1 for one that takes all that are left."""
    replicate, tp = settings.get("parallel.dp_replicate", 1), settings.get("parallel.tp", 1)
    return int(replicate * tp * max(settings.get("parallel.dp_shard", 1), 1))


def _plan(config: Mapping[str, Any], base: str | None, processes: int) -> list[str]:
    """Plan the config as train.main would, over the base config where there is one; notes on what depends on
    the model.

    Raises ConfigError and PlanError for what no model could mend. Without a base the model is the default
    one, so that a degree that does not divide it is a note.
    """
    try:
        plan_run(read_back(config, base).job, processes)
    except PlanError as error:
        lines = str(error).splitlines()
        if base or not all(_divides_default(line, config) for line in lines):
            raise
        return [f"for the configs beside this one: {line} (that is the default's)" for line in lines]
    return []


def _divides_default(mistake: str, config: Mapping[str, Any]) -> bool:
    """Whether a mistake of the plan is a degree that does not divide a value that was not imported."""
    return " must divide model." in mistake or (
        " must divide train.seq_len" in mistake and "seq_len" not in config.get("train", {})
    )


def read_back(config: Mapping[str, Any], base: str | None) -> Config:
    """The config as train.main reads it from a file. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        try:
            return parse_config([*([f"--config={base}"] if base else []), f"--config={path}"])
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), "the imported config")) from None


def launch_line(options: Mapping[str, str], processes: int | None, config_name: str) -> str:
    """The command that starts the run, on every machine alike."""
    base = [f"--config {options['--config']}"] if "--config" in options else []
    program = " ".join(["-m train.main", *base, f"--config {config_name}"])
    environment = "".join(
        f"{name}={quote(value)} " for name, value in options.items() if not name.startswith("--")
    )
    if processes == 1:
        return f"{environment}python {program}"
    known = {name: options[name] for name in LAUNCH_ORDER if name in options}
    if "--nproc-per-node" not in known:
        small = processes is not None and processes <= GPUS_PER_NODE
        known = (
            {"--nproc-per-node": str(processes)}
            if small
            else {"--nnodes": "NODES", "--nproc-per-node": "GPUS"}
        )
    return (
        f"{environment}torchrun {' '.join(f'{name} {quote(value)}' for name, value in known.items())} "
        f"{program}"
    )


def _spread(settings: Mapping[str, Any], processes: int | None) -> str:
    number = f"{processes}" if processes else f"a multiple of {_fewest(settings)}"
    return (
        f"the launch line's NODES x GPUS must be {number}: torchtitan's settings do not say how many "
        "machines there are"
    )


def as_yaml(imported: Imported) -> str:
    """The config file, with where it comes from and how to launch it as comments."""
    body = yaml.safe_dump(dict(imported.config), sort_keys=False)
    return (
        f"# Imported from {' '.join(imported.source.split())} by tools.import_accelerate. Launch:\n# "
        f"{imported.launch}\n{body}"
    )


def as_document(imported: Imported) -> dict[str, Any]:
    """The report as plain data."""
    mapped = [
        {
            "key": item.key,
            "value": item.value,
            "to": {**item.verdict.settings, **item.verdict.launch},
            "why": item.verdict.why,
        }
        for item in imported.items
        if item.verdict.kind == "mapped"
    ]
    dropped = [
        {"key": item.key, "value": item.value, "why": item.verdict.why}
        for item in imported.items
        if item.verdict.kind == "dropped"
    ]
    return {
        "config": imported.config,
        "mapped": mapped,
        "dropped": dropped,
        "notes": list(imported.notes),
        "launch": imported.launch,
    }


def as_text(imported: Imported) -> str:
    """The report for people: a line for each key, then notes, then how to launch."""
    lines = ["mapped:"]
    for item in imported.items:
        if item.verdict.kind == "mapped":
            targets = ", ".join(
                f"{k}={_plain(v)}" for k, v in {**item.verdict.settings, **item.verdict.launch}.items()
            )
            lines.append(f"  {_entry(item)} -> {targets or 'nothing to set'}: {item.verdict.why}")
    lines += [
        "dropped:",
        *(f"  {_entry(i)}: {i.verdict.why}" for i in imported.items if i.verdict.kind == "dropped"),
    ]
    lines += [f"note: {note}" for note in imported.notes]
    return "\n".join([*lines, "launch:", f"  {imported.launch}"])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else one_line(value, 300)
