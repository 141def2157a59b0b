"""The runs of a sweep, each checked before the first one starts: its config, and that its folder was not
started with other keys."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import first_of, one_line
from meshwright.tools.run_reader import changed_keys, describe_changes, read_run, value_text
from meshwright.tools.sweep.spec import Spec
from meshwright.train.config import Config
from meshwright.train.config_keys import leaves
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError, DataError

MAX_RUNS = 1000  # a larger sweep is most likely a mistake
NAME_LETTERS = 80  # of a variant's name, which is also its folder's name
RESERVED = ("report.html", "report.json")  # files next to the runs' folders


@dataclasses.dataclass(frozen=True)
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
        return {"processes": self.processes, **dict(leaves(dataclasses.asdict(self.config)))}


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
            mistakes.setdefault(str(error), []).append(name)
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
