"""Right shardings raise no false alarm."""

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.legal.pairs import PAIRS
from benchmarks.legal_shardings import judged, records, subject_of
from meshwright.parallel.check.report import CheckReport
from tests.support.worlds import run_ranks

# plain parameters; a gradient that is a partial sum; rounding that AdamW makes a step of
NAMES = ("DDP, dp_replicate 2", "parallelize_module, tokens split, tp 2", "fully_shard, loop, dp_shard 2")
CHEAP = [PAIRS[f"own Llama, {name}"] for name in NAMES]


def record(folder: Path) -> None:
    found = [records(subject_of(pair, folder)) for pair in CHEAP]
    if dist.get_rank() == 0:
        torch.save(found, folder / "ranks.pt")


def judge(folder: Path) -> list[CheckReport]:
    found = torch.load(folder / "ranks.pt", weights_only=False)
    return [judged(subject_of(pair, folder), ranks) for pair, ranks in zip(CHEAP, found, strict=True)]


def test_right_shardings_are_the_same(tmp_path: Path) -> None:
    run_ranks(2, record, tmp_path)
    for report in run_ranks(1, judge, tmp_path)[0]:
        assert report.same, str(report)
        assert report.largest < 1e-5
