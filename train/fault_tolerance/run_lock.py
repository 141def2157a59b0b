"""The lock of a run's folder, which only one run may use at a time. The kernel releases it when the process
dies, for any reason."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, gather_from_all, start_ticks
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.files import NO_LOCKS, make_lock, read_note, write_atomically

if TYPE_CHECKING:
    from filelock import FileLock

LIMIT_BYTES = 4096
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
    folder, problem = Path(run_dir).expanduser(), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"run.dir={folder}: cannot create this folder ({error.strerror}): name another"
    for message in filter(None, gather_from_all(problem)):
        raise ConfigError(message)
    return folder


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
