"""Whether a plan fits is one question: the search, a manual plan, a sweep and a run answer it alike."""

import dataclasses
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel import machine_memory
from meshwright.parallel.errors import PlanError
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Machines, load_hardware
from meshwright.parallel.planner.memory_model import host_memory
from meshwright.tools.plan.report import Goal
from meshwright.tools.plan.scaling import sweep
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning import fit, run_plan
from meshwright.train.planning.fit import check_fits
from meshwright.train.planning.predict import run_workload, search_plans
from meshwright.train.planning.resolve import best_attention, best_dtype, plan_run
from tests.support.control_groups import write_groups
from tests.support.launch import EAGER, TINY
from tests.support.worlds import run_ranks

H100 = load_hardware()["h100-sxm"]
CLOSED = [
    *("--train.micro_batch_size=2", "--parallel.tp=1", "--parallel.reshard_after_forward=true"),
    *("--parallel.forward_prefetch=1", "--parallel.backward_prefetch=1"),
    *("--parallel.reduce_gradients=every_micro_batch", "--parallel.reshard_after_backward=true"),
]
# what needs host memory, by the key that a message names
WAYS = {
    "checkpoint.every": ["--checkpoint.every=5"],
    "parallel.cpu_offload=true": ["--parallel.cpu_offload=true"],
    "parallel.activation_checkpoint=offload": [
        "--parallel.activation_checkpoint=offload",
        "--parallel.activation_checkpoint_blocks=2",
    ],
}


def draw(draws: random.Random) -> tuple[TrainingJob, list[str]]:
    """A job that needs host memory, and the keys that need it."""
    named = draws.sample(list(WAYS), draws.randint(1, 3))
    keys = [f"--parallel.dp_replicate={draws.choice([1, 2])}", "--parallel.activation_checkpoint=none"]
    keys += [key for name in named for key in WAYS[name]]
    print(keys)
    if "parallel.cpu_offload=true" in named and "checkpoint.every" in named:
        named.remove("checkpoint.every")  # training waits for saves instead
    return parse_config([*TINY, *EAGER, *CLOSED, *keys]).job, named


def run_in_groups(job: TrainingJob, plan: Plan, roots: list[list[Path]]) -> list[str]:
    """The refusals of runs whose ranks are each in a control group, before anything is built; "" if none."""
    rank, refusals = dist.get_rank(), []
    planned = run_plan.RunPlan(torch.device("cuda"), "NVIDIA H100 80GB HBM3", plan)
    for groups in roots:
        with (
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(80 * GIB, 80 * GIB)),
            mock.patch.object(torch.cuda, "memory_reserved", return_value=0),
            mock.patch.object(machine_memory, "free_host_bytes", partial(free_host_bytes, groups[rank])),
            mock.patch.object(fit, "suggest_fits", return_value=[]),
        ):
            ranks = RankInfo(rank, 2, rank, 2, True)
            refusals.append(answer(run_plan.check_memory, job, planned, ranks))
    return refusals


def answer(question: Callable[..., object], *arguments: object) -> str:
    try:
        question(*arguments)
    except PlanError as error:
        return str(error)
    return ""


def test_all_refuse_what_the_host_does_not_hold_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "suggest_fits", lambda *_: [])  # test_fit.py has them
    job, named = draw(random.Random(os.environ["MESHWRIGHT_TESTS_SEED"]))
    auto = dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, plan="auto"))
    plan = plan_run(job, 2, 2, best_attention(job, H100), best_dtype(H100))
    needs = host_memory(plan, run_workload(job, plan)).total
    limits = [(2 * needs, 2 * needs), (2 * needs, 2 * needs - 1)]  # of the machines of two ranks
    roots = [
        [
            write_groups(tmp_path / f"{limit}-{rank}", {}, {"memory.max": limit})
            for rank, limit in enumerate(two)
        ]
        for two in limits
    ]
    of_ranks = run_ranks(2, run_in_groups, job, plan, roots)
    for missing in (0, 1):
        devices = Machines(2, 2, 80 * GIB, H100, needs - missing)
        hardware = dataclasses.replace(H100, host_memory_gib=(needs - missing) / GIB)
        answers = {
            "manual plan": answer(check_fits, job, plan, devices, "H100"),
            "search": answer(search_plans, auto, devices),
            "sweep": answer(sweep, job, [2], 2, hardware, Goal()),
            "sweep of the search": answer(sweep, auto, [2], 2, hardware, Goal()),
            **{f"rank {rank}": refusals[missing] for rank, refusals in enumerate(of_ranks)},
        }
        assert {who for who, refusal in answers.items() if refusal} == (set(answers) if missing else set())
        for refusal in answers.values() if missing else ():
            assert [key for key in ("host memory", *named) if key not in refusal] == []
