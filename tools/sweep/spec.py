"""The file that describes a sweep, and the runs it comes to."""

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import one_line
from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.tools.run_reader import flatten
from meshwright.train.config_parser import known_keys, rename_keys, warn_once
from meshwright.train.errors import ConfigError

KEYS = ("config", "processes", "nodes", "overrides", "grid", "runs", "seeds", "repeat", "folder")
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
    processes: int
    nodes: int
    overrides: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    runs: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    repeat: int
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
    keys likewise. Raises ConfigError with all mistakes of the file."""
    try:
        data = load_mapping(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    problems = list(_wrong_keys(data))
    data = {**data, **changes}
    maps = {key: data.get(key) or {} for key in ("overrides", "grid", "runs")}
    problems += [
        f"{key} must be a mapping of keys to values"
        for key, value in maps.items()
        if not isinstance(value, dict)
    ]
    if problems:
        raise ConfigError(_report(path, problems))
    maps["overrides"] = {**_flat(path, "overrides", maps["overrides"]), **overrides}
    maps["grid"] = _flat(path, "grid", maps["grid"])
    problems += _wrong_values(data, maps)
    maps["runs"] = {
        str(name): _flat(path, f"runs: {name}", keys or {})
        for name, keys in maps["runs"].items()
        if isinstance(keys, dict | None)
    }
    problems += _wrong_config_keys(maps, overrides, bool(data.get("seeds")))
    if problems:
        raise ConfigError(_report(path, problems))
    given = str(changes.get("config", ""))
    folder = data.get("folder") or Path("sweeps", "-".join(filter(None, (path.stem, Path(given).stem))))
    return Spec(
        data["config"],
        data.get("processes", 1),
        data.get("nodes", 1),
        maps["overrides"],
        maps["grid"],
        maps["runs"],
        tuple(data.get("seeds") or ()),
        data.get("repeat", 1),
        Path(folder).expanduser(),
    )


def _flat(path: Path, place: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys of one place of the spec, dotted, by their names of today."""
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


def near_key(key: str) -> str:
    """What to say of a key that no config has: the one that was meant, or where they all are."""
    known = known_keys()
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else "See train.main -h."


def _is_plain(value: Any) -> bool:
    """Whether JSON has it; it has no dates, which YAML makes of 2024-01-31."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _wrong_keys(data: Mapping[str, Any]) -> Iterator[str]:
    for key in data:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            in_config = any(known == key or known.startswith(f"{key}.") for known in known_keys())
            hint = (
                "put it under overrides"
                if in_config
                else f"did you mean {near[0]}?"
                if near
                else f"known: {', '.join(KEYS)}"
            )
            yield f"unknown key {one_line(key, 80)}: {hint}"


def _wrong_values(data: Mapping[str, Any], maps: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Of the right keys."""
    if not isinstance(data.get("config"), str):
        yield "config must be the name or path of a config, such as llama_debug.yaml"
    for key in (*LAUNCH, "repeat"):
        if not _is_count(data.get(key, 1)):
            yield f"{key}={one_line(data[key], 80)} must be a whole number of at least 1"
    seeds = data.get("seeds") or []
    if (
        not isinstance(seeds, list)
        or not all(type(seed) is int for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        yield f"seeds={one_line(seeds, 80)} must be a list of different whole numbers"
    for key, values in maps["grid"].items():
        if not isinstance(values, list) or not values:
            yield f"grid: {key} must be a list of the values to try, such as [0, 1, 2]"
        elif len({value_text(value) for value in values}) < len(values):
            yield f"grid: {key} has a value twice: to run something several times, use repeat"
    for name, keys in maps["runs"].items():
        if not isinstance(keys, dict | None):
            yield f"runs: {name} must be a mapping of keys to values, or {{}} for the config as it is"
    yield from _wrong_folder(data.get("folder") or "")


def _wrong_folder(folder: Any) -> Iterator[str]:
    if not isinstance(folder, str):
        yield "folder must be a path"
        return
    try:
        Path(folder).expanduser()
    except RuntimeError:
        yield f"folder={one_line(folder, 80)}: there is no such user, so no home folder of theirs"


def _wrong_config_keys(
    maps: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], seeds: bool
) -> Iterator[str]:
    """Keys that no config has, that the sweep says itself, that two places would say, counts that are none,
    and values that no config can have. `given`: --override's; `seeds`: whether there are any."""
    known = known_keys()
    runs = {f"runs: {name}": keys for name, keys in maps["runs"].items()}
    places = {"overrides": maps["overrides"], "grid": maps["grid"], **runs}
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
            elif key == "run.seed" and seeds:
                yield (
                    f"{'--override' if key in given else place}: run.seed is what seeds says. Leave one of "
                    "the two out"
                )
            elif varied and key in given:
                yield f"--override {key}: {place} varies this key. Leave one of the two out"
            elif place.startswith("runs") and key in maps["grid"]:
                yield f"{place}: {key} is in the grid too. Leave one of the two out"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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


def _report(path: Path, problems: Sequence[str]) -> str:
    return (
        f"{path}: {problems[0]}"
        if len(problems) == 1
        else f"{path}:\n" + "\n".join(f"  {problem}" for problem in problems)
    )
