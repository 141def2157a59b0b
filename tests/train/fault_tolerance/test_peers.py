"""What a rank that ends by itself reports to the others, on real ranks."""

import torch.distributed as dist

from meshwright.train.config import RunConfig
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.supervision import UNNAMED, supervised
from tests.support.worlds import run_ranks

MANY_S = 60


def reported(error: Exception) -> str:
    """Rank 1 ends with the error; return what is reported to this rank, and on rank 1 the error's type."""
    ranks = RankInfo(dist.get_rank(), 3, dist.get_rank(), 3, True)
    try:
        with supervised(RunConfig(), ranks, Console(False), named=False) as supervision:
            supervision.connect()
            if ranks.rank == 1:
                raise error
            lost = supervision._shutdown.lost_peer(MANY_S)
            assert lost
            raise KeyboardInterrupt  # not `leave`, which would wait for rank 1
    except (Exception, KeyboardInterrupt) as ended:
        return lost.text if ranks.rank != 1 else type(ended).__name__


def test_a_rank_that_has_lost_another_and_has_no_report_of_it_is_not_reported_as_killed() -> None:
    """Its collective may fail before the report comes, such as one that has to pass a stopped rank."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert run_ranks(3, reported, lost) == [f"rank 1: {UNNAMED}", "RuntimeError", f"rank 1: {UNNAMED}"]
