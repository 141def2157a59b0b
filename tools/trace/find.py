"""Where a profile's traces lie."""

import re
from pathlib import Path

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.train.errors import DataError

_RANK = re.compile(r"rank-(\d+)\.json(\.gz)?")
_STEP = re.compile(r"step-(\d+)")


def find_traces(path: Path, step: int | None) -> dict[int, Path]:
    """The trace of each profiled rank, by rank: of a run's newest profile, or the one that begins at `step`;
    of a profile's folder; or one file, as rank 0. Raises DataError."""
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise DataError(f"{path}: no such run, profile or trace")
    return _in_folder(path) or _of_run(path, step)


def _of_run(run: Path, step: int | None) -> dict[int, Path]:
    folders = {
        int(named[1]): folder
        for folder in run.glob("profile/step-*")
        if (named := _STEP.fullmatch(folder.name))
    }
    found = {first: traces for first, folder in folders.items() if (traces := _in_folder(folder))}
    if not found:
        raise DataError(
            f"{run}: no profile in it. A run makes one with --profile.start=STEP, and with "
            "--profile.all_ranks=true one of every rank"
        )
    if step is not None and step not in found:
        there = ", ".join(map(str, sorted(found)))
        raise DataError(f"{run}: no profile that begins at --step={step}; there is one from step {there}")
    return found[max(found) if step is None else step]


def _in_folder(folder: Path) -> dict[int, Path]:
    named = {int(found[1]): path for path in folder.iterdir() if (found := _RANK.fullmatch(path.name))}
    return dict(sorted(named.items()))


def run_of(trace: Path) -> Path | None:
    """The run's folder, where the trace lies in one."""
    run = trace.absolute().parent.parent.parent
    return run if (run / "plan.yaml").is_file() and (run / "config.yaml").is_file() else None


def find_mesh(trace: Path) -> MeshPlan | None:
    """The mesh of the run in whose folder it lies; None where there is none, or no plan that can be read."""
    run = run_of(trace)
    try:
        return load_plan(run / "plan.yaml").mesh if run else None
    except PlanError:
        return None
