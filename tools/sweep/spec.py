"""The spec of a sweep, a YAML file: which variants of a config to run; and the runs that it describes, each
checked before the first one starts: its config, and that its folder was not started with other keys."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from meshwright.parallel.errors import first_of, one_line
from meshwright.parallel.structure import Count, report, structure
from meshwright.parallel.yaml_io import load_mapping
from meshwright.tools.run_reader import changed_keys, describe_changes, read_run, value_text
from meshwright.train.config import Config
from meshwright.train.config_keys import has_value, is_config_key, key_hint, leaves
from meshwright.train.config_parser import COMMAND_LINE, parse_config
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.files import user_path

STUDIES = Path(__file__).resolve().parents[2] / "configs" / "experiments"
DEFAULTS = {"processes": 1, "overrides": {}, "grid": {}, "runs": {}, "seeds": [], "repeat": 1}
FIXED = ("run.dir", "config")  # set by the sweep itself
MAX_RUNS = 1000  # a larger sweep is most likely a mistake
NAME_LETTERS = 80  # of a variant's name, which is also its folder's name
RESERVED = ("report.html", "report.json")  # files next to the runs' folders


@dataclass(frozen=True)
class Spec:
    """A sweep, as its spec and the command line describe it.

    Args:
        config: name or path, as --config of train.main
        processes: of every run that does not set its own
        overrides: config keys of all runs
        grid: values to try for each key, in all combinations
        runs: named runs, each with its keys; with a grid, each of them for every combination
        seeds: run.seed of each copy; empty keeps the config's
        repeat: how often each run is repeated, to measure the noise of a figure
        best: the figure by which runs are sorted and a winner is found
        folder: folder of the runs and the report
    """

    config: str
    processes: Count
    overrides: Mapping[str, Any]
    grid: Mapping[str, Annotated[tuple[Any, ...], msgspec.Meta(min_length=1)]]
    runs: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    repeat: Count
    best: Literal["tokens_per_s", "loss", "eval_loss", "peak_memory_gib"]
    folder: Path


def find_spec(name: str) -> Path:
    """Return a spec's path: a file, or a study in configs/experiments by its name. Raises ConfigError."""
    for path in (Path(name), STUDIES / name, STUDIES / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{name}: no such file, nor a study in configs/experiments: use a path or one of "
        f"{', '.join(sorted(path.name for path in STUDIES.glob('*.yaml')))}"
    )


