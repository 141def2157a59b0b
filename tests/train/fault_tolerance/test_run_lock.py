"""The lock of a run's folder, between real processes, some of which are killed."""

import ctypes
import errno
import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.fault_tolerance.run_folder import NOTE, lock_folder, make_run_folder, take_folder
from tests.support.forks import Fork, fork
from tests.support.worlds import LIMIT_S, run_ranks

HOST = socket.gethostname()


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.005)


def hold(folder: Path, orders: Path, children: int) -> None:
    """Take the lock, fork children, report in the file "result", and release the lock on the order."""
    try:
        lock = lock_folder(folder)
        result = f"have {lock.warning}"
    except LockError as error:
        result = f"LockError {error}"
    pids = [start_child(orders / f"child-{number}") for number in range(children)]
    (orders / "writing").write_text(result if not pids else " ".join(map(str, pids)))
    (orders / "writing").rename(orders / "result")
    wait_for(orders / "release")
    lock.release()


def start_child(started: Path) -> int:
    """Fork a child that runs until SIGTERM and then ends like any Python program; return its process id."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        started.touch()
        while True:
            signal.pause()
    wait_for(started)
    return child


class Holder:
    """A process that takes the lock at once, and releases it on an order."""

    def __init__(self, folder: Path, orders: Path, children: int) -> None:
        orders.mkdir()
        self.orders = orders
        self.process: Fork = fork(hold, folder, orders, children, output=orders / "output")
        self.pid = self.process.pid

    def result(self) -> str:
        """What the process reported when it tried to take the lock."""
        wait_for(self.orders / "result")
        return (self.orders / "result").read_text()

    def release(self) -> None:
        (self.orders / "release").touch()
        assert self.process.wait(LIMIT_S) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


Start = Callable[..., Holder]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The locked folder."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a process that takes the lock of `folder`."""
    everyone = list[Holder]()

    def start_holder(children: int = 0) -> Holder:
        everyone.append(Holder(folder, folder.parent / f"holder-{len(everyone)}", children))
        return everyone[-1]

    yield start_holder
    for holder in everyone:
        holder.kill()


def write_lock(folder: Path, **holder) -> None:
    (folder / NOTE).write_text(json.dumps(holder))


def test_a_folder_in_use_is_refused_by_name_and_free_after_a_clean_end(start: Start, folder: Path) -> None:
    holder = start()
    assert holder.result() == "have "
    with pytest.raises(LockError) as taken:
        lock_folder(folder)
    for fact in (f"run.dir={folder}", f"process {holder.pid}", f"host {HOST}", "use another run.dir"):
        assert fact in str(taken.value)
    with pytest.raises(LockError):
        lock_folder(folder, wait_s=0.1)
    (holder.orders / "release").touch()
    lock = lock_folder(folder, wait_s=LIMIT_S)  # waits for a run that ends
    assert lock.warning == ""
    lock.release()
    lock.release()  # a second time does nothing
    assert not (folder / NOTE).exists()


