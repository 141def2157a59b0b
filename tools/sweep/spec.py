"""The file that describes a sweep, and the runs it comes to."""

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
from meshwright.tools.run_reader import flatten
from meshwright.train.config_parser import is_config_key, known_keys, near_key, rename_keys, warn_once
from meshwright.train.errors import ConfigError
from meshwright.train.files import user_path

# of the keys that a spec may leave out; without folder, which is called after spec and config
DEFAULTS = {"processes": 1, "nodes": 1, "overrides": {}, "grid": {}, "runs": {}, "seeds": [], "repeat": 1}
LAUNCH = ("processes", "nodes")  # keys of a run that are no keys of a config
FIXED = ("run.dir", "config")  # what the sweep itself says
MAX_RUNS = 1000  # of one sweep: more are a slip of the pen
NAME_LETTERS = 80  # of a run's name, which is a folder's
RESERVED = ("report.html", "report.json", "sweep.json")  # files beside the runs' folders


@dataclass(frozen=True)
class Spec:
    """A sweep as asked for.

    Args:
        config: name or path, as --config of train.main
        processes, nodes: of every run that does not say its own; processes are those of a node
        overrides: config keys of all runs
        grid: keys, each with the values to try: all combinations
        runs: named runs, each with its keys; with a grid each of them for every combination
        seeds: run.seed of each copy; none leaves the config's
        repeat: how often each is run, to see how much a figure varies by itself
        folder: where the runs' folders and the report go
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
    """One run of a sweep: its name, where it runs, and its config keys; `own` are those that the sweep
    varies."""

    name: str
    processes: int
    nodes: int
    overrides: Mapping[str, Any]
    own: Mapping[str, Any]


def read_spec(path: Path, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> Spec:
    """The file's sweep. `changes`: keys of the spec that the command line gives instead; `overrides`: config
    keys likewise. Raises ConfigError with all mistakes of the file's form, else with all in what it says."""
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
    """The file's mapping with every key of Spec, and config keys dotted, by their names of today."""
    given = str(changes.get("config", ""))
    folder = Path("sweeps", "-".join(filter(None, (path.stem, Path(given).stem))))
    said = {key: value for key, value in written.items() if value is not None}
    data = {**DEFAULTS, "folder": str(folder), **said, **changes}
    if isinstance(data["folder"], str):
        data["folder"] = user_path(data["folder"], f"{path}: folder", ConfigError)
    for key in ("overrides", "grid"):
        data[key] = _flat(path, key, data[key])
    if isinstance(data["runs"], dict):
        data["runs"] = {
            str(name): _flat(path, f"runs: {name}", {} if keys is None else keys)
            for name, keys in data["runs"].items()
        }
    return data


def _flat(path: Path, place: str, keys: Any) -> Any:
    """Config keys of one place of the spec, dotted, by their names of today; what is no mapping stays."""
    if not isinstance(keys, dict):
        return keys
    return rename_keys(flatten(keys, whole=known_keys()), f"{path}: {place}", warn_once)


def make_cells(spec: Spec) -> list[SweepRun]:
    """Every run of the sweep, in the order of the file: named runs, the grid with its last key fastest,
    seeds, repeats. Raises ConfigError for more than MAX_RUNS, before any is made."""
    count = math.prod([len(spec.runs) or 1, *map(len, spec.grid.values()), len(spec.seeds) or 1, spec.repeat])
    if count > MAX_RUNS:
        raise ConfigError(
            f"this sweep comes to {count} runs, more than {MAX_RUNS}: take values out of its grid, or lower "
            "repeat"
        )
    cells = []
    for name, keys in spec.runs.items() or [("", {})]:
        for values in itertools.product(*spec.grid.values()):
            grid = dict(zip(spec.grid, values, strict=True))
            for seed, turn in itertools.product(spec.seeds or (None,), range(spec.repeat)):
                own = {**keys, **grid, **({} if seed is None else {"run.seed": seed})}
                words = [
                    name,
                    *(f"{_short(key, spec.grid)}={_value_words(value)}" for key, value in grid.items()),
                ]
                words += [f"seed={seed}"] if len(spec.seeds) > 1 else []
                words += [f"turn={turn + 1}"] if spec.repeat > 1 else []
                place = {key: own.pop(key, getattr(spec, key)) for key in LAUNCH}
                cells.append(
                    SweepRun(
                        _folder_name(" ".join(filter(None, words)) or "run"),
                        **place,
                        overrides={**spec.overrides, **own},
                        own=own,
                    )
                )
    return list(_with_own_names(cells))


