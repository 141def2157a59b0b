"""status.json: the state of a run, for users and for the next start in its folder. Rank 0 writes it, from any
thread, at any time."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.parallel.structure import Natural
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError, OutOfMemory
from meshwright.train.fault_tolerance.peers import LostPeer, as_peer_lost_error, explain_loss
from meshwright.train.files import read_json, replacing

State = Literal["running", "finished", "stopped", "failed"]
LIMIT_BYTES = 1 << 20  # a reason may contain a complete error message


@dataclass(frozen=True)
class FailedStarts:
    """The failed starts in a row from one checkpoint, none of which got further than step `step`."""

    count: Natural = 0
    step: Natural = 0


@dataclass(frozen=True)
class Status:
    """The contents of status.json. `resumed_from`: the step of the checkpoint that the run resumed from, None
    if it started from the beginning."""

    state: State
    step: Natural = 0
    resumed_from: Natural | None = None
    reason: str = ""
    failed: FailedStarts = FailedStarts()


def write_status(folder: Path, status: Status, saved: bool) -> str:
    """Write status.json by one rename, so that a reader never sees a partial file. `saved`: a checkpoint
    exists.

    Returns "", or a message if the file could not be written, which must not end a run.
    """
    content = {
        "state": status.state,
        "step": status.step,
        "resumed_from": status.resumed_from,
        "reason": status.reason[: LIMIT_BYTES // 8],
        "how_to_go_on": _how_to_continue(status.state, saved),
        "failed_starts": status.failed.count,
        "failed_at_step": status.failed.step,
    }
    try:
        with replacing(folder / "status.json") as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{folder}/status.json could not be written ({error.strerror}) and may be out of date"
    return ""


def _how_to_continue(state: State, saved: bool) -> str:
    if state == "running":
        return ""
    if not saved:
        return "nothing was saved: the same command starts where this run did"
    more = "a larger train.steps (or epochs) continues the run"
    return more if state == "finished" else "run the same command again"


def read_status(folder: Path) -> Status | None:
    """Return the status of the previous run; None if status.json is missing or invalid."""
    try:
        status = read_json(folder / "status.json", LIMIT_BYTES)
        failed = {"count": status.get("failed_starts", 0), "step": status.get("failed_at_step", 0)}
        return msgspec.convert({**status, "failed": failed}, Status)
    except (OSError, ValueError):
        return None


class RunStatus:
    """Tracks the progress of a run in status.json. Writes nothing before `start`: until then the folder may
    belong to another run."""

    def __init__(self, ranks: RankInfo, console: Console) -> None:
        self._is_main, self._console = ranks.is_main, console
        self._folder: Path | None = None
        self._earlier: Status | None = None  # of the run before in this folder
        self._resumed_from: int | None = None
        self._failed = FailedStarts()
        self._step, self._warned, self._ended = 0, False, False
        self._lock = threading.Lock()
        self._forget_lock: Callable[[], None] = lambda: None

    @contextmanager
    def recording(self, forget_lock: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Within this context an error that ends the run after `start` is recorded, except the loss of a
        process that has recorded its own failure: that reason stays. `forget_lock`: of the run's folder."""
        self._forget_lock = forget_lock
        try:
            yield
        except BaseException as error:
            lost = as_peer_lost_error(error)
            if self._folder is not None and not (lost and self._ended_elsewhere()):
                reason = str(lost) if lost else f"{type(error).__name__}: {error}"
                self.write("failed", reason, for_all=isinstance(error, OutOfMemory))
            raise

    def start(self, folder: Path, resumed_from: int | None, failed: FailedStarts) -> None:
        """From now on the folder is this run's. Record that it resumes after step `resumed_from`, or begins
        (None); `failed`: the failed starts before it."""
        self._folder, self._earlier = folder, read_status(folder)
        self._resumed_from, self._failed = resumed_from, failed
        self.record("running", resumed_from or 0)

    def record(self, state: State, step: int, reason: str = "") -> None:
        """Record the number of steps done, and whether the run ended normally after them, finished or
        stopped."""
        self._step = step
        self.write(state, reason)

    def progress(self, step: int) -> None:
        """Record the number of steps that are done and whose rows are all written."""
        self.record("running", step)

    def finish(self, step: int, stopped: str | None) -> None:
        """Record that the run ended normally after `step` steps. `stopped`: why before its last one."""
        self.record("finished" if stopped is None else "stopped", step, stopped or "")

    def end_at_once(self, reason: str) -> None:
        """Record that the process is about to be ended without saving, from any thread."""
        self.write("stopped", reason)
        self._forget_lock()

    def record_loss(self, lost: LostPeer) -> None:
        """Record that the run ends because another rank has ended, unless a process has recorded a reason.
        Rank 0 writes, and the rank that found it: rank 0 may be the one that has ended."""
        if self._folder is not None and not self._ended_elsewhere():
            if not self._is_main and (status := read_status(self._folder)):
                self._step = max(self._step, status.step)  # only rank 0 records progress
            self.write("failed", explain_loss(lost.text), for_all=lost.found)

    def write(self, state: State, reason: str = "", for_all: bool = False) -> None:
        """Write the state, from any thread; the first state other than running is final. A folder that cannot
        be written causes one warning. `for_all`: any rank writes, because rank 0 may not be able to."""
        with self._lock:
            if not (self._is_main or for_all) or self._folder is None or self._ended:
                return
            self._ended = state != "running"
            status = Status(state, self._step, self._resumed_from, reason, self._failed)
            problem = write_status(self._folder, status, self._has_saved())
            if problem and not self._warned:
                self._warned = True
                self._console.print(f"warning: {problem}")

    def _ended_elsewhere(self) -> Status | None:
        """Return the status if another process of this run has already recorded how it ended."""
        assert self._folder is not None
        status = read_status(self._folder)
        return status if status and status.state != "running" and status != self._earlier else None

    def _has_saved(self) -> bool:
        assert self._folder is not None
        try:
            return bool(list_checkpoints(self._folder / "checkpoints"))
        except CheckpointError:  # the folder cannot be listed now; the next save reports it
            return False
