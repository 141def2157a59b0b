"""The memory check at the start of a run: one rank runs the prediction for all."""

from unittest import mock

import torch
import torch.distributed as dist

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import PlanError
from meshwright.train.planning import predict, suggest
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.run_plan import RunPlan, check_memory
from tests.support.launch import EAGER, TINY
from tests.support.worlds import run_ranks


def check(free_bytes: list[int]) -> tuple[str, int, int]:
    """The error message, the needed bytes, and the number of predictions of a rank that has so much free on a
    GPU of 8 GiB, of which other programs use the rest."""
    rank, job = dist.get_rank(), parse_config([*TINY, *EAGER]).job
    planned = RunPlan(torch.device("cuda"), "GPU", plan_run(job, 2))
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(free_bytes[rank], 8 * GIB)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=0),
        mock.patch.object(suggest, "suggest_fits", return_value=[]),  # test_resolve.py has them
        mock.patch.object(suggest, "predict_memory", wraps=predict.predict_memory) as predictions,
    ):
        try:
            message, peak_bytes = "", check_memory(job, planned, RankInfo(rank, 2, rank, 2, True)).peak_bytes
        except PlanError as error:
            message, peak_bytes = str(error), 0
    return message, peak_bytes, predictions.call_count


def check_each(available: list[list[int]]) -> list[tuple[str, int, int]]:
    return [check(free_bytes) for free_bytes in available]


def test_the_rank_with_least_memory_decides_for_all_and_one_rank_predicts() -> None:
    available = [[8 * GIB, 8 * GIB], [2**14, 8 * GIB], [8 * GIB, 2**14]]
    enough, *too_little = zip(*run_ranks(2, check_each, available), strict=True)
    for rank0, rank1 in too_little:
        assert rank0[0] == rank1[0]
        assert "GPU (8.0 GiB, 8.0 in use before this run allocates) has 0.0 GiB for each" in rank0[0]
    assert enough[0][:2] == enough[1][:2]
    assert enough[0][1] > 0
    assert [rank[2] for rank in enough] == [1, 0]