def read_spec(path: Path, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> Spec:
    """Read a spec, in which the command line replaces keys (`changes`) and config keys (`overrides`). Raises
    ConfigError with all errors of the file's form or, if the form is valid, with all errors of its values."""
    try:
        written = load_mapping(path)
        misplaced = [key for key in written if is_config_key(str(key))]
        if problems := [f"unknown key {key}: put it under overrides" for key in misplaced]:
            raise ValueError(report(str(path), problems))
        spec = structure(Spec, _complete(path, written, changes), str(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spec = replace(spec, overrides={**spec.overrides, **overrides})
    if problems := [*_mistakes(spec, overrides)]:
        raise ConfigError(report(str(path), problems))
    return spec


def _complete(path: Path, written: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's mapping with every key of Spec, and config keys dotted."""
    given = str(changes.get("config", ""))
    folder = Path("sweeps", "-".join(filter(None, (path.stem, Path(given).stem))))
    present = {key: value for key, value in written.items() if value is not None}
    data = {**DEFAULTS, "best": "tokens_per_s", "folder": str(folder), **present, **changes}
    if isinstance(data["folder"], str):
        data["folder"] = user_path(data["folder"], f"{path}: folder", ConfigError)
    if isinstance(data["runs"], dict):
        data["runs"] = {str(name): _flat({} if keys is None else keys) for name, keys in data["runs"].items()}
    return data | {key: _flat(data[key]) for key in ("overrides", "grid")}


def _flat(keys: Any) -> Any:
    """Return the config keys of one place in the spec, dotted; a value that is no mapping unchanged."""
    return dict(leaves(keys)) if isinstance(keys, dict) else keys


def _mistakes(spec: Spec, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield every wrong value and key. `given`: the keys of --override."""
    if len(set(spec.seeds)) < len(spec.seeds):
        yield f"seeds={one_line(list(spec.seeds), 80)} must be a list of distinct integers"
    varied = {"grid": spec.grid, **{f"runs: {name}": keys for name, keys in spec.runs.items()}}
    for place, keys in {"overrides": spec.overrides, **varied}.items():
        for key, value in keys.items():
            values = value if place == "grid" else [value]
            if len({value_text(each) for each in values}) < len(values):
                yield f"{place}: {key} has a value twice: use repeat to repeat runs"
            if key == "processes" and place in varied:
                for count in values:
                    if type(count) is not int or count < 1:
                        yield f"{place}: processes={one_line(count, 80)} must be an integer of at least 1"
            elif key in FIXED:
                yield f"{place}: {key} is set by the sweep, which gives each run a folder: remove it"
            elif not has_value(key):
                yield f"{place}: unknown key {one_line(key, 80)}. {key_hint(key)}"
            for other in _also_set_by(spec, given, place, key):
                yield f"{place}: {key} is set by {other} too: remove one of the two"


def _also_set_by(spec: Spec, given: Mapping[str, Any], place: str, key: str) -> list[str]:
    """Return where else a key is set, apart from the overrides, which runs and grid may replace."""
    sets = {"seeds": spec.seeds and key == "run.seed"}
    if place != "overrides":
        sets |= {"--override": key in given, "the grid": place != "grid" and key in spec.grid}
    return [other for other, is_set in sets.items() if is_set]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Args:
        variant: name of what is compared; the runs of a variant differ in seed or turn only
        own: config keys that the sweep varies
        arguments: of train.main
        config: the config that these arguments resolve to
    """

    name: str
    variant: str
    processes: int
    own: Mapping[str, Any]
    folder: Path
    arguments: tuple[str, ...]
    config: Config

    @property
    def settings(self) -> dict[str, Any]:
        """Processes and every config key, dotted."""
        return {"processes": self.processes, **dict(leaves(asdict(self.config)))}


def make_runs(path: Path, spec: Spec) -> list[SweepRun]:
    """Return every run of the sweep: the variants in the order of the file, then again for each seed and
    each repeat, so that what changes slowly on the machine affects all variants. Raises ConfigError with the
    errors of all runs of the spec in `path`; for more than MAX_RUNS, before any is made."""
    count = math.prod([len(spec.runs) or 1, *map(len, spec.grid.values()), len(spec.seeds) or 1, spec.repeat])
    if count > MAX_RUNS:
        raise ConfigError(
            f"{path}: {count} runs, more than {MAX_RUNS}: remove values from grid, or lower repeat"
        )
    runs, mistakes, variants = list[SweepRun](), dict[str, list[str]](), list(_variants(spec))
    for turn, seed, (variant, keys) in itertools.product(range(spec.repeat), spec.seeds or [None], variants):
        name = variant + (f"_seed={seed}" if len(spec.seeds) > 1 else "")
        name += f"_turn={turn + 1}" if turn else ""  # the first keeps its name when repeat is raised
        own = keys if seed is None else {**keys, "run.seed": seed}
        try:
            runs.append(_make_run(spec, name, variant, own))
        except (ConfigError, DataError) as error:
            message = str(error).removeprefix(f"{COMMAND_LINE}:").strip()  # the keys are those of the spec
            mistakes.setdefault(message, []).append(name)
    if mistakes:
        lines = [
            f"  {'all runs' if len(names) == count > 1 else first_of(names)}: {error}"
            for error, names in mistakes.items()
        ]
        raise ConfigError("\n".join([f"{path}: no run was started:", *lines]))
    return runs


def _variants(spec: Spec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and keys of each named run with each combination of the grid, its last key fastest. Names
    that collide, such as of values that differ only in what a folder's name cannot have, are numbered."""
    taken = set(RESERVED)
    combinations = itertools.product(*spec.grid.values())
    for (run, keys), values in itertools.product(spec.runs.items() or [("", {})], combinations):
        grid = dict(zip(spec.grid, values, strict=True))
        parts = [f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in grid.items()]
        text = " ".join(filter(None, [run, *parts])).replace('"', "").replace(", ", ",")
        short = re.sub(r"[^\w.=,+-]+", "_", text).strip("._-")[:NAME_LETTERS] or "run"
        names = itertools.chain([short], (f"{short}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        yield name, {**keys, **grid}


def _make_run(spec: Spec, name: str, variant: str, keys: Mapping[str, Any]) -> SweepRun:
    """Raises ConfigError for a wrong config, and for a folder that was started with another one."""
    own, folder = dict(keys), spec.folder / name
    processes = own.pop("processes", spec.processes)
    given = [f"--{key}={value_text(value)}" for key, value in {**spec.overrides, **own}.items()]
    arguments = (f"--config={spec.config}", *given, f"--run.dir={folder}")
    run = SweepRun(name, variant, processes, own, folder, arguments, parse_config(arguments))
    if folder.is_dir():
        old = read_run(folder)
        earlier = {} if old.plan is None else {"processes": old.plan.mesh.world_size}
        if changes := describe_changes(changed_keys({**earlier, **old.config}, run.settings)):
            raise ConfigError(
                f"{folder} was started with other keys than the spec has now "
                f"({one_line(', '.join(changes), 400)}): use another --folder, or remove this one"
            )
    return run
