"""Check every run of a sweep before the first one starts: its config, its plan, and that its folder was
not started with other keys."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.errors import PlanError, first_of
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import find_hardware, load_hardware
from meshwright.tools.run_reader import changed_keys, read_config
from meshwright.tools.sweep.spec import Spec, SweepRun, make_cells, value_text
from meshwright.train.config import Config
from meshwright.train.config_parser import find_config, leaves, parse_config
from meshwright.train.distributed.devices import choose_device
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.planning.predict import predict
from meshwright.train.planning.resolve import plan_on_device, plan_run

SHOWN = 8  # changed keys of a run, in a message


@dataclass(frozen=True)
class PlannedRun:
    """A run that can be started; or one whose plan is refused, for the reason in `refused`, which is a
    result.

    Args:
        folder: run.dir
        arguments: arguments of train.main
        config: the config that these arguments resolve to
    """

    cell: SweepRun
    folder: Path
    arguments: tuple[str, ...]
    config: Config
    refused: str = ""

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.cell.processes * self.cell.nodes


def check_sweep(spec: Spec, local: bool) -> list[PlannedRun]:
    """Plan all runs.

    Args:
        local: plan for this machine's devices; otherwise for their number only, for runs on another machine

    Raises ConfigError with the errors of all runs, and PlanError if the plan of every run is refused. A
    single refused plan is not an error.
    """
    find_config(spec.config)
    cells = make_cells(spec)
    planned, mistakes = list[PlannedRun](), dict[str, list[str]]()
    for cell in cells:
        try:
            planned.append(_plan(spec, cell, local))
        except (ConfigError, DataError) as error:
            mistakes.setdefault(str(error), []).append(cell.name)
    if mistakes:
        all_runs = len(cells) if len(cells) > 1 else 0
        lines = [
            f"  {'all runs' if len(names) == all_runs else first_of(names)}: {error}"
            for error, names in mistakes.items()
        ]
        raise ConfigError("\n".join(["no run was started:", *lines]))
    if all(run.refused for run in planned):
        reasons = (f"  {run.cell.name}: {run.refused}" for run in planned)
        raise PlanError("\n".join(["the plan of every run is refused:", *reasons]))
    return planned


def changed_runs(
    planned: Sequence[PlannedRun], launched: Callable[[Path], Mapping[str, int]]
) -> dict[str, list[str]]:
    """Return the runs whose folder was started with other keys than the spec has now, each with the
    differences.

    Args:
        launched: returns the processes and nodes with which a folder's run was started, where known
    """
    changed = dict[str, list[str]]()
    for run in planned:
        changes = changed_keys(read_config(run.folder), flat_config(run.config))
        for key, count in launched(run.folder).items():
            if count != (now := getattr(run.cell, key)):
                changes[key] = count, now
        if differences := describe_changes(changes):
            changed[run.cell.name] = differences
    return changed


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Describe changed config keys; run.dir is omitted."""
    return [
        f"{key}: {value_text(a)} -> {value_text(b)}" for key, (a, b) in changes.items() if key != "run.dir"
    ]


def flat_config(config: Config) -> dict[str, Any]:
    """Return every config key, dotted."""
    return dict(leaves(dataclasses.asdict(config)))


def refuse_changed(changed: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Raise ConfigError if runs were started with other keys."""
    if not changed:
        return
    lines = [f"{len(changed)} runs in {folder} were started with other keys than the spec has now:"]
    for name, keys in changed.items():
        lines.append(f"  {name}: {', '.join(keys[:SHOWN])}{', ...' if len(keys) > SHOWN else ''}")
    lines.append("Use another --folder, or remove these runs' folders to start them again")
    raise ConfigError("\n".join(lines))


def predict_here(planned: PlannedRun) -> dict[str, float]:
    """Predict step time and peak memory of a run on this machine, by the names in its rows. Returns {} for
    an unknown device, with parallel.plan=auto (the run reports its own prediction), and if the plan or the
    planner fails (the run then fails with that error, or trains without a prediction)."""
    config, processes = planned.config, planned.cell.processes
    rank = _first_rank(planned.cell)
    try:
        device, name = choose_device(config.run, rank)
    except PlanError:
        return {}
    kind = load_hardware()["cpu"] if device.type == "cpu" else find_hardware(name)
    if config.parallel.plan == "auto" or kind is None:
        return {}
    if kind.cores:  # the rates of kind are per core
        kind = dataclasses.replace(
            kind, cores=min(usable_cores(), processes * max(1, torch.get_num_threads() // processes))
        )
    try:
        figures = predict(config.job, plan_on_device(config.job, rank, device, name), kind, processes)
    except (PlanError, ConfigError):
        return {}
    peak = figures.memory.peak_bytes if device.type == "cuda" else figures.reserved_bytes
    return {"step_time_s": figures.timeline.step_s, "peak_memory_gib": peak / GIB}


def _plan(spec: Spec, cell: SweepRun, local: bool) -> PlannedRun:
    folder = spec.folder / cell.name
    arguments = [
        f"--config={spec.config}",
        *(f"--{key}={value_text(value)}" for key, value in cell.overrides.items()),
        f"--run.dir={folder}",
    ]
    config = parse_config(arguments, "tools.sweep")
    refused = ""
    try:
        if config.parallel.plan != "auto" and local:  # auto is left to the run
            rank = _first_rank(cell)
            plan_on_device(config.job, rank, *choose_device(config.run, rank))
        elif config.parallel.plan != "auto":
            plan_run(config.job, cell.processes * cell.nodes, cell.processes)
    except PlanError as error:
        refused = f"PlanError: {error}"
    return PlannedRun(cell, folder, tuple(arguments), config, refused)


def _first_rank(cell: SweepRun) -> RankInfo:
    """Return the rank information of the first process."""
    world_size = cell.processes * cell.nodes
    return RankInfo(0, world_size, 0, cell.processes, under_torchrun=world_size > 1)
