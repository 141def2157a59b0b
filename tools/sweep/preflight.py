"""Every run of a sweep is checked before the first is started: its config, its plan, and that it goes on with
what it began."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from meshwright.parallel.errors import PlanError, first_of
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import find_hardware, load_hardware
from meshwright.tools.run_reader import changed_keys, flatten, read_config
from meshwright.tools.sweep.spec import Spec, SweepRun, make_cells, override_text, value_text
from meshwright.train.config import Config
from meshwright.train.config_parser import config_from, find_config, known_keys, make_parser, parser_arguments
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo, choose_device
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.planning.predict import predict
from meshwright.train.planning.resolve import plan_here, plan_run

SHOWN = 8  # changed keys of a run, in a message


@dataclass(frozen=True)
class PlannedRun:
    """A run that can be started; or `refused`: why its plan cannot be, which is a result.

    Args:
        folder: run.dir
        arguments: of train.main
        config: as these resolve
    """

    cell: SweepRun
    folder: Path
    arguments: tuple[str, ...]
    config: Config
    refused: str = ""

    @property
    def world_size(self) -> int:
        return self.cell.processes * self.cell.nodes


def check_sweep(spec: Spec, here: bool) -> list[PlannedRun]:
    """All runs, planned. `here`: for this machine's devices; else only for their number, as of a cluster that
    is elsewhere.

    Raises ConfigError with the mistakes of all runs; a plan that is refused is none, unless all are.
    """
    find_config(spec.config)
    cells = make_cells(spec)
    planned, mistakes, parser = list[PlannedRun](), dict[str, list[str]](), make_parser("tools.sweep")
    for cell in cells:
        try:
            planned.append(_plan(parser, spec, cell, here))
        except (ConfigError, DataError) as error:
            mistakes.setdefault(str(error), []).append(cell.name)
    if mistakes:
        every = len(cells) if len(cells) > 1 else 0
        lines = [
            f"  {'all runs' if len(names) == every else first_of(names)}: {error}"
            for error, names in mistakes.items()
        ]
        raise ConfigError("\n".join(["nothing was started:", *lines]))
    if all(one.refused for one in planned):
        reasons = (f"  {one.cell.name}: {one.refused}" for one in planned)
        raise PlanError("\n".join(["the plan of every run is refused:", *reasons]))
    return planned


def changed_runs(
    planned: Sequence[PlannedRun], launched: Callable[[Path], Mapping[str, int]]
) -> dict[str, list[str]]:
    """Runs whose folder was begun with other keys than the spec says now, each with what differs. `launched`:
    processes and nodes that a folder's run was started with, where that is known."""
    found = dict[str, list[str]]()
    for one in planned:
        changes = changed_keys(read_config(one.folder), flat_config(one.config))
        for key, count in launched(one.folder).items():
            if count != (now := getattr(one.cell, key)):
                changes[key] = count, now
        if words := change_words(changes):
            found[one.cell.name] = words
    return found


def change_words(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Changed keys of a config, but for the run's own folder."""
    return [
        f"{key}: {value_text(a)} -> {value_text(b)}" for key, (a, b) in changes.items() if key != "run.dir"
    ]


def flat_config(config: Config) -> dict[str, Any]:
    """Every key, dotted."""
    return flatten(dataclasses.asdict(config), whole=known_keys())


def refuse_changed(changed: Mapping[str, Sequence[str]], folder: Path) -> None:
    """ConfigError where runs were begun with other keys."""
    if not changed:
        return
    lines = [f"{len(changed)} runs in {folder} were begun with other keys than the spec has now:"]
    for name, keys in changed.items():
        lines.append(f"  {name}: {', '.join(keys[:SHOWN])}{', ...' if len(keys) > SHOWN else ''}")
    lines.append("Take another --folder, or remove these runs' folders to start them anew")
    raise ConfigError("\n".join(lines))


def predict_here(planned: PlannedRun) -> dict[str, float]:
    """Step time and peak memory that are predicted for a run on this machine, by the names that its rows
    have; {} for a kind of device that is not known, under parallel.plan=auto, where the run itself says it,
    and where the planner cannot: then the run will, or will do without."""
    config, processes = planned.config, planned.cell.processes
    place = _place(planned.cell)
    device, name = choose_device(config.run, place)
    kind = load_hardware()["cpu"] if device.type == "cpu" else find_hardware(name)
    if config.parallel.plan == "auto" or kind is None:
        return {}
    if kind.cores:  # its rates are of one core
        kind = dataclasses.replace(
            kind, cores=min(usable_cores(), processes * max(1, torch.get_num_threads() // processes))
        )
    try:
        figures = predict(config.job, plan_here(config.job, place, device, name), kind, processes)
    except (PlanError, ConfigError):
        return {}
    peak = figures.memory.peak_bytes if device.type == "cuda" else figures.reserved_bytes
    return {"step_time_s": figures.timeline.step_s, "peak_memory_gib": peak / GIB}


def _plan(parser: ArgumentParser, spec: Spec, cell: SweepRun, here: bool) -> PlannedRun:
    folder = spec.folder / cell.name
    arguments = [
        f"--config={spec.config}",
        *(override_text(key, value) for key, value in cell.overrides.items()),
        f"--run.dir={folder}",
    ]
    config = config_from(parser, parser_arguments(parser, arguments))
    refused = ""
    try:
        _try_plan(config, cell, here)
    except PlanError as error:
        refused = f"PlanError: {error}"
    return PlannedRun(cell, folder, tuple(arguments), config, refused)


def _try_plan(config: Config, cell: SweepRun, here: bool) -> Any:
    """PlanError where there is no such plan. What plan=auto chooses is left to the run."""
    if config.parallel.plan == "auto":
        return None
    if not here:
        return plan_run(config.job, cell.processes * cell.nodes, cell.processes)
    place = _place(cell)
    return plan_here(config.job, place, *choose_device(config.run, place))


def _place(cell: SweepRun) -> RankInfo:
    """Of the first process."""
    world_size = cell.processes * cell.nodes
    return RankInfo(0, world_size, 0, cell.processes, under_torchrun=world_size > 1)
