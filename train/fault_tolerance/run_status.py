"""status.json: what became of a run, for whoever looks at its folder, and for the next start in it. Rank 0
writes it, from any thread, at any moment."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.parallel.structure import Natural
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError, CrashLoopError, OutOfMemory
from meshwright.train.fault_tolerance.shutdown import as_lost_peer
from meshwright.train.files import read_json, replacing

State = Literal["running", "finished", "stopped", "failed"]
LIMIT_BYTES = 1 << 20  # a reason may carry an error's whole message


@dataclass(frozen=True)
class FailedStarts:
    """How many starts in a row, all from the same checkpoint, failed without getting further than step
    `step`."""

    count: Natural = 0
    step: Natural = 0


@dataclass(frozen=True)
class Status:
    """What status.json says. `resumed_from`: the step of the checkpoint it started from; None: from the
    beginning. The defaults are for files of versions that did not write all of it."""

    state: State
    step: Natural = 0
    resumed_from: Natural | None = None
    reason: str = ""
    failed: FailedStarts = FailedStarts()


def write_status(
    folder: Path,
    state: State,
    step: int,
    resumed_from: int | None,
    saved: bool,
    reason: str = "",
    failed: FailedStarts = FailedStarts(),
    named: bool = False,
) -> str:
    """Write status.json by one rename, so that a reader never sees half of it. `saved`: there is a
    checkpoint. `named`: the command names where to start (checkpoint.resume is not auto), so that by itself
    it would start there again.

    Returns "" or, because an unwritable folder must not end a run, a sentence that says why it could not be
    written.
    """
    status = {
        "state": state,
        "step": step,
        "resumed_from": resumed_from,
        "reason": reason[: LIMIT_BYTES // 8],
        "how_to_go_on": _how_to_go_on(state, saved, named),
        "failed_starts": failed.count,
        "failed_at_step": failed.step,
    }
    try:
        with replacing(folder / "status.json") as partial:
            partial.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{folder}/status.json could not be written ({error.strerror}) and may be out of date"
    return ""


def _how_to_go_on(state: State, saved: bool, named: bool) -> str:
    if state == "running":
        return ""
    if not saved:
        return (
            "nothing was saved: the same command starts "
            f"{'where this one did' if named else 'from the beginning'}"
        )
    if state == "finished":
        return f"a larger train.steps{' with --checkpoint.resume=auto' if named else ''} continues it"
    return "the same command with --checkpoint.resume=auto goes on" if named else "run the same command again"


def read_status(folder: Path) -> Status | None:
    """What a run before this one left; None where there is none, or none that can be understood."""
    try:
        status = read_json(folder / "status.json", LIMIT_BYTES)
        failed = {"count": status.get("failed_starts", 0), "step": status.get("failed_at_step", 0)}
        return msgspec.convert({**status, "failed": failed}, Status)
    except (OSError, ValueError):
        return None


class RunStatus:
    """Knows how far the run is. It says nothing before `opened`: until then the folder may be another
    run's."""

    def __init__(self, ranks: RankInfo, console: Console, named: bool) -> None:
        """`named`: the same command would not go on from the newest checkpoint, because checkpoint.resume
        says another."""
        self._is_main, self._console, self._named = ranks.is_main, console, named
        self._folder: Path | None = None
        self._resumed_from: int | None = None
        self._failed = FailedStarts()
        self._step, self._warned, self._ended = 0, False, False
        self._lock = threading.Lock()

    @contextmanager
    def recording(self, folder: Path) -> Iterator[None]:
        """The folder is this run's: an error that ends it is noted there, but for the refusal of a run that
        fails again and again, whose last reason stays."""
        self._folder = folder
        try:
            yield
        except CrashLoopError:
            raise
        except BaseException as error:
            lost = as_lost_peer(error)
            if not (lost and self._explained_elsewhere()):
                words = str(lost) if lost else f"{type(error).__name__}: {error}"
                self.write("failed", words, for_all=isinstance(error, OutOfMemory))
            raise

    def start(self, resumed_from: int | None, failed: FailedStarts) -> None:
        """The run goes on after the step `resumed_from`, or begins; `failed`: starts before this one."""
        self._resumed_from, self._failed = resumed_from, failed
        self.progress(resumed_from or 0)

    def progress(self, step: int) -> None:
        """So many steps are done."""
        self._step = step
        self.write("running")

    def finish(self, state: State, step: int, reason: str = "") -> None:
        """The run has ended by itself, after so many steps."""
        self._step = step
        self.write(state, reason)

    def write(self, state: State, reason: str = "", for_all: bool = False) -> None:
        """Write the state, from any thread; the first one that is not running stays. A folder that cannot be
        written is one warning. `for_all`: this rank speaks for all, because rank 0 may not be able to."""
        with self._lock:
            if not (self._is_main or for_all) or self._folder is None or self._ended:
                return
            self._ended = state != "running"
            problem = write_status(
                self._folder,
                state,
                self._step,
                self._resumed_from,
                self._has_saved(),
                reason,
                self._failed,
                self._named,
            )
            if problem and not self._warned:
                self._warned = True
                self._console.print(f"warning: {problem}")

    def _explained_elsewhere(self) -> bool:
        """Whether the process that is gone has said why."""
        assert self._folder is not None
        status = read_status(self._folder)
        return status is not None and status.state == "failed"

    def _has_saved(self) -> bool:
        assert self._folder is not None
        try:
            return bool(list_checkpoints(self._folder / "checkpoints"))
        except CheckpointError:  # the folder cannot be listed now; the loop hears of it when it saves
            return False
