"""A run's folder, which is one run's at a time: a lock that the kernel lets go of when its process dies,
however it dies."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.files import NO_LOCKS, make_lock, read_json, write_whole

if TYPE_CHECKING:
    from filelock import FileLock

LIMIT_BYTES = 4096
NOTE = ".lock.json"  # beside .lock, which filelock empties when it takes it (3.31 to 4.1)


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. since: the date as text; started: clock ticks from the machine's start to the
    process's, 0 where the system does not say (not on Linux)."""

    host: str
    pid: Count
    since: str
    started: int

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on host {self.host}, since {self.since}", 200)


class Lock:
    """A folder's lock, as lock_folder took it. warning: a sentence if the run before this one did not let go
    of it, or if there is no lock because the folder takes none; else ""."""

    def __init__(self, folder: Path, lock: "FileLock | None", warning: str = "") -> None:
        self._folder, self._lock, self.warning = folder, lock, warning

    def release(self) -> None:
        """Remove the note, which is the mark of a clean end, and let go.

        .lock stays: were it removed, a process of an older version that has it open already would lock a file
        that nobody else sees.
        """
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / NOTE).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def lock_folder(folder: Path, wait_s: float = 0.0) -> Lock:
    """Take the folder's lock, for the one process of a run that writes into it. Raises LockError if it is
    taken.

    wait_s: how long to wait for it: after a restart the run before may still be ending, and a network file
    system keeps the lock of a machine that went down for a while (NFS 4: 90 s). Where each machine of a
    network file system keeps its locks to itself (NFS with local_lock or nolock), runs on two machines are
    not told apart.
    """
    from filelock import Timeout

    path = folder / ".lock"
    without = "nothing keeps a second run out of this folder"
    lock = make_lock(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            return Lock(folder, None, f"{path} is not a file: {without}")
        lock.acquire(timeout=wait_s)
        before = _read_holder(folder)
    except Timeout:
        raise LockError(_say_taken(folder, _read_holder(folder))) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return Lock(folder, None, f"{path} cannot be opened ({error.strerror}): {without}")
        before = _wait_for_death(folder, time.monotonic() + wait_s)
    _write_holder(folder)
    words = f"the run before this one here ({before}) ended without a word: killed, or its machine went down"
    return Lock(folder, lock, words if before else "")


def _wait_for_death(folder: Path, deadline_s: float) -> Holder | None:
    """Where the file system has no locks: the holder before, if it is known to be dead. Raises LockError."""
    while (holder := _read_holder(folder)) and not _is_dead(holder):
        if time.monotonic() >= deadline_s:
            taken = _say_taken(folder, holder)
            if holder.host != socket.gethostname():
                taken += (
                    ". This file system has no locks, so from here it cannot be told whether that run still "
                    f"lives: if it does not, remove {folder / NOTE}"
                )
            raise LockError(taken)
        time.sleep(0.2)
    return holder


def _say_taken(folder: Path, holder: Holder | None) -> str:
    return (
        f"run.dir={folder} is in use by {holder or 'another process'}: end that run, or use another run.dir"
    )


def _read_holder(folder: Path) -> Holder | None:
    """Who says to hold the lock; None where there is no note, or not as we write it."""
    try:
        return msgspec.convert(read_json(folder / NOTE, LIMIT_BYTES), Holder)
    except (OSError, ValueError):
        return None


def _write_holder(folder: Path) -> None:
    """Say who holds the lock. On a full disk it holds all the same, only namelessly."""
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = Holder(socket.gethostname(), pid, since, _started(pid))
    with contextlib.suppress(OSError):
        (folder / NOTE).unlink(missing_ok=True)
        write_whole(folder / NOTE, json.dumps(asdict(holder)).encode())


def _is_dead(holder: Holder) -> bool:
    """Whether a process of this host is gone, or its number another process's by now. False for other hosts:
    unknown."""
    if holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except PermissionError:
        pass  # it lives, and is another user's
    except (OSError, OverflowError):
        return True
    return bool(holder.started) and _started(holder.pid) not in (0, holder.started)


def _started(pid: int) -> int:
    """Clock ticks from the machine's start to the process's (proc(5), /proc/PID/stat, field 22); 0 if not to
    be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def make_run_folder(run_dir: str, ranks: RankInfo) -> Path:
    """The folder that `run.dir` names, on every node; every rank calls it. Raises ConfigError on all of them
    alike."""
    folder, problem = Path(run_dir).expanduser(), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"run.dir={folder}: cannot make this folder ({error.strerror}): name another"
    problems = [""] * ranks.world_size
    dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise ConfigError(found)
    return folder


def write_texts(folder: Path, texts: Mapping[str, str], ranks: RankInfo, console: Console) -> None:
    """Config and plan, by file name; where that fails the run goes on, for every checkpoint has them too."""
    for name, text in texts.items() if ranks.is_main else ():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            console.print(f"warning: {folder / name} cannot be written ({error.strerror})")


ENDING_S = 120.0  # after a restart: for the run before to end; NFS 4 keeps a dead machine's lock for 90 s


@contextmanager
def take_folder(folder: Path, ranks: RankInfo, console: Console) -> Iterator[None]:
    """Rank 0 holds the folder's lock; every rank calls it. Raises LockError, on all alike, if another run has
    it."""
    held: list[Lock] = []

    def take() -> str:
        held.append(lock_folder(folder, ENDING_S if ranks.restarts else 0.0))
        return held[0].warning

    if warning := broadcast_from_rank0(ranks, take):
        console.print(f"warning: {warning}")
    try:
        yield
    finally:
        for lock in held:
            lock.release()
