"""The spec of a sweep, a YAML file, and the runs that it describes."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count, report, structure
from meshwright.parallel.yaml_io import load_mapping
from meshwright.train.config_parser import has_value, is_config_key, key_hint, leaves
from meshwright.train.errors import ConfigError
from meshwright.train.files import user_path

# of the optional keys, except folder, whose default contains the names of spec and config
DEFAULTS = {"processes": 1, "nodes": 1, "overrides": {}, "grid": {}, "runs": {}, "seeds": [], "repeat": 1}
LAUNCH = ("processes", "nodes")  # keys of a run that are not config keys
FIXED = ("run.dir", "config")  # set by the sweep itself
MAX_RUNS = 1000  # a larger sweep is most likely a mistake
NAME_LETTERS = 80  # of a run's name, which is also its folder's name
RESERVED = ("report.html", "report.json", "sweep.json")  # files next to the runs' folders


@dataclass(frozen=True)
class Spec:
    """A sweep, as its spec and the command line describe it.

    Args:
        config: name or path, as --config of train.main
        processes, nodes: of every run that does not set its own; processes are per node
        overrides: config keys of all runs
        grid: values to try for each key, in all combinations
        runs: named runs, each with its keys; with a grid, each of them for every combination
        seeds: run.seed of each copy; empty keeps the config's
        repeat: how often each run is repeated, to measure the noise of a figure
        folder: folder of the runs and the report
    """

    config: str
    processes: Count
    nodes: Count
    overrides: Mapping[str, Any]
    grid: Mapping[str, Annotated[tuple[Any, ...], msgspec.Meta(min_length=1)]]
    runs: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    repeat: Count
    folder: Path


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: name, processes, nodes and config keys; `own`: those that the sweep varies."""

    name: str
    processes: int
    nodes: int
    overrides: Mapping[str, Any]
    own: Mapping[str, Any]


