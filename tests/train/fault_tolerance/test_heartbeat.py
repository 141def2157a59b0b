"""The reports of thousands of ranks, read from the store in few operations."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance import watchdog
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport
from meshwright.train.fault_tolerance.watchdog import Heartbeats

WORLD = 4096
STOPPED, NEVER_CAME, ENDED = 7, 2048, 4000


class CountedStore(PrefixStore):
    """Counts the operations of this process."""

    operations = 0

    def __getattribute__(self, name: str) -> Any:
        CountedStore.operations += 1
        return super().__getattribute__(name)


def test_the_reports_of_all_ranks_take_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWERS_S", 0.0)
    monkeypatch.setattr(watchdog, "PrefixStore", CountedStore)
    store = HashStore()
    for rank in set(range(1, WORLD)) - {STOPPED, NEVER_CAME, ENDED}:
        report = RankReport(rank, "step", 3, place=f"step.py:{rank} f")
        store.set(f"watchdog/answer/{rank}", json.dumps(asdict(report)))
    for rank, section in ((STOPPED, "step"), (ENDED, "ended")):
        store.set(f"watchdog/heartbeat/{rank}", json.dumps([0.0, asdict(RankReport(rank, section, 2))]))
    link = Heartbeats(store, RankInfo(0, WORLD, 0, 8, True))
    reports = link.gather(RankReport(0, "step", 3), fired=True)
    assert reports is not None
    assert [report.rank for report in reports] == list(range(WORLD))
    assert reports[5].place == "step.py:5 f"
    assert (reports[STOPPED].step, reports[STOPPED].silent_s > 0) == (2, True)
    assert (reports[NEVER_CAME].section, reports[NEVER_CAME].silent_s) == ("set-up", math.inf)
    assert (reports[ENDED].section, reports[ENDED].silent_s) == ("ended", 0)
    assert 0 < CountedStore.operations < 100
