"""The lock of a run's folder, between real processes, some of which are killed."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.fault_tolerance.run_lock import NOTE, lock_folder, make_run_folder
from tests.support.launch import ROOT
from tests.support.worlds import run_ranks

HOLDER = """
import os, sys
from pathlib import Path
from meshwright.train.errors import LockError
from meshwright.train.fault_tolerance.run_lock import lock_folder
sys.stdin.readline()
try:
    lock = lock_folder(Path(sys.argv[1]))
    print("have", lock.warning, flush=True)
except LockError as error:
    print("LockError", error, flush=True)
AND_THEN
sys.stdin.readline()
lock.release()
"""

# After the lock is taken: a child that runs until SIGTERM, and then ends like any Python program.
FORKS = """
import signal, threading, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
if child := os.fork():
    def wait():
        print("child ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    threading.Thread(target=wait, daemon=True).start()
else:
    print(os.getpid(), flush=True)  # from here on it handles signals
    while True:
        time.sleep(0.1)
"""

# A kernel filter (seccomp(2)) that makes flock return ENOLCK, as file systems without locks do.
NO_FLOCK = """
import ctypes, errno, platform, struct
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
code = b"".join(struct.pack("HBBI", *step) for step in [
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOLCK), (0x06, 0, 0, 0x7FFF0000)])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]
prctl = ctypes.CDLL(None).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4
if prctl(38, 1, None, None, None) or prctl(22, 2, ctypes.cast(ctypes.byref(Program(4, code)), ctypes.c_void_p), None, None):
    print("no filter", flush=True)
"""  # noqa: E501
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that takes the lock of tmp_path when it reads a line, and releases it at the next
    line."""
    everyone = []

    def start_holder(before: str = "", and_then: str = "") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", before + HOLDER.replace("AND_THEN", and_then), str(tmp_path)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        everyone.append(process)
        return process

    yield start_holder
    for process in everyone:
        process.kill()
        process.communicate()


