"""The results of a sweep, read from its runs' folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.tools.run_reader import Figures, RunFolder, figures_of, read_run
from meshwright.tools.sweep.preflight import PlannedRun, flat_config
from meshwright.tools.sweep.runner import RunState, device_of, read_attempt, state_of
from meshwright.tools.sweep.spec import LAUNCH, Spec, value_text


@dataclass(frozen=True)
class ReportRow:
    """The results of one run.

    Args:
        varied: values of the keys that differ between the sweep's runs, as text
        state, reason: state of the run, and why
        run: contents of its folder; None if there is no folder yet
        steps_asked: number of steps to train; 0 if train.epochs sets it
    """

    name: str
    varied: Mapping[str, str]
    state: RunState
    reason: str
    processes: int
    run: RunFolder | None
    figures: Figures | None
    device: str
    steps_asked: int


@dataclass(frozen=True)
class SweepReport:
    """The current results of a sweep. `keys`: those that differ between its runs."""

    name: str
    config: str
    folder: str
    keys: tuple[str, ...]
    rows: tuple[ReportRow, ...]


def read_sweep(
    name: str, spec: Spec, planned: Sequence[PlannedRun], changed: Mapping[str, Sequence[str]]
) -> SweepReport:
    """Read the current state of every run from its folder. `changed`: the runs started with other keys
    than the spec has now, with the differences."""
    configs = [flat_config(run.config) for run in planned]
    keys = _keys_that_differ(planned, configs)
    rows = []
    for run, config in zip(planned, configs, strict=True):
        values = {
            key: value_text(getattr(run.cell, key) if key in LAUNCH else config.get(key)) for key in keys
        }
        rows.append(_read_row(run, values, changed.get(run.cell.name, ())))
    return SweepReport(name, spec.config, str(spec.folder), tuple(keys), tuple(rows))


def report_json(report: SweepReport) -> dict[str, Any]:
    """Return the report as a JSON-compatible document."""
    return {
        "sweep": report.name,
        "config": report.config,
        "folder": report.folder,
        "varied": report.keys,
        "runs": [_row_json(row) for row in report.rows],
    }


def _keys_that_differ(planned: Sequence[PlannedRun], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that the spec varies and that do not have the same value in all runs."""
    varied = dict.fromkeys(key for run in planned for key in run.cell.own)
    differing = [key for key in varied if len({value_text(config.get(key)) for config in configs}) > 1]
    return [key for key in LAUNCH if len({getattr(run.cell, key) for run in planned}) > 1] + differing


def _read_row(planned: PlannedRun, varied: Mapping[str, str], changed: Sequence[str]) -> ReportRow:
    run = read_run(planned.folder) if planned.folder.is_dir() else None
    state, reason = state_of(planned.folder)
    if planned.refused and state in ("waiting", "refused"):
        state, reason = "refused", planned.refused
    if changed:
        warning = f"started with other keys than the spec has now ({', '.join(changed)})"
        reason = f"{warning}; {reason}" if reason else warning
    figures = figures_of(run, read_attempt(planned.folder).predicted) if run else None
    return ReportRow(
        planned.cell.name,
        varied,
        state,
        reason,
        planned.world_size,
        run,
        figures,
        device_of(planned.folder),
        0 if planned.config.train.epochs else planned.config.train.steps,
    )


def _row_json(row: ReportRow) -> dict[str, Any]:
    """Return the fields of a row and of its figures; predictions come with their error."""
    document = {name: value for name, value in vars(row).items() if name not in ("run", "figures")}
    if (figures := row.figures) is None:
        return document | {"step": 0}
    predicted = {
        name: {"value": value, "error": figures.error_of(name)} for name, value in figures.predicted.items()
    }
    return document | vars(figures) | {"predicted": predicted}
