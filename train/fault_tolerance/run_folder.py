"""The folder of a run: the lock that only one run may hold at a time, status.json, and crash loops."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count, Natural
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.console import Console
from meshwright.train.distributed.agreement import broadcast_from_rank0, on_all_ranks
from meshwright.train.distributed.ranks import RankInfo, start_ticks
from meshwright.train.errors import CheckpointError, ConfigError, CrashLoopError, LockError, OutOfMemory
from meshwright.train.fault_tolerance.peers import LostPeer, as_peer_lost_error, explain_loss
from meshwright.train.files import NO_LOCKS, make_lock, read_note, replacing, write_atomically

if TYPE_CHECKING:
    from filelock import FileLock


LIMIT_BYTES = 1 << 20  # of a note or status; its reason may contain a complete error message
NOTE = ".lock.json"  # next to .lock, which filelock truncates on acquire (3.31 to 4.1)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. since: the date as text; started: clock ticks from the machine's boot to
    the process's start, 0 where the system does not provide it (not on Linux)."""

    host: str
    pid: Count
    since: str
    started: int
    launch: str = ""  # RankInfo.launch

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on host {self.host}, since {self.since}", 200)


class Lock:
    """A folder's lock, as lock_folder returns it. warning: a message if the previous run did not release the
    lock, or if the folder supports no lock; otherwise ""."""

    def __init__(self, folder: Path, lock: "FileLock | None", warning: str = "") -> None:
        self._folder, self._lock, self.warning = folder, lock, warning

    def release(self) -> None:
        """Remove the note and release the lock. `.lock` stays, because others may have it open."""
        self.forget()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def forget(self) -> None:
        """Remove the note, whose absence marks a clean end."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / NOTE).unlink(missing_ok=True)


def lock_folder(folder: Path, wait_s: float = 0.0, launch: str = "") -> Lock:
    """Take the folder's lock, in the one process of a run that writes into it. Raises LockError if it is
    taken.

    wait_s: how long to wait for it; launch: RankInfo.launch, for the note. If each machine keeps the locks of
    a network file system local (NFS with local_lock or nolock), two runs on two machines are not detected.
    """
    from filelock import Timeout

    path = folder / ".lock"
    unprotected = "a second run in this folder will not be refused"
    lock = make_lock(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            return Lock(folder, None, f"{path} is not a file: {unprotected}; delete it")
        lock.acquire(timeout=wait_s)
        previous = _read_holder(folder)
    except Timeout:
        raise LockError(_taken_message(folder, _read_holder(folder))) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return Lock(folder, None, f"{path} cannot be opened ({error.strerror}): {unprotected}")
        previous = _wait_for_dead_holder(folder, time.monotonic() + wait_s)
    _write_holder(folder, launch)
    stale = f"stale lock: the previous run ({previous}) was killed or its host went down; continuing"
    return Lock(folder, lock, stale if previous else "")


def _wait_for_dead_holder(folder: Path, deadline_s: float) -> Holder | None:
    """On a file system without locks: return the previous holder once it is known to be dead, None without
    one. Raises LockError."""
    while (holder := _read_holder(folder)) and not _is_dead(holder):
        if time.monotonic() >= deadline_s:
            taken = _taken_message(folder, holder)
            if holder.host != socket.gethostname():
                taken += (
                    ". This file system has no locks, so this host cannot check whether that run is still "
                    f"alive: if it is not, remove {folder / NOTE}"
                )
            raise LockError(taken)
        time.sleep(0.2)
    return holder


def _taken_message(folder: Path, holder: Holder | None) -> str:
    return (
        f"run.dir={folder} is in use by {holder or 'another process'}: end that run, or use another run.dir"
    )


def _read_holder(folder: Path) -> Holder | None:
    return read_note(Holder, folder / NOTE, LIMIT_BYTES)


def _write_holder(folder: Path, launch: str) -> None:
    """Write the note with this process as holder. If the disk is full, the lock is held without a note."""
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = Holder(socket.gethostname(), pid, since, start_ticks(pid), launch)
    with contextlib.suppress(OSError):
        (folder / NOTE).unlink(missing_ok=True)
        write_atomically(folder / NOTE, json.dumps(asdict(holder)).encode())


def _is_dead(holder: Holder) -> bool:
    """Return whether a process of this host has exited, or its number belongs to another process by now.
    False for other hosts, where it is unknown."""
    if holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except PermissionError:
        pass  # alive, and another user's
    except (OSError, OverflowError):
        return True
    return bool(holder.started) and start_ticks(holder.pid) not in (0, holder.started)


def make_run_folder(run_dir: str) -> Path:
    """Create the folder that `run.dir` names, on every node; every rank calls it. Raises ConfigError on all
    ranks if it fails on one."""
    folder = Path(run_dir).expanduser()

    def make() -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"run.dir={folder}: cannot create this folder ({error.strerror}): name another"
            raise ConfigError(message) from None
        return folder

    return on_all_ranks(make)


def write_texts(folder: Path, texts: Mapping[str, str], ranks: RankInfo, console: Console) -> None:
    """Write config and plan, by file name. An error is only a warning: every checkpoint contains them too."""
    for name, text in texts.items() if ranks.is_main else ():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            console.print(f"warning: {folder / name} cannot be written ({error.strerror}); the run continues")


ENDING_S = 120.0  # wait for a holder that may be gone; NFS 4 keeps a dead host's lock for 90 s


@contextmanager
def take_folder(folder: Path, ranks: RankInfo, console: Console) -> Iterator[Callable[[], None]]:
    """Hold the folder's lock on rank 0; every rank calls it. Raises LockError on all ranks if another run has
    it. Yields what a process calls that ends at once, so that the next start does not take it for killed.

    A holder on another host may be a dead machine, whose lock a network file system keeps for a while, and
    one that the same torchrun has started is ending: these are waited for.
    """
    held: list[Lock] = []

    def take() -> str:
        try:
            held.append(lock_folder(folder, launch=ranks.launch))
        except LockError as error:
            holder = _read_holder(folder)
            here = holder is None or holder.host == socket.gethostname()
            if here and not (holder and holder.launch == ranks.launch != ""):
                raise
            console.print(f"{error}; waiting for it, at most {ENDING_S:.0f} s")
            held.append(lock_folder(folder, ENDING_S, ranks.launch))
        return held[0].warning

    if warning := broadcast_from_rank0(ranks, take):
        console.print(f"warning: {warning}")
    try:
        yield held[0].forget if held else lambda: None
    finally:
        for lock in held:
            lock.release()


State = Literal["running", "finished", "stopped", "failed"]


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
    failed_starts: Natural = 0
    failed_at_step: Natural = 0

    @property
    def failed(self) -> FailedStarts:
        """The failed starts up to this one."""
        return FailedStarts(self.failed_starts, self.failed_at_step)


def write_status(folder: Path, status: Status, saved: bool) -> str:
    """Write status.json by one rename, so that a reader never sees a partial file. `saved`: a checkpoint
    exists.

    Returns "", or a message if the file could not be written, which must not end a run.
    """
    reason, way_on = status.reason[: LIMIT_BYTES // 8], _how_to_continue(status.state, saved)
    content = asdict(replace(status, reason=reason)) | {"how_to_go_on": way_on}
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
    return read_note(Status, folder / "status.json", LIMIT_BYTES)


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
        self.progress(resumed_from or 0)

    def progress(self, step: int) -> None:
        """Record the number of steps that are done and whose rows are all written."""
        self._step = step
        self.write("running")

    def finish(self, step: int, stopped: str | None) -> None:
        """Record that the run ended normally after `step` steps. `stopped`: why before its last one."""
        self._step = step
        self.write("finished" if stopped is None else "stopped", stopped or "")

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
            status = Status(state, self._step, self._resumed_from, reason, *astuple(self._failed))
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


MAX_FAILED_STARTS = 3
SHOWN = 500  # characters of the last failure's reason in the message


def count_failed_starts(folder: Path, ranks: RankInfo, restarted: bool, start_step: int) -> FailedStarts:
    """Return the failed starts in a row before this one in a run's folder; every rank calls it. Raises
    CrashLoopError on all ranks (`check_crash_loop`)."""

    def check() -> FailedStarts:  # on rank 0, which then writes status.json: others might read the new file
        return check_crash_loop(read_status(folder), restarted, ranks.requeued, start_step)

    return broadcast_from_rank0(ranks, check)


def check_crash_loop(
    previous: Status | None, restarted: bool, requeued: bool, start_step: int
) -> FailedStarts:
    """Return the failed starts in a row, up to the previous one, that committed no checkpoint and got no
    further than the first of them.

    Args:
        previous: the previous start's status.json. State running means that it was killed, and counts as
            failed; a requested stop does not count, except after a restart by torchrun. An agreed stop
            exits with 0 and torchrun does not restart it, so in that case a process died, and torchrun's
            SIGTERM reached rank 0 before the error did.
        restarted, requeued: by torchrun, by Slurm; any other start is one by hand, which resets the count
        start_step: the step of the checkpoint to resume from, 0 without one

    Raises CrashLoopError after MAX_FAILED_STARTS.
    """
    if previous is None or previous.state == "finished" or not (restarted or requeued):
        return FailedStarts()
    other_start = start_step != (previous.resumed_from or 0)  # a new commit, or a damaged one was skipped
    if other_start or (previous.state == "stopped" and not restarted):
        return FailedStarts()
    before = previous.failed
    failed = FailedStarts(1, previous.step)
    if before.count and previous.step <= before.step:
        failed = FailedStarts(before.count + 1, before.step)
    if failed.count >= MAX_FAILED_STARTS:
        raise CrashLoopError(_diagnose(previous, failed, start_step))
    return failed


def _diagnose(previous: Status, failed: FailedStarts, start_step: int) -> str:
    origin = f"the checkpoint of step {start_step}" if start_step else "the beginning"
    reason = one_line(previous.reason, SHOWN) or "status.json gives no reason"
    if previous.state == "running":
        reason = "the process was killed or its host went down"
    if previous.state == "stopped":
        reason = f"{reason}, which torchrun sends after a process has died: its error is in torchrun's output"
    return (
        f"crash loop: {failed.count} starts in a row got no further than step {failed.step} (from {origin}). "
        f"Last failure: {reason}. Fix the cause and start the run by hand, which resets the count"
    )
