"""What a sweep has found, read from the folders of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.tools.run_reader import Figures, RunFolder, figures_of, read_run
from meshwright.tools.sweep.preflight import PlannedRun, flat_config
from meshwright.tools.sweep.runner import Ended, device_of, read_attempt, state_of
from meshwright.tools.sweep.spec import LAUNCH, Spec, value_text


@dataclass(frozen=True)
class ReportRow:
    """One run.

    Args:
        varied: what differs between the sweep's runs, by key, in words
        state, reason: how it stands
        run: what it has left; None where it has no folder yet
        steps_asked: how many steps it is to do; 0 where epochs say it
    """

    name: str
    varied: Mapping[str, str]
    state: Ended
    reason: str
    processes: int
    run: RunFolder | None
    figures: Figures | None
    device: str
    steps_asked: int


@dataclass(frozen=True)
class SweepReport:
    """A sweep as it stands. `keys`: that differ between its runs."""

    name: str
    config: str
    folder: str
    keys: tuple[str, ...]
    rows: tuple[ReportRow, ...]


def read_sweep(
    name: str, spec: Spec, planned: Sequence[PlannedRun], changed: Mapping[str, Sequence[str]]
) -> SweepReport:
    """Every run as its folder has it now. `changed`: runs that were begun with other keys than the spec has,
    with these."""
    configs = [flat_config(one.config) for one in planned]
    keys = _keys_that_differ(planned, configs)
    rows = []
    for one, config in zip(planned, configs, strict=True):
        values = {
            key: value_text(getattr(one.cell, key) if key in LAUNCH else config.get(key)) for key in keys
        }
        rows.append(_read_row(one, values, changed.get(one.cell.name, ())))
    return SweepReport(name, spec.config, str(spec.folder), tuple(keys), tuple(rows))


def report_json(report: SweepReport) -> dict[str, Any]:
    """For report.json and --json."""
    return {
        "sweep": report.name,
        "config": report.config,
        "folder": report.folder,
        "varied": report.keys,
        "runs": [_row_json(row) for row in report.rows],
    }


def _keys_that_differ(planned: Sequence[PlannedRun], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that the spec varies, and of which not all runs have one value."""
    varied = dict.fromkeys(key for one in planned for key in one.cell.own)
    differing = [key for key in varied if len({value_text(config.get(key)) for config in configs}) > 1]
    return [key for key in LAUNCH if len({getattr(one.cell, key) for one in planned}) > 1] + differing


def _read_row(one: PlannedRun, varied: Mapping[str, str], changed: Sequence[str]) -> ReportRow:
    run = read_run(one.folder) if one.folder.is_dir() else None
    state, reason = state_of(one.folder)
    if one.refused and state in ("waiting", "refused"):
        state, reason = "refused", one.refused
    if changed:
        told = f"begun with other keys than the spec has now ({', '.join(changed)})"
        reason = f"{told}; {reason}" if reason else told
    figures = figures_of(run, read_attempt(one.folder).predicted) if run else None
    return ReportRow(
        one.cell.name,
        varied,
        state,
        reason,
        one.world_size,
        run,
        figures,
        device_of(one.folder),
        0 if one.config.train.epochs else one.config.train.steps,
    )


def _row_json(row: ReportRow) -> dict[str, Any]:
    """The row's fields and its figures', a predicted one with its error."""
    document = {name: value for name, value in vars(row).items() if name not in ("run", "figures")}
    if (figures := row.figures) is None:
        return document | {"step": 0}
    predicted = {
        name: {"value": value, "error": figures.error_of(name)} for name, value in figures.predicted.items()
    }
    return document | vars(figures) | {"predicted": predicted}
