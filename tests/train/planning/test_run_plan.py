"""The memory check at the start of a run: a bound where memory is ample, else one rank predicts for all."""

from unittest import mock

import torch
import torch.distributed as dist

from meshwright.parallel import machine_memory
from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import PlanError
from meshwright.train.planning import fit, predict
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.run_plan import RunPlan, check_memory
from tests.support.launch import EAGER, TINY
from tests.support.worlds import run_ranks


def check(free_bytes: list[int]) -> tuple[str, RunPlan | None, int]:
    """The error message, the checked plan, and the number of predictions of a rank that has so much free on a
    GPU of 8 GiB, of which other programs use the rest."""
    rank, job = dist.get_rank(), parse_config([*TINY, *EAGER]).job
    planned, checked = RunPlan(torch.device("cuda"), "GPU", plan_run(job, 2)), None
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(free_bytes[rank], 8 * GIB)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=0),
        mock.patch.object(machine_memory, "free_host_bytes", return_value=16 * GIB),
        mock.patch.object(fit, "suggest_fits", return_value=[]),  # test_fit.py has them
        mock.patch.object(fit, "predict_needs", wraps=predict.predict_needs) as predictions,
    ):
        try:
            message, checked = "", check_memory(job, planned, RankInfo(rank, 2, rank, 2, True))
        except PlanError as error:
            message = str(error)
    return message, checked, predictions.call_count


def check_each(available: list[list[int]]) -> list[tuple[str, RunPlan | None, int]]:
    return [check(free_bytes) for free_bytes in available]


def test_the_rank_with_least_memory_decides_for_all_and_at_most_one_rank_predicts() -> None:
    available = [[8 * GIB, 8 * GIB], [8 * GIB, GIB], [2**14, 8 * GIB], [8 * GIB, 2**14]]
    ample, enough, *too_little = zip(*run_ranks(2, check_each, available), strict=True)
    for rank0, rank1 in too_little:
        assert rank0[0] == rank1[0]
        assert "GPU (8.0 GiB, 8.0 in use before this run allocates) has 0.0 GiB for each" in rank0[0]
    predicted = [rank[1].peak_bytes for rank in enough]
    bound = [rank[1].peak_bytes for rank in ample]
    assert 0 < predicted[0] == predicted[1] < bound[0] == bound[1] < GIB
    assert [rank[1].bounded for rank in (*ample, *enough)] == [True, True, False, False]
    assert [rank[2] for rank in (*ample, *enough)] == [0, 0, 1, 0]
