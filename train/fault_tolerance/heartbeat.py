"""What the ranks' watchdogs tell each other, through the store that their processes met at."""

import json
import math
import time
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport, TimedOut

ANSWERS_S = 2.5  # ranks ask themselves every second whether they are asked; who runs has answered by then
# for the diagnosis of the rank that asked first: its 2.5 s for answers, the reading of 1,000, its files
TOLD_S = 6.0


class Heartbeats:
    """One rank's end. Every method may block for as long as the store's host does not answer, and raises a
    class of c10d's own (a RuntimeError) once the connection is lost: call them through a `BackgroundThread`.

    Args:
        store: a connection that nobody else uses
        ranks: this process among the others
    """

    def __init__(self, store: Store, ranks: RankInfo) -> None:
        self._store = PrefixStore("watchdog", store)
        self._rank, self._world_size = ranks.rank, ranks.world_size
        # All ranks leave init_process_group at nearly the same time: a clock for them all, which needs no
        # host's clock
        self._joined_s = time.monotonic()
        self.address, self.keeper = _find_address(store), ranks.store_keeper

    def beat(self, report: RankReport) -> bool:
        """Leave a heartbeat; True if another rank asks for everybody's stacks."""
        self._store.set(f"heartbeat/{self._rank}", json.dumps([self._age_s(), asdict(report)]))
        return self._store.check(["asked"])

    def gather(self, report: RankReport, fired: TimedOut | None) -> list[RankReport] | None:
        """Answer with this rank's report, and ask for the others' if a time-out has `fired` here.

        Returns every rank's report to the first that asked (what is known of a rank that does not answer is
        its last heartbeat), None to all others.
        """
        first = fired is not None and self._store.add("asked", 1) == 1
        if first:
            self._store.set("fired", json.dumps(asdict(fired)))  # type: ignore[arg-type]
        self._store.set(f"answer/{self._rank}", json.dumps(asdict(report)))
        self._store.add("answered", 1)
        if not first:
            return None
        deadline_s = time.monotonic() + ANSWERS_S
        while self._store.add("answered", 0) < self._world_size and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return [self._read(rank) for rank in range(self._world_size)]

    def tell(self) -> None:
        """The diagnosis is printed: let the others end."""
        self._store.set("told", "1")

    def wait_until_told(self) -> bool:
        """Wait for `tell`, a few seconds; False if it does not come. All ranks hear it at the same moment."""
        try:
            self._store.wait(["told"], timedelta(seconds=TOLD_S))
        except DistStoreError:
            return False
        return True

    def _read(self, rank: int) -> RankReport:
        if self._store.check([f"answer/{rank}"]):
            return _report(json.loads(self._store.get(f"answer/{rank}")))
        if not self._store.check([f"heartbeat/{rank}"]):
            return RankReport(rank, "set-up", silent_s=math.inf)
        age_s, last = json.loads(self._store.get(f"heartbeat/{rank}"))
        report = _report(last)
        # A rank that ended on purpose is not missing
        return (
            report if report.section == "ended" else replace(report, silent_s=max(0.1, self._age_s() - age_s))
        )

    def _age_s(self) -> float:
        return time.monotonic() - self._joined_s


def _report(saved: dict[str, Any]) -> RankReport:
    """A report as it was before JSON made lists of its tuples."""
    collectives = tuple((name, number) for name, number in saved["collectives"])
    return RankReport(**{**saved, "path": tuple(saved["path"]), "collectives": collectives})


def _find_address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
