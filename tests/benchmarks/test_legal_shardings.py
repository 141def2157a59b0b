"""Right shardings raise no false alarm."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.legal.pairs import PAIRS, Loop
from benchmarks.legal_shardings import judged, records, subject_of
from meshwright.parallel.check.report import CheckReport
from tests.support.worlds import run_ranks

DDP = PAIRS["own Llama, DDP, dp_replicate 2"]


class Steps(Loop):  # without checkpoints; AdamW makes a full step of what is only rounding
    save = load = property()


CHEAP = (DDP, PAIRS["own Llama, matrices frozen, fully_shard, dp_shard 2"], replace(DDP, loop=Steps))


def record(folder: Path) -> None:
    found = [records(subject_of(pair, folder)) for pair in CHEAP]
    if dist.get_rank() == 0:
        torch.save(found, folder / "ranks.pt")


def judge(folder: Path) -> list[CheckReport]:
    found = torch.load(folder / "ranks.pt", weights_only=False)
    return [judged(subject_of(pair, folder), ranks) for pair, ranks in zip(CHEAP, found, strict=True)]


@pytest.mark.sampled(4)
def test_right_shardings_are_the_same(tmp_path: Path) -> None:
    run_ranks(2, record, tmp_path)
    for report in run_ranks(1, judge, tmp_path)[0]:
        assert report.same, str(report)
        assert report.largest < 1e-5