def go_on(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def take(process: subprocess.Popen) -> str:
    go_on(process)
    line = process.stdout.readline().strip()
    if line == "no filter":
        pytest.skip("this kernel or container allows no seccomp filters")
    return line


def release(process: subprocess.Popen) -> None:
    go_on(process)
    assert process.wait(60) == 0


def write_lock(folder: Path, **holder) -> None:
    (folder / NOTE).write_text(json.dumps(holder))


def test_a_folder_in_use_is_refused_by_name_and_free_after_a_clean_end(start: Start, tmp_path: Path) -> None:
    holder = start()
    assert take(holder) == "have"
    with pytest.raises(LockError) as taken:
        lock_folder(tmp_path)
    for fact in (
        f"run.dir={tmp_path}",
        f"process {holder.pid}",
        f"host {socket.gethostname()}",
        "use another run.dir",
    ):
        assert fact in str(taken.value)
    release(holder)
    lock = lock_folder(tmp_path)
    assert lock.warning == ""
    lock.release()
    lock.release()  # a second time does nothing
    assert not (tmp_path / NOTE).exists()


def test_the_lock_of_a_killed_process_is_free_and_explained(start: Start, tmp_path: Path) -> None:
    holder = start()
    take(holder)
    holder.kill()
    holder.wait()
    lock = lock_folder(tmp_path)
    assert f"(process {holder.pid} on host {socket.gethostname()}, since 20" in lock.warning
    assert "stale lock" in lock.warning
    lock.release()
    again = lock_folder(tmp_path)
    assert again.warning == ""
    again.release()


def test_one_of_many_that_race_gets_it(start: Start) -> None:
    racers = [start() for _ in range(6)]
    for racer in racers:
        go_on(racer)
    results = [racer.stdout.readline().split()[0] for racer in racers]
    assert sorted(results) == ["LockError"] * 5 + ["have"]


def test_waiting_for_a_run_that_ends(start: Start, tmp_path: Path) -> None:
    holder = start()
    take(holder)
    with pytest.raises(LockError):
        lock_folder(tmp_path, wait_s=0.3)
    go_on(holder)
    lock_folder(tmp_path, wait_s=60).release()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"x" * 100_000,
        b"[" * 4000,
        b'{"host": 1, "pid": "a", "since": [], "started": null}',
    ],
)
def test_a_file_with_anything_in_it_is_no_obstacle(content: bytes, tmp_path: Path) -> None:
    for name in (".lock", NOTE):
        (tmp_path / name).write_bytes(content)
    lock = lock_folder(tmp_path)
    assert lock.warning == ""
    assert json.loads((tmp_path / NOTE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_folder_that_takes_no_file_is_said_to_be_unprotected(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    assert "cannot be opened" in lock_folder(tmp_path).warning
    lock_folder(tmp_path).release()


def test_a_link_or_a_pipe_in_the_file_s_place_is_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".lock").symlink_to(victim)
    assert "cannot be opened" in lock_folder(tmp_path).warning
    assert victim.read_text() == "precious"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert "is not a file" in lock_folder(tmp_path).warning


def test_a_note_that_is_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / NOTE).symlink_to(victim)
    lock_folder(tmp_path).release()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said_to_be_unprotected(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be opened (Permission denied)" in lock_folder(tmp_path).warning
    tmp_path.chmod(0o700)


class TestForks:
    """A forked process inherits its parent's open files, and may outlive it."""

    def test_one_that_outlives_its_killed_parent_does_not_keep_the_lock(
        self, start: Start, tmp_path: Path
    ) -> None:
        holder = start(and_then=FORKS)
        assert take(holder) == "have"
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(LockError):
                lock_folder(tmp_path)
            holder.kill()
            holder.wait()
            lock = lock_folder(tmp_path)
            assert f"process {holder.pid} on host" in lock.warning
            os.kill(child, 0)  # it is alive
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)

    def test_one_that_ends_does_not_let_go_for_its_parent(self, start: Start, tmp_path: Path) -> None:
        holder = start(and_then=FORKS)
        take(holder)
        child = int(holder.stdout.readline())
        os.kill(child, signal.SIGTERM)
        assert holder.stdout.readline().strip() == "child ended 3"
        with pytest.raises(LockError):
            lock_folder(tmp_path)
        release(holder)
        assert lock_folder(tmp_path).warning == ""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux", reason="seccomp is Linux's"
)
class TestWithoutLocks:
    """On a file system without locks, host and process number decide."""

    def test_a_living_process_holds_it_and_a_dead_one_does_not(self, start: Start) -> None:
        first, second, third = (start(NO_FLOCK) for _ in range(3))
        assert take(first) == "have"
        assert f"in use by process {first.pid}" in take(second)
        first.kill()
        first.wait()
        assert f"(process {first.pid} on host" in take(third)

    def test_a_clean_end_lets_go(self, start: Start) -> None:
        first, second = start(NO_FLOCK), start(NO_FLOCK)
        take(first)
        release(first)
        assert take(second) == "have"

    def test_another_process_with_the_same_number_is_not_the_holder(
        self, start: Start, tmp_path: Path
    ) -> None:
        write_lock(tmp_path, host=socket.gethostname(), pid=os.getpid(), since="2026-01-01", started=1)
        assert "stale lock" in take(start(NO_FLOCK))

    def test_of_another_host_it_cannot_be_told(self, start: Start, tmp_path: Path) -> None:
        write_lock(tmp_path, host="elsewhere\n\x1b[2J", pid=7, since="2026-01-01", started=1)
        message = take(start(NO_FLOCK))
        assert "in use by process 7 on host elsewhere" in message
        assert f"remove {tmp_path}/{NOTE}" in message
        assert "\x1b" not in message


def make_own(folders: list[str]) -> str:
    rank = dist.get_rank()
    try:
        return str(make_run_folder(folders[rank], RankInfo(rank, 2, rank, 2, True)))
    except ConfigError as error:
        return str(error)


def test_a_folder_that_one_rank_cannot_make_is_one_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = str(tmp_path / "file/run")
    errors = run_ranks(2, make_own, [str(tmp_path / "run"), bad])
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"run.dir={bad}: ")
    assert "(Not a directory): name another" in errors[0]
