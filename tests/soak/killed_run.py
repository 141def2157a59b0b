"""One run that is killed at random moments and restarted until it is done, and an uninterrupted one to
compare with."""

import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.train import read_rows
from meshwright.tools.processes import BenchError
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.errors import CheckpointError
from meshwright.train.fault_tolerance.run_folder import read_status
from tests.support.launch import Launch
from tests.support.run_faults import curve, partials, started

LIMIT_S = 300.0  # for every wait: a machine may be busy
# the part of a run's steps within which a kill follows a start, so that kills are spread over the run
AHEAD = 0.2
LAST_MOMENT = 1.2  # kills of a save come within this many times the duration of a save

POLL_S = 0.001  # a save of a tiny model takes tens of milliseconds

Phase = Literal["training", "saving"]


@dataclass(frozen=True)
class Mesh:
    """What is killed: a mesh, its number of processes and its config keys."""

    name: str
    processes: int
    keys: tuple[str, ...] = ()

    def arguments(self, keys: Sequence[str], asynchronous: bool) -> list[str]:
        """Return the command's arguments, except run.dir."""
        return [*keys, *self.keys, f"--checkpoint.asynchronous={str(asynchronous).lower()}"]


@dataclass(frozen=True)
class Wanted:
    """A kill to make: its phase, and whether the run saves asynchronously."""

    phase: Phase
    asynchronous: bool


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: loss and gradient norm by step; seconds of a step, with its share of saving, and
    of a save; and the number of saves."""

    curve: dict[int, tuple[float, float]]
    step_s: float
    save_s: float
    saves: int


@dataclass(frozen=True)
class Kill:
    """A kill and its result.

    `at_step`: the last step reported; `in_save`: a checkpoint was being written at that moment;
    `half_written`: a partial one was left; `ended_s`: seconds until all processes had ended; `damaged`:
    checkpoints that do not verify; `committed`: step of the newest checkpoint, 0 if there is none;
    `resumed_from`, `first_step`: the step that the next start resumed from, and the first step it reported.
    """

    mesh: str
    phase: Phase
    asynchronous: bool
    rank: int
    at_step: int
    in_save: bool
    half_written: bool
    ended_s: float
    damaged: tuple[str, ...]
    committed: int
    resumed_from: int
    first_step: int

    @property
    def resumed_right(self) -> bool:
        """Whether the first step was the one after the last commit."""
        return self.resumed_from == self.committed and self.first_step == self.committed + 1


@dataclass(frozen=True)
class Joined:
    """A run with all its kills: its number of steps, and how many of them had another loss or gradient norm
    than the reference."""

    kills: tuple[Kill, ...]
    steps: int
    wrong_steps: int


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete rows of metrics.jsonl so far."""
    return read_rows(folder / "metrics.jsonl")


def make_reference(mesh: Mesh, keys: Sequence[str], folder: Path) -> Reference:
    """Return an uninterrupted run. Raises BenchError if it fails."""
    with started(mesh.processes, folder, mesh.arguments(keys, False)) as launch:
        launch.wait(LIMIT_S)
    _check_success(launch)
    rows = rows_of(folder)
    saves_s = [float(text) for text in re.findall(r"committed after ([\d.]+) s", launch.output())]
    if not saves_s:
        raise BenchError("the run without kills has saved nothing: checkpoint.every must be at least 1")
    step_s = statistics.median(row["step_time_s"] for row in rows) + sum(saves_s) / len(rows)
    return Reference(curve(folder), step_s, statistics.median(saves_s), len(saves_s))


