"""run_ranks: its reports of failures."""

import os
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.support.worlds import RanksError, run_ranks

LINES = 40  # maximum length of a report


def divide() -> None:
    _ = 1 / 0


def crash() -> None:
    os.abort()


def hang() -> None:
    time.sleep(1000)


def fail_on_one(function: Callable[[], None], depth: int = 40) -> None:
    """Fail on rank 1 after `depth` calls of itself: a report must show the innermost frames of a stack."""
    if depth:
        return fail_on_one(function, depth - 1)
    if dist.get_rank() == 1:
        function()
    return dist.barrier()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "first", "innermost"),
    [
        (divide, "rank 1 failed:", "in divide\n    _ = 1 / 0\n"),
        (crash, "rank 1 ended with -6:\nFatal Python error: Aborted\n", " in crash\n"),
        (hang, "no rank failed, but after ", " in hang\n"),
    ],
)
def test_a_failure_names_the_rank_its_line_and_where_the_others_were(
    function: Callable[[], None], first: str, innermost: str
) -> None:
    # on a busy machine the ranks may not have connected within the first limit
    for limit_s in (3, 15, 60) if function is hang else (60,):
        with pytest.raises(RanksError) as caught:
            run_ranks(3, fail_on_one, function, limit_s=limit_s)
        if innermost in (report := str(caught.value)):
            break
    assert report.startswith(first)
    assert innermost in report
    assert " in fail_on_one" in report
    assert len(report.splitlines()) < LINES
    if function is not crash:  # then gloo fails on the other ranks too
        assert "rank 0, 2 was in" in report
        assert "barrier" in report