class Listening(Console):
    """A console that releases the lock once somebody says that he waits for it."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(True)
        self._holder = holder

    def print(self, text: str) -> None:
        assert "waiting for it" in text
        self._holder.release()


def waits_for(holder: Holder, folder: Path, launch: str) -> bool:
    """Whether a start waits for the lock that another process has, which then releases it."""
    try:
        with take_folder(folder, RankInfo(0, 1, 0, 1, True, launch), Listening(holder)) as forget:
            assert holder.process.wait(LIMIT_S) == 0
            forget()  # as a process that ends at once, such as by Ctrl-C before the first step
            assert not (folder / NOTE).exists()
    except LockError:
        return False
    return True


def test_another_host_and_the_same_torchrun_are_waited_for(group: None, start: Start, folder: Path) -> None:
    """A network file system keeps the lock of a dead machine; torchrun starts again before all have ended."""
    for host, theirs, ours, waits in (
        (HOST, "", "", False),
        (HOST, "torchrun 1", "torchrun 2", False),
        (HOST, "torchrun 1", "torchrun 1", True),
        ("elsewhere", "", "", True),
    ):
        holder = start()
        holder.result()
        write_lock(folder, host=host, pid=1, since="now", started=0, launch=theirs)
        assert waits_for(holder, folder, ours) == waits, (host, theirs, ours)
        holder.kill()


def test_the_lock_of_a_killed_process_is_free_and_explained(start: Start, folder: Path) -> None:
    holder = start()
    holder.result()
    holder.kill()
    lock = lock_folder(folder)
    assert f"(process {holder.pid} on host {HOST}, since 20" in lock.warning
    assert "stale lock" in lock.warning
    lock.release()
    assert lock_folder(folder).warning == ""


def test_one_of_many_that_race_gets_it(start: Start) -> None:
    racers = [start() for _ in range(4)]
    assert sorted(racer.result().split()[0] for racer in racers) == ["LockError"] * 3 + ["have"]


@pytest.mark.parametrize("content", [b"\xff", b"x" * 100_000, b'{"host": 1, "pid": "a"}'])
def test_a_file_with_anything_in_it_is_no_obstacle(content: bytes, tmp_path: Path) -> None:
    for name in (".lock", NOTE):
        (tmp_path / name).write_bytes(content)
    lock = lock_folder(tmp_path)
    assert lock.warning == ""
    assert json.loads((tmp_path / NOTE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_folder_that_takes_no_lock_is_said_to_be_unprotected(tmp_path: Path) -> None:
    """A folder, a link or a pipe in the place of the file is left alone, and so is what a link names."""
    victim, lock = tmp_path / "victim", tmp_path / ".lock"
    victim.write_text("precious")
    lock.mkdir()
    assert "cannot be opened" in lock_folder(tmp_path).warning
    lock.rmdir()
    lock.symlink_to(victim)
    assert "cannot be opened" in lock_folder(tmp_path).warning
    lock.unlink()
    os.mkfifo(lock)
    assert "is not a file" in lock_folder(tmp_path).warning
    lock.unlink()
    (tmp_path / NOTE).symlink_to(victim)
    lock_folder(tmp_path).release()
    assert victim.read_text() == "precious"


def test_a_fork_neither_lets_go_for_its_parent_nor_keeps_the_lock_of_a_killed_one(
    start: Start, folder: Path
) -> None:
    """A forked process inherits its parent's open files."""
    holder = start(children=2)
    ends, outlives = map(int, holder.result().split())
    try:
        os.kill(ends, signal.SIGTERM)
        stat, deadline_s = Path(f"/proc/{ends}/stat"), time.monotonic() + LIMIT_S
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":  # its parent does not wait for it
            assert time.monotonic() < deadline_s
        with pytest.raises(LockError):
            lock_folder(folder)
        holder.kill()
        lock = lock_folder(folder)
        assert f"process {holder.pid} on host" in lock.warning
        os.kill(outlives, 0)  # it is alive
        lock.release()
    finally:
        os.kill(outlives, signal.SIGKILL)


def forbid_flock() -> None:
    """Make flock return ENOLCK in this thread, as file systems without locks do: a kernel filter
    (seccomp(2))."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOLCK)]
    code = b"".join(struct.pack("HBBI", *step) for step in [*steps, (0x06, 0, 0, 0x7FFF0000)])

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    prctl, program = ctypes.CDLL(None).prctl, ctypes.byref(Program(4, code))
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4
    assert prctl(38, 1, None, None, None) == 0
    if prctl(22, 2, ctypes.cast(program, ctypes.c_void_p), None, None):
        pytest.skip("this kernel or container allows no seccomp filters")


def take_without_flock(folder: Path, notes: list[dict[str, Any]]) -> list[str]:
    """The results of taking the lock with each of these notes in the folder; {} leaves the note of before."""
    forbid_flock()
    results = []
    for note in notes:
        if note:
            write_lock(folder, **{"host": HOST, "since": "2026-01-01", "started": 0, **note})
        try:
            lock = lock_folder(folder)
            results.append(f"have {lock.warning}")
            if note:
                lock.release()
        except LockError as error:
            results.append(f"LockError {error}")
    return results


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux", reason="seccomp is Linux's"
)
def test_without_locks_the_host_and_the_process_decide(folder: Path) -> None:
    """On a file system without locks: a living process holds it, a dead or clean one does not, nor another
    one with the same number; one of another host may."""
    dead = subprocess.Popen("true")
    dead.wait()
    notes = [
        {"pid": dead.pid},
        {"pid": os.getpid(), "started": 1},
        {},
        {},
        {"pid": 7, "host": "elsewhere\n\x1b[2J"},
    ]
    (results,) = run_ranks(1, take_without_flock, folder, notes)
    of_dead, of_same_number, released, alive, of_another_host = results
    assert f"stale lock: the previous run (process {dead.pid} on host {HOST}" in of_dead
    assert "stale lock" in of_same_number
    assert released == "have "
    assert re.search(rf"in use by process \d+ on host {HOST}", alive)
    assert "in use by process 7 on host elsewhere" in of_another_host
    assert f"remove {folder}/{NOTE}" in of_another_host
    assert "\x1b" not in of_another_host


def make_own(folders: list[str]) -> str:
    rank = dist.get_rank()
    try:
        return str(make_run_folder(folders[rank]))
    except ConfigError as error:
        return str(error)


def test_a_folder_that_one_rank_cannot_make_is_one_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = str(tmp_path / "file/run")
    errors = run_ranks(2, make_own, [str(tmp_path / "run"), bad])
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"run.dir={bad}: ")
    assert "(Not a directory): name another" in errors[0]