class KilledRun:
    """One run in `folder`: started, killed and restarted until it is done."""

    def __init__(
        self, mesh: Mesh, keys: Sequence[str], reference: Reference, rng: random.Random, folder: Path
    ) -> None:
        self._mesh, self._keys, self._reference, self._rng, self._folder = mesh, keys, reference, rng, folder
        self._steps = len(reference.curve)
        # the last kill; the next start will show where it resumes
        self._open: dict[str, Any] | None = None
        self._kills: list[Kill] = []

    def run(self, wanted: Sequence[Wanted]) -> Joined:
        """Make kills, in this order, until the run ends. Raises BenchError if a start fails, or does not
        end."""
        for planned in wanted:
            if not self._start(planned, kill=True):
                break
        else:
            self._start(wanted[-1], kill=False)
        got, whole = curve(self._folder), self._reference.curve
        wrong_steps = sum(got.get(step) != whole.get(step) for step in got.keys() | whole.keys())
        return Joined(tuple(self._kills), self._steps, wrong_steps)

    def _start(self, wanted: Wanted, kill: bool) -> bool:
        """Start the command and kill it: True; or False if it ends, on purpose or before its kill."""
        rows_before = len(rows_of(self._folder))
        arguments = self._mesh.arguments(self._keys, wanted.asynchronous)
        with started(self._mesh.processes, self._folder, arguments) as launch:
            launch.wait_until(lambda: len(rows_of(self._folder)) > rows_before, LIMIT_S, POLL_S)
            self._note_start(rows_before)
            if kill and self._wait_for_moment(launch, wanted.phase) and self._kill(launch, wanted):
                return True
            launch.wait(LIMIT_S)
        _check_success(launch)
        return False

    def _note_start(self, rows_before: int) -> None:
        """Record where the run resumed after the previous kill."""
        if self._open is None:
            return
        status, rows = read_status(self._folder), rows_of(self._folder)[rows_before:]
        resumed_from = status.resumed_from or 0 if status else -1
        first_step = rows[0]["step"] if rows else resumed_from + 1  # no step was left to do
        self._kills.append(Kill(**self._open, resumed_from=resumed_from, first_step=first_step))
        self._open = None

    def _wait_for_moment(self, launch: Launch, phase: Phase) -> bool:
        """Wait for a random moment of the next steps; False if the run ends before it."""
        if phase == "training":
            return _stay(launch, self._rng.uniform(0, AHEAD * self._steps * self._reference.step_s))
        number = self._rng.randint(1, max(1, int(AHEAD * self._reference.saves)))
        delay_s = self._rng.uniform(0, LAST_MOMENT * self._reference.save_s)
        seen = set[str]()

        def has_begun() -> bool:
            seen.update(path.name for path in partials(self._folder))
            return len(seen) >= number

        return launch.wait_until(has_begun, LIMIT_S, POLL_S) and _stay(launch, delay_s)

    def _kill(self, launch: Launch, wanted: Wanted) -> bool:
        """Kill a random rank, and record what is left when all have ended; False if it had ended before."""
        rank = self._rng.randrange(self._mesh.processes)
        in_save = bool(partials(self._folder))
        launch.ranks[rank].kill()
        killed_s = time.monotonic()
        launch.wait(LIMIT_S)
        ended_s = time.monotonic() - killed_s
        if launch.ranks[rank].returncode != -signal.SIGKILL:
            return False
        found = list_checkpoints(self._folder / "checkpoints")
        self._open = {
            "mesh": self._mesh.name,
            "phase": wanted.phase,
            "asynchronous": wanted.asynchronous,
            "rank": rank,
            "at_step": rows_of(self._folder)[-1]["step"],
            "in_save": in_save,
            "half_written": bool(partials(self._folder)),
            "ended_s": ended_s,
            "damaged": tuple(path.name for path in found if not verifies(path)),
            "committed": step_of(found[-1]) if found else 0,
        }
        return True


def verifies(checkpoint: Path) -> bool:
    """Return whether every byte of a committed checkpoint matches its manifest."""
    try:
        verify_alone(checkpoint)
    except CheckpointError:
        return False
    return True


def _stay(launch: Launch, delay_s: float) -> bool:
    """Wait this long; False if the command ends before that."""
    end_s = time.monotonic() + delay_s
    while launch.running() and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return launch.running()


def _check_success(launch: Launch) -> None:
    if launch.returncode:
        raise BenchError(
            f"a run that was not killed ended with exit code {launch.returncode}:\n{launch.output()[-3000:]}"
        )
