"""Communication between the ranks' watchdogs, through the store of the rendezvous."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport

ANSWERS_S = 2.5  # each rank checks for a request every second, so a running rank has answered by then
# for the diagnosis of the rank that requested first: 2.5 s for answers, reading 1,000 of them, its files
DIAGNOSIS_S = 6.0


class Heartbeats:
    """One rank's connection to the store. Every method may block until the store's host responds, and raises
    a RuntimeError of c10d once the connection is lost: call them through a `BackgroundThread`.

    Args:
        store: a connection that is used by this object only
        ranks: this process's rank and the world size
    """

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
            self._store.wait(["told"], timedelta(seconds=DIAGNOSIS_S))
        except DistStoreError:
            return False
        return True

    def _read_reports(self) -> list[RankReport]:
        """Return every rank's report: its answer, or else its last heartbeat, if it ever sent one."""
        answers = self._get_present("answer", range(self._world_size))
        silent = [rank for rank in range(self._world_size) if rank not in answers]
        beats = self._get_present("heartbeat", silent)
        return [
            msgspec.convert(answers[rank], RankReport)
            if rank in answers
            else self._report_silent(rank, beats.get(rank))
            for rank in range(self._world_size)
        ]

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
