"""The watchdog: a thread that detects when a section of the run takes too long, prints why, and ends the
process.

It uses no collectives, because those are what hangs: the ranks communicate through the store of the
rendezvous. Each rank's thread sends a heartbeat to it every second. The thread whose section exceeds its
timeout requests reports from all ranks; each rank answers, the first that requested prints the diagnosis, and
all processes exit.
"""

import faulthandler
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from meshwright.train.background import BackgroundThread
from meshwright.train.config import TimeoutConfig
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import (
    TRACE_FILE,
    RankReport,
    TimedOut,
    diagnose,
    diagnose_alone,
    find_where,
    keeps_flight_record,
    main_thread_calls,
    write_flight_record,
    write_stacks,
)
from meshwright.train.hooks import Hook, StepDone

ANSWERS_S = 2.5  # each rank checks for a request every second, so a running rank has answered by then
# for the diagnosis of the rank that requested first: 2.5 s for answers, reading 1,000 of them, its files
ANNOUNCED_S = 6.0


class Heartbeats:
    """One rank's connection to the store, which nothing else uses. Every method may block until the store's
    host responds, and raises a RuntimeError of c10d once the connection is lost: call them through a
    `BackgroundThread`."""

    def __init__(self, store: Store, ranks: RankInfo) -> None:
        self._store = PrefixStore("watchdog", store)
        self._rank, self._world_size = ranks.rank, ranks.world_size
        # All ranks leave init_process_group at nearly the same time, so this clock does not depend on the
        # hosts' clocks
        self._joined_s = time.monotonic()
        self.address, self.keeper = _find_address(store), ranks.store_host

    def beat(self, report: RankReport) -> bool:
        """Send a heartbeat; return True if another rank has requested everyone's reports."""
        self._store.set(f"heartbeat/{self._rank}", json.dumps([self._age_s(), asdict(report)]))
        return self._store.check(["asked"])

    def gather(self, report: RankReport, fired: bool) -> list[RankReport] | None:
        """Send this rank's report, and request the others' if a timeout has `fired` on this rank.

        Returns every rank's report on the rank that requested first (the last heartbeat of a rank that does
        not answer), None on all others.
        """
        first = fired and self._store.add("asked", 1) == 1
        self._store.set(f"answer/{self._rank}", json.dumps(asdict(report)))
        self._store.add("answered", 1)
        if not first:
            return None
        deadline_s = time.monotonic() + ANSWERS_S
        while self._store.add("answered", 0) < self._world_size and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return self._read_reports()

    def announce_diagnosis(self) -> None:
        """Announce that the diagnosis is printed, so that the other ranks exit."""
        self._store.set("told", "1")

    def wait_for_diagnosis(self) -> bool:
        """Wait for `announce_diagnosis`, which reaches all ranks at once; False after a few seconds."""
        try:
            self._store.wait(["told"], timedelta(seconds=ANNOUNCED_S))
        except DistStoreError:
            return False
        return True

    def _read_reports(self) -> list[RankReport]:
        """Return every rank's report: its answer, or else its last heartbeat, if it ever sent one."""
        answers = self._get_present("answer", range(self._world_size))
        silent = [rank for rank in range(self._world_size) if rank not in answers]
        beats = self._get_present("heartbeat", silent)
        given = {rank: msgspec.convert(answer, RankReport) for rank, answer in answers.items()}
        given |= {rank: self._report_silent(rank, beats.get(rank)) for rank in silent}
        return [given[rank] for rank in range(self._world_size)]

    def _report_silent(self, rank: int, beat: Any) -> RankReport:
        if beat is None:
            return RankReport(rank, "set-up", silent_s=math.inf)
        age_s, last = beat
        report = msgspec.convert(last, RankReport)
        # A rank that ended normally is not silent
        if report.section == "ended":
            return report
        return replace(report, silent_s=max(0.1, self._age_s() - age_s))

    def _get_present(self, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the entries of this kind by rank. Needs few operations if nearly all ranks have one: each
        is a round trip, and thousands would exceed the time for a diagnosis."""
        present = self._find_present(kind, list(ranks))
        values = self._store.multi_get([f"{kind}/{rank}" for rank in present]) if present else []
        return {rank: json.loads(value) for rank, value in zip(present, values, strict=True)}

    def _find_present(self, kind: str, ranks: list[int]) -> list[int]:
        """Return the ranks with an entry, by bisection."""
        if not ranks or self._store.check([f"{kind}/{rank}" for rank in ranks]):
            return ranks
        if len(ranks) == 1:
            return []
        half = len(ranks) // 2
        return self._find_present(kind, ranks[:half]) + self._find_present(kind, ranks[half:])

    def _age_s(self) -> float:
        return time.monotonic() - self._joined_s


def _find_address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""


Section = Literal["set-up", "data", "first step", "step", "evaluation", "checkpoint"]

HEARTBEAT_S = 1.0  # a rank receives a request within a second
# a thread this late was not run: the process was stopped in the meantime, and that time does not count
OVERSLEPT_S = 5.0
GATHER_S = 3.5  # for all ranks' answers, so that the message comes within 5 s
DIAGNOSIS_S = 7.0  # for the diagnosis of the rank that requested first
FILES_S = 0.5  # for the files with stacks, which a dead network folder may delay, before the message
ON_STUCK_S = 2.0
# from the diagnosis to the exit, the same on all ranks: an earlier exit would cause errors on the others
LINGER_S = 1.0
HARD_END_S = 20.0  # from the timeout to the exit, even if everything else hangs


def timeout_key(section: str) -> str:
    """Return the key of a section in run.timeouts."""
    return f"{section.replace('-', '').replace(' ', '_')}_s"


@dataclass(frozen=True)
class _At:
    """The main thread's section and step, and since when (time.monotonic). Each entry makes a new object."""

    section: str
    step: int
    since_s: float


class Watchdog(Hook):
    """Watches the main thread of this rank from a separate thread, which starts immediately, in section
    set-up.

    `ranks`: from the launcher, because a process group may not exist yet. `on_stuck` is called with the
    message, in a thread, just before the process exits, on each rank that prints one: on one rank, or on
    every rank if they cannot agree because their store is lost.

    A library that holds Python's lock (GIL) in the main thread lets no thread run: such a rank sends no
    heartbeat, and the others report that.
    """

    def __init__(self, timeouts: TimeoutConfig, ranks: RankInfo, on_stuck: Callable[[str], None]) -> None:
        self._timeouts_s = {name: float(getattr(timeouts, timeout_key(name))) for name in get_args(Section)}
        self._ranks, self._on_stuck = ranks, on_stuck
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._folder: Path | None = None
        self._link: Heartbeats | None = None
        self._store_thread = BackgroundThread("watchdog-store")
        self._heartbeat: Future[bool] | None = None
        self._why_alone = "it has not joined the other processes yet"
        self._closing = threading.Event()
        self._warm = False  # the first step, which compiles, is done
        self._at = self._seen = _At("set-up", 0, time.monotonic())
        self._overslept_s = 0.0
        self.source: Callable[[], str] = str  # of a report
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def connect(self) -> None:
        """Send heartbeats from now on, to the default process group's store, over a separate connection."""
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        link = Heartbeats(store, self._ranks)
        link.beat(RankReport(self._rank, self._at.section, self._at.step))
        self._why_alone = ""
        self._link = link

    def report_to(self, folder: Path) -> None:
        """Set the run's folder: the stacks of all ranks are written under folder / "stuck"."""
        self._folder = folder / "stuck"

    def enter(self, section: Section, step: int = 0) -> None:
        """Enter a section or step. Evaluation and checkpoint pass a step too: a lower one is "behind"."""
        self._at = _At(section, step, time.monotonic())

    def restart_clock(self) -> None:
        """The section goes on, and its timeout begins now."""
        self._at = replace(self._at, since_s=time.monotonic())

    def before_step(self, step: int) -> None:
        self.enter("step" if self._warm else "first step", step)

    def after_step(self, done: StepDone) -> None:
        self._warm = True

    def end(self) -> None:
        """Stop the thread and wait for it; last, report to the store that this rank has ended."""
        self._closing.set()
        self._thread.join()
        if (link := self._link) and not self._why_alone:
            ended = RankReport(self._rank, "ended", self._at.step)
            self._store_thread.submit(lambda: link.beat(ended))
        self._store_thread.close(limit_s=ON_STUCK_S)

    def _watch(self) -> None:
        while True:
            pause_s, now_s = max(0.01, min(HEARTBEAT_S, self._left_s())), time.monotonic()
            if self._closing.wait(pause_s):
                return
            late_s = time.monotonic() - now_s - pause_s
            self._notice_section()
            self._overslept_s += late_s if late_s > OVERSLEPT_S else 0.0
            if self._left_s() <= 0:
                section, limits = self._seen.section, self._timeouts_s
                fired = self._section_report(), self._world_size, timeout_key(section), limits[section]
                self._end_process(TimedOut(*fired))
            if self._beat():
                self._end_process(None)

    def _notice_section(self) -> None:
        if self._at is not self._seen:
            self._seen, self._overslept_s = self._at, 0.0

    def _left_s(self) -> float:
        """Return the seconds until the section counts as stuck."""
        self._notice_section()
        timeout_s = self._timeouts_s[self._seen.section]
        return timeout_s - self._in_section_s() if timeout_s else HEARTBEAT_S

    def _in_section_s(self) -> float:
        return time.monotonic() - self._seen.since_s - self._overslept_s

    def _beat(self) -> bool:
        """Send a heartbeat, unless one is in progress; return True if another rank requests reports."""
        link = self._link
        if link is None or self._why_alone:
            return False
        if self._heartbeat is None:
            report = self._section_report()
            self._heartbeat = self._store_thread.submit(lambda: link.beat(report))
        try:
            requested = self._heartbeat.result(min(HEARTBEAT_S / 2, max(0.0, self._left_s())))
            self._heartbeat = None
            return requested
        except TimeoutError:
            return False
        except Exception as error:
            self._why_alone = _store_lost(link, error)
            return False

    def _end_process(self, fired: TimedOut | None) -> None:
        """Print the best diagnosis that is possible, and end the process. `fired`: this rank's own timeout,
        if any.

        Returns if the main thread has moved on in the meantime. Once the other ranks have received a request
        they exit, and it is too late to return.
        """
        # works without the interpreter and its lock
        faulthandler.dump_traceback_later(HARD_END_S, exit=True, file=2)
        report = self._report()
        if fired and self._at is not self._seen:
            faulthandler.cancel_dump_traceback_later()
            return
        files = BackgroundThread("watchdog-files").submit(self._write_files)
        message = self._diagnose(report, fired)
        if message is not None:
            message = f"{message}\n  {_files_message(self._folder, files)}\n"
            os.write(2, message.encode("utf-8", "replace"))  # the stuck thread may hold sys.stderr's lock
            self._announce(message)
        ends_s = time.monotonic() + LINGER_S
        _error_of(files, LINGER_S / 2)
        # last: NCCL, which keeps the flight record, may hang too
        _error_of(BackgroundThread("watchdog-files").submit(self._write_flight_record), LINGER_S / 2)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        os._exit(1)

    def _diagnose(self, report: RankReport, fired: TimedOut | None) -> str | None:
        """Return the message; None if another rank prints it."""
        link = self._link
        if link and not self._why_alone:
            try:
                gathering = self._store_thread.submit(lambda: link.gather(report, fired is not None))
                if (reports := gathering.result(GATHER_S)) and fired:
                    return diagnose(reports, fired)
                if self._store_thread.submit(link.wait_for_diagnosis).result(DIAGNOSIS_S):
                    return None
                self._why_alone = "the rank that requested all reports does not answer"
            except Exception as error:
                self._why_alone = _store_lost(link, error)
        return diagnose_alone(report, self._world_size, fired, self._why_alone)

    def _announce(self, message: str) -> None:
        """Call on_stuck, then let the other ranks exit."""
        error = _error_of(
            BackgroundThread("watchdog-news").submit(lambda: self._on_stuck(message)), ON_STUCK_S
        )
        if error:
            os.write(2, f"  the message could not be recorded ({_in_short(error)})\n".encode())
        if (link := self._link) and not self._why_alone:
            _error_of(self._store_thread.submit(link.announce_diagnosis), ON_STUCK_S)

    def _report(self) -> RankReport:
        return replace(self._section_report(), **vars(find_where(main_thread_calls())))

    def _section_report(self) -> RankReport:
        seen = self._seen
        return RankReport(self._rank, seen.section, seen.step, self._in_section_s(), source=self.source())

    def _write_files(self) -> None:
        if self._folder:
            write_stacks(self._folder, self._rank, self._world_size)

    def _write_flight_record(self) -> None:
        if self._folder and keeps_flight_record():
            write_flight_record(self._folder, self._rank)


def _files_message(folder: Path | None, files: "Future[None]") -> str:
    if folder is None:
        return "no stacks were written: the run has no folder yet"
    error = _error_of(files, FILES_S)
    if error:
        return f"stacks could not be written to {folder} ({_in_short(error)})"
    flights = (
        f"; last collectives: torchfrtrace {folder} --prefix {TRACE_FILE}" if keeps_flight_record() else ""
    )
    return f"all ranks' stacks: {folder}/rank-*.txt{flights}"


def _store_lost(link: Heartbeats, error: BaseException) -> str:
    failure = "does not answer" if isinstance(error, TimeoutError) else f"disconnected ({_in_short(error)})"
    return f"{link.keeper}, which hosts the ranks' store{link.address}, is stopped or dead: it {failure}"


def _error_of(future: "Future[None]", limit_s: float) -> BaseException | None:
    """Return the error of a background call, TimeoutError included; None if it succeeded."""
    try:
        return future.exception(limit_s)
    except TimeoutError as error:
        return error


def _in_short(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