def read_spec(path: Path, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> Spec:
    """Read a spec.

    Args:
        changes: keys of the spec that the command line replaces
        overrides: config keys that the command line replaces

    Raises ConfigError with all errors of the file's form or, if the form is valid, with all errors of its
    values.
    """
    try:
        written = load_mapping(path)
        if problems := [
            f"unknown key {key}: put it under overrides" for key in written if is_config_key(str(key))
        ]:
            raise ValueError(report(str(path), problems))
        spec = structure(Spec, _complete(path, written, changes), str(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spec = replace(spec, overrides={**spec.overrides, **overrides})
    if problems := [*_wrong_values(spec), *_wrong_config_keys(spec, overrides)]:
        raise ConfigError(report(str(path), problems))
    return spec


def _complete(path: Path, written: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's mapping with every key of Spec, and config keys dotted under their current names."""
    given = str(changes.get("config", ""))
    folder = Path("sweeps", "-".join(filter(None, (path.stem, Path(given).stem))))
    present = {key: value for key, value in written.items() if value is not None}
    data = {**DEFAULTS, "folder": str(folder), **present, **changes}
    if isinstance(data["folder"], str):
        data["folder"] = user_path(data["folder"], f"{path}: folder", ConfigError)
    for key in ("overrides", "grid"):
        data[key] = _flat(data[key])
    if isinstance(data["runs"], dict):
        data["runs"] = {str(name): _flat({} if keys is None else keys) for name, keys in data["runs"].items()}
    return data


def _flat(keys: Any) -> Any:
    """Return the config keys of one place in the spec, dotted; a value that is no mapping unchanged."""
    return dict(leaves(keys)) if isinstance(keys, dict) else keys


def make_cells(spec: Spec) -> list[SweepRun]:
    """Return every run of the sweep in the order of the file: named runs, the grid with its last key
    fastest, seeds, repeats. Raises ConfigError for more than MAX_RUNS, before any run is created."""
    count = math.prod([len(spec.runs) or 1, *map(len, spec.grid.values()), len(spec.seeds) or 1, spec.repeat])
    if count > MAX_RUNS:
        raise ConfigError(
            f"the sweep has {count} runs, more than {MAX_RUNS}: remove values from grid, or lower repeat"
        )
    cells = []
    for name, keys in spec.runs.items() or [("", {})]:
        for values in itertools.product(*spec.grid.values()):
            grid = dict(zip(spec.grid, values, strict=True))
            for seed, turn in itertools.product(spec.seeds or (None,), range(spec.repeat)):
                own = {**keys, **grid, **({} if seed is None else {"run.seed": seed})}
                parts = [
                    name,
                    *(f"{_short_key(key, spec.grid)}={_compact_value(value)}" for key, value in grid.items()),
                ]
                parts += [f"seed={seed}"] if len(spec.seeds) > 1 else []
                parts += [f"turn={turn + 1}"] if spec.repeat > 1 else []
                launch = {key: own.pop(key, getattr(spec, key)) for key in LAUNCH}
                cells.append(
                    SweepRun(
                        _folder_name(" ".join(filter(None, parts)) or "run"),
                        **launch,
                        overrides={**spec.overrides, **own},
                        own=own,
                    )
                )
    return list(_with_unique_names(cells))


def value_text(value: Any) -> str:
    """Format a YAML value on one line, even one that is not valid in a config."""
    return value if isinstance(value, str) else json.dumps(value)


def _wrong_values(spec: Spec) -> Iterator[str]:
    if len(set(spec.seeds)) < len(spec.seeds):
        yield f"seeds={one_line(list(spec.seeds), 80)} must be a list of distinct integers"
    for key, values in spec.grid.items():
        if len({value_text(value) for value in values}) < len(values):
            yield f"grid: {key} has a value twice: use repeat to repeat runs"


def _wrong_config_keys(spec: Spec, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in config keys: unknown keys, keys that the sweep sets itself, keys set in two
    places, invalid counts, and values that no config accepts. `given`: the keys of --override."""
    runs = {f"runs: {name}": keys for name, keys in spec.runs.items()}
    places = {"overrides": spec.overrides, "grid": spec.grid, **runs}
    for place, keys in places.items():
        for key, value in keys.items():
            varied = place != "overrides"
            if varied and key in LAUNCH:
                for count in value if place == "grid" else [value]:
                    if type(count) is not int or count < 1:
                        yield f"{place}: {key}={one_line(count, 80)} must be an integer of at least 1"
            elif key in FIXED:
                yield (
                    f"{place}: {key} is set by the sweep (each run has its own folder, all share one "
                    "config): remove it"
                )
            elif not has_value(key):
                yield f"{place}: unknown key {one_line(key, 80)}. {key_hint(key)}"
            elif key == "run.seed" and spec.seeds:
                yield (
                    f"{'--override' if key in given else place}: run.seed is also set by seeds: remove one "
                    "of the two"
                )
            elif varied and key in given:
                yield f"--override {key}: {place} varies this key: remove one of the two"
            elif place.startswith("runs") and key in spec.grid:
                yield f"{place}: {key} is in the grid too: remove one of the two"


def _short_key(key: str, grid: Mapping[str, Any]) -> str:
    """Return the last part of a key, or the full key if another key of the grid has the same last part."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in grid) > 1 else last


def _compact_value(value: Any) -> str:
    return value_text(value).replace('"', "").replace(" ", "")


def _folder_name(text: str) -> str:
    """Return a name of bounded length that needs no quotes in a shell."""
    name = re.sub(r"[^\w.=,+-]+", "_", text).strip("._-")
    return name[:NAME_LETTERS] or "run"


def _with_unique_names(cells: Sequence[SweepRun]) -> Iterator[SweepRun]:
    """Number runs whose names collide, such as those whose values differ only in characters that are not
    allowed in folder names."""
    taken = set(RESERVED)
    for cell in cells:
        names = itertools.chain([cell.name], (f"{cell.name}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        yield SweepRun(name, cell.processes, cell.nodes, cell.overrides, cell.own)
