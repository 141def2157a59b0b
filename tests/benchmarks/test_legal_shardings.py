"""Right shardings raise no false alarm."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.legal.pairs import PAIRS, Loop
from benchmarks.legal_shardings import subject_of
from meshwright.parallel.check.subject import Subject
from tests.support.checks import reports_of

DDP = PAIRS["own Llama, DDP, dp_replicate 2"]


class Steps(Loop):  # without checkpoints; AdamW makes a full step of what is only rounding
    save = load = property()


CHEAP = (DDP, PAIRS["own Llama, matrices frozen, fully_shard, dp_shard 2"], replace(DDP, loop=Steps))


def subjects(folder: Path) -> Iterator[tuple[str, Subject]]:
    yield from ((pair.name, subject_of(pair, folder)) for pair in CHEAP)


@pytest.mark.sampled(4)
def test_right_shardings_are_the_same(tmp_path: Path) -> None:
    reports = reports_of(subjects, tmp_path)
    assert len(reports) == len(CHEAP)
    for report in reports.values():
        assert report.same, str(report)
        assert report.largest < 1e-5
