"""A run's folder, which is one run's at a time: a lock that the kernel lets go of when its process dies,
however it dies."""

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.files import read_json

LIMIT_BYTES = 4096
# no link, whose target would be overwritten
OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


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
    """A folder's lock, as lock_folder took it.

    stale: a sentence if the run before this one did not let go of it, else "". unprotected: a sentence if
    there is no lock because the folder takes none, else "".
    """

    def __init__(self, file: int | None, stale: str = "", unprotected: str = "") -> None:
        self._file, self.stale, self.unprotected = file, stale, unprotected

    def release(self) -> None:
        """Empty the file, which is the mark of a clean end, and let go.

        The file stays: were it removed, a process that has it open already would lock a file that nobody else
        sees.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


def lock_folder(folder: Path, wait_s: float = 0.0) -> Lock:
    """Take the folder's lock, for the one process of a run that writes into it. Raises LockError if it is
    taken.

    wait_s: how long to wait for it: after a restart the run before may still be ending, and a network file
    system keeps the lock of a machine that went down for a while (NFS 4: 90 s). Where each machine of a
    network file system keeps its locks to itself (NFS with local_lock or nolock), runs on two machines are
    not told apart.
    """
    file, problem = _open(folder / ".lock")
    if file is None:
        return Lock(None, unprotected=f"{problem}: nothing keeps a second run out of this folder")
    try:
        before = _take(file, folder, time.monotonic() + wait_s)
    except LockError:
        os.close(file)
        raise
    _write_holder(file)
    words = f"the run before this one here ({before}) ended without a word: killed, or its machine went down"
    return Lock(file, stale=words if before else "")


def _open(path: Path) -> tuple[int | None, str]:
    """The open file, or None and why there is none."""
    try:
        file = os.open(path, OPEN, 0o644)
    except OSError as error:
        return None, f"{path} cannot be opened ({error.strerror})"
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file, ""
    os.close(file)
    return None, f"{path} is not a file"


def _take(file: int, folder: Path, deadline_s: float) -> Holder | None:
    """Lock the open file; the holder before, if it did not let go. Raises LockError."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _read_holder(folder)
        except BlockingIOError:
            taken = _say_taken(folder, _read_holder(folder))
        # this file system has no locks: ENOLCK, ENOTSUP, EOPNOTSUPP; Lustre without its flock option ENOSYS
        except OSError:
            holder = _read_holder(folder)
            if holder is None or _is_dead(holder):
                return holder
            taken = _say_taken(folder, holder)
            if holder.host != socket.gethostname():
                taken += (
                    ". This file system has no locks, so from here it cannot be told whether that run still "
                    f"lives: if it does not, remove {folder}/.lock"
                )
        if time.monotonic() >= deadline_s:
            raise LockError(taken)
        time.sleep(0.2)


def _say_taken(folder: Path, holder: Holder | None) -> str:
    return (
        f"run.dir={folder} is in use by {holder or 'another process'}: end that run, or use another run.dir"
    )


def _read_holder(folder: Path) -> Holder | None:
    """Who says to hold the lock; None where the file is empty, or not as we write it."""
    try:
        return msgspec.convert(read_json(folder / ".lock", LIMIT_BYTES), Holder)
    except (OSError, ValueError):
        return None


def _write_holder(file: int) -> None:
    """Say who holds the lock. On a full disk it holds all the same, only namelessly."""
    holder = Holder(
        socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"), _started(os.getpid())
    )
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)


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

    def take() -> list[str]:
        held.append(lock_folder(folder, ENDING_S if ranks.restarts else 0.0))
        return [words for words in (held[0].stale, held[0].unprotected) if words]

    for words in broadcast_from_rank0(ranks, take):
        console.print(f"warning: {words}")
    try:
        yield
    finally:
        for lock in held:
            lock.release()