def override_text(key: str, value: Any) -> str:
    """As it is written on a command line."""
    return f"--{key}={value_text(value)}"


def value_text(value: Any) -> str:
    """A YAML value on one line, also one that no config can have."""
    return value if isinstance(value, str) else json.dumps(value) if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON has it; it has no dates, which YAML makes of 2024-01-31."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _wrong_values(spec: Spec) -> Iterator[str]:
    if len(set(spec.seeds)) < len(spec.seeds):
        yield f"seeds={one_line(list(spec.seeds), 80)} must be a list of different whole numbers"
    for key, values in spec.grid.items():
        if len({value_text(value) for value in values}) < len(values):
            yield f"grid: {key} has a value twice: to run something several times, use repeat"


def _wrong_config_keys(spec: Spec, given: Mapping[str, Any]) -> Iterator[str]:
    """Keys that no config has, that the sweep says itself, that two places would say, counts that are none,
    and values that no config can have. `given`: --override's."""
    known = known_keys()
    runs = {f"runs: {name}": keys for name, keys in spec.runs.items()}
    places = {"overrides": spec.overrides, "grid": spec.grid, **runs}
    for place, keys in places.items():
        for key, value in keys.items():
            varied = place != "overrides"
            if varied and key in LAUNCH:
                wrong = [count for count in (value if place == "grid" else [value]) if not _is_count(count)]
                yield from (
                    f"{place}: {key}={one_line(count, 80)} must be a whole number of at least 1"
                    for count in wrong
                )
            elif key in FIXED:
                yield (
                    f"{place}: {key} is not for a run of a sweep: each has a folder of its own, and all have "
                    "one config"
                )
            elif key not in known:
                yield f"{place}: unknown key {one_line(key, 80)}. {near_key(key)}"
            elif not _is_plain(value):
                yield (
                    f"{place}: {key}={one_line(value, 80)} is a date to YAML, which no key takes: put it in "
                    "quotes"
                )
            elif key == "run.seed" and spec.seeds:
                yield (
                    f"{'--override' if key in given else place}: run.seed is what seeds says. Leave one of "
                    "the two out"
                )
            elif varied and key in given:
                yield f"--override {key}: {place} varies this key. Leave one of the two out"
            elif place.startswith("runs") and key in spec.grid:
                yield f"{place}: {key} is in the grid too. Leave one of the two out"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _short(key: str, grid: Mapping[str, Any]) -> str:
    """The last part of a key, where the grid has no other key that ends so."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in grid) > 1 else last


def _value_words(value: Any) -> str:
    return value_text(value).replace('"', "").replace(" ", "")


def _folder_name(words: str) -> str:
    """A name that needs no quotes in a shell, of bounded length."""
    name = re.sub(r"[^\w.=,+-]+", "_", words).strip("._-")
    return name[:NAME_LETTERS] or "run"


def _with_own_names(cells: Sequence[SweepRun]) -> Iterator[SweepRun]:
    """Where names came out alike, as of values that are the same but for letters no folder can have, they are
    numbered."""
    taken = set(RESERVED)
    for cell in cells:
        names = itertools.chain([cell.name], (f"{cell.name}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        yield SweepRun(name, cell.processes, cell.nodes, cell.overrides, cell.own)
