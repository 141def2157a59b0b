"""Graceful shutdown with real processes and real signals."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import RunConfig
from meshwright.train.fault_tolerance.shutdown import REPEAT_S, GracefulShutdown
from tests.support.forks import Fork, fork
from tests.support.workers.shutdown import Scene, play

TERM, INT, USR1, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL
LIMIT_S = 120  # for events that take a fraction of a second on a quiet machine


@dataclass
class Ranks:
    """The processes of one run."""

    scene: Scene
    processes: list[Fork]

    def log(self, rank: int) -> str:
        path = self.scene.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def last(self) -> list[str]:
        return [(self.log(rank).splitlines() or [""])[-1] for rank in range(self.scene.ranks)]

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not all(text in self.log(rank) for rank in range(self.scene.ranks)):
            assert time.monotonic() < deadline_s, self.last()
            time.sleep(0.01)

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(self.scene.ranks):
            self.processes[rank].send_signal(number)

    def exit_codes(self, *ranks: int) -> list[int | None]:
        return [self.processes[rank].wait(LIMIT_S) for rank in ranks or range(self.scene.ranks)]


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the ranks of a scene, and wait until all have logged a text."""
    everyone: list[Fork] = []

    def start_ranks(ranks: int, until: str = "step 3", **scene) -> Ranks:
        run = Scene(tmp_path, ranks, **scene)
        processes = [fork(play, run, rank, output=tmp_path / f"{rank}.out") for rank in range(ranks)]
        everyone.extend(processes)
        started = Ranks(run, processes)
        started.wait_for(until)
        return started

    yield start_ranks
    for process in everyone:
        process.kill()
        process.wait()


def assert_stopped(run: Ranks, reason: str, failed: bool = False) -> None:
    """All ranks stopped after the same step."""
    assert run.exit_codes() == [0] * run.scene.ranks, run.last()
    lasts = set(run.last())
    assert len(lasts) == 1, lasts
    assert lasts.pop().endswith(f": {reason}, failed {failed}")


@pytest.mark.parametrize(("number", "ranks"), [(TERM, 2), (INT, 1), (USR1, 1), (HUP, 1)])
def test_a_signal_to_all_stops_all_after_the_same_step_also_if_delivered_twice_at_once(
    start: Start, number: signal.Signals, ranks: int
) -> None:
    """`timeout` and srun deliver it twice."""
    run = start(ranks)
    run.send(number)
    run.send(number)
    assert_stopped(run, f"signal {number.name}")


def test_the_time_limit_stops_all(start: Start) -> None:
    assert_stopped(start(2, until="", max_hours=1e-6), "run.max_hours")


def test_an_error_on_one_rank_stops_all_as_failed(start: Start) -> None:
    run = start(2, trouble="failed save", rank_in_trouble=1)
    assert_stopped(run, "rank 1: OSError: disk full", failed=True)


def test_a_second_signal_ends_at_once(start: Start) -> None:
    run = start(2, trouble="long save")
    run.send(TERM)
    run.wait_for("saves")
    time.sleep(REPEAT_S)
    run.send(INT)
    assert run.exit_codes() == [128 + INT] * 2
    assert run.last()[0] == run.last()[1]
    assert run.last()[0].startswith("ends: signal SIGTERM, then signal SIGINT: ")
    assert "without saving" in run.last()[0]


def test_before_the_first_step_a_signal_ends_at_once(start: Start) -> None:
    run = start(1, trouble="set-up")
    run.send(INT)
    assert run.exit_codes() == [128 + INT]
    assert run.last() == ["ends: signal SIGINT before the first step: there was nothing to save"]


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_signal_before_the_first_step_after_a_loss(start: Start, by_signal: bool) -> None:
    """The launcher sends it because of the loss, which is then the reason; unless the same signal has ended
    the other rank a moment before."""
    run = start(1, trouble="lost by a signal" if by_signal else "lost", lost_s=LIMIT_S)
    run.send(TERM)
    assert run.exit_codes() == [128 + TERM if by_signal else 1]
    assert run.last()[0].startswith("ends: signal SIGTERM" if by_signal else "lost: rank 1 is gone")


def test_a_rank_that_a_signal_ends_reports_that(start: Start) -> None:
    run = start(3, trouble="set-up", lost_s=0.5)
    run.send(TERM, 1)
    assert run.exit_codes() == [1, 128 + TERM, 1]
    assert [run.last()[rank].endswith(", by a signal") for rank in (0, 2)] == [True] * 2, run.last()


def test_a_save_that_outlasts_the_grace_period_is_ended_on_all_ranks(start: Start) -> None:
    """Also on the rank that received no signal."""
    run = start(2, trouble="long save", grace_s=1)
    run.send(USR1, 0)
    assert run.exit_codes() == [128 + USR1] * 2
    assert run.last()[0] == run.last()[1]
    assert run.last()[0].startswith("ends: signal SIGUSR1: ")
    assert "without saving" in run.last()[0]
    assert "run.grace_s=1 s" in run.last()[0]


@pytest.mark.parametrize("peer", ["asleep", "stopped"])
def test_the_grace_period_ends_a_rank_inside_a_collective(start: Start, peer: str) -> None:
    """Python's own signal handlers do not run there."""
    trouble = "collective" if peer == "asleep" else ""
    run = start(2, until="step 5", trouble=trouble, rank_in_trouble=1, grace_s=0.2)
    if peer == "stopped":
        run.send(signal.SIGSTOP, 1)
    run.send(TERM, 0)
    assert run.exit_codes(0) == [128 + TERM]
    last_step = run.log(0).splitlines()[-2]
    assert last_step == "step 5" if peer == "asleep" else last_step.startswith("step "), "and none after it"
    assert "run.grace_s=0.2 s" in run.last()[0]


@pytest.mark.parametrize("requested", [False, True])
def test_nobody_waits_for_the_agreement_of_a_dead_rank(start: Start, requested: bool) -> None:
    """With and without a requested stop: torchrun sends SIGTERM to the others when a rank has died."""
    run = start(3)
    run.send(KILL, 1)
    if requested:
        run.send(TERM, 0, 2)
    assert run.exit_codes() == [1, -KILL, 1]
    for rank in (0, 2):  # either the agreement fails, or first the connection to a rank that has died
        assert run.last()[rank].startswith(("PeerLostError: a process of this run has died", "lost: rank "))


@pytest.mark.parametrize(("killed", "found_by"), [(1, {0, 3, 4}), (0, {1, 2})])
def test_a_main_thread_that_cannot_return_ends_after_the_death_of_a_peer(
    start: Start, killed: int, found_by: set[int]
) -> None:
    """And names it, on ranks that have no connection to it too. No launcher sends a signal here."""
    run = start(6, until="step 5", trouble="device", lost_s=0.5)
    run.send(KILL, killed)
    others = [rank for rank in range(6) if rank != killed]
    assert run.exit_codes(*others) == [1] * 5, run.last()
    pid = run.processes[killed].pid
    for rank in others:
        assert run.last()[rank].startswith(f"lost: rank {killed} (process {pid} on "), run.last()
    assert {rank for rank in others if "found True" in run.last()[rank]} == found_by


def test_the_error_of_a_rank_is_reported_to_the_others_before_it_exits(start: Start) -> None:
    run = start(3, trouble="error", rank_in_trouble=2, lost_s=0.3)
    assert run.exit_codes() == [1, 1, 2], run.last()
    assert run.last()[:2] == ["lost: rank 2: DataError: a file is gone, found False"] * 2


@pytest.mark.parametrize("late", ["stopped", "compiler"])
def test_a_rank_that_is_only_late_ends_nothing(start: Start, late: str) -> None:
    """However late: stopped, or in a compiler that lets no other thread run."""
    run = start(3, trouble=late, rank_in_trouble=1, lost_s=0.05)
    if late == "stopped":
        run.send(signal.SIGSTOP, 1)
        time.sleep(10 * run.scene.lost_s)
        run.send(signal.SIGCONT, 1)
    run.wait_for("step 9")
    run.send(TERM)
    assert_stopped(run, "signal SIGTERM")


def test_a_rank_that_has_ended_without_an_error_is_not_lost(start: Start) -> None:
    """The others may have work left, such as rank 0 its last rows."""
    run = start(3, trouble="last rows", lost_s=0.05, close_s=0.2)
    run.send(TERM)
    assert_stopped(run, "signal SIGTERM")


def test_a_disk_that_hangs_does_not_keep_a_process_from_its_end(start: Start) -> None:
    """on_end writes status.json."""
    run = start(1, trouble="dead disk", exit_s=0.2)
    run.send(TERM)
    run.wait_for("saves")
    time.sleep(REPEAT_S)
    run.send(TERM)
    assert run.exit_codes() == [-signal.SIGALRM]
    assert "then signal SIGTERM" in run.last()[0]


def test_nor_does_a_main_thread_that_lets_no_other_run(start: Start) -> None:
    run = start(1, trouble="holds Python's lock", grace_s=1, exit_s=0.2)
    run.send(TERM)
    assert run.exit_codes() == [-signal.SIGALRM]
    assert run.last() == ["saves"]


def test_what_nohup_ignores_stays_ignored_and_close_leaves_all_as_it_was() -> None:
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR1)}
    at_hang_up = signal.signal(HUP, signal.SIG_IGN)
    try:
        shutdown = GracefulShutdown(RunConfig(), print, print)
        shutdown.start(TrainPosition())
        os.kill(os.getpid(), HUP)
        time.sleep(0.1)
        assert not shutdown.should_stop()
        os.kill(os.getpid(), TERM)
        deadline_s = time.monotonic() + LIMIT_S
        while not shutdown.should_stop() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert shutdown.reason == "signal SIGTERM"
        shutdown.end()
        assert signal.getsignal(HUP) == signal.SIG_IGN
        assert {number: signal.getsignal(number) for number in before} == before
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(HUP, at_hang_up)
