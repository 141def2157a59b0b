"""`metrics.gradient_norms`: correct with every kind of sharding, and free when it is off."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.parallel.fsdp import full_tensor
from meshwright.train.metrics.collector import GradientNorms
from meshwright.train.step import StepResult
from tests.support.launch import EAGER, TINY
from tests.support.sharded import Sharded, build_sharded, random_batches, sharded_alone
from tests.support.worlds import run_ranks
from tests.train.test_step import Count

BFLOAT16 = [
    "--parallel.storage_dtype=bfloat16",
    "--parallel.param_dtype=bfloat16",
    "--optim.state_dtype=bfloat16",
]
FROZEN = "--train.freeze=[layers.0.*]"
PLANS = {
    2: [["--parallel.tp=2", "--parallel.sequence_parallel=false", FROZEN, *BFLOAT16]],
    4: [
        ["--parallel.dp_replicate=2", "--parallel.dp_shard=2"],
        ["--parallel.dp_shard=2", "--parallel.tp=2", "--model.tie_embeddings=true"],
    ],
}


def step_of(run: Sharded, before_optimizer: Callable[[], None] = lambda: None) -> StepResult:
    return run.training.step(random_batches(run), before_optimizer)


def take_steps(plans: list[list[str]]) -> list[dict[str, Any]]:
    return [take_step(keys) for keys in plans]


def take_step(keys: list[str]) -> dict[str, Any]:
    """The gradient norm of the step; and by unit the measured norms and those of the full gradients."""
    run = build_sharded([*TINY, "--model.n_kv_heads=4", *EAGER, *keys])
    expected: dict[str, float] = {}

    def gather(*_: Any) -> None:
        for unit in run.plan.units:
            modules = [run.model.get_submodule(name) for name in unit.modules]
            parameters = dict.fromkeys(p for module in modules for p in module.parameters())
            grads = [p.grad for p in parameters if p.grad is not None]
            full = [full_tensor(grad) for grad in grads]
            if full:
                expected[unit.name] = torch.cat([grad.double().flatten() for grad in full]).norm().item()

    run.optimizer.register_step_pre_hook(gather)
    norms = GradientNorms(run.sharded, lambda step: step == 1)
    grad_norm = step_of(run, partial(norms.before_optimizer, 1)).grad_norm.item()
    return {
        "grad_norm": grad_norm,
        "measured": norms.take(),
        "expected": expected,
        "second": norms.take(),
    }


@pytest.mark.sampled(3, day=1)
@pytest.mark.parametrize("processes", PLANS)
def test_the_norms_of_units_are_those_of_the_whole_gradients_on_all_ranks_and_add_up(processes: int) -> None:
    plans = PLANS[processes]
    ranks = run_ranks(processes, take_steps, plans)
    for keys, results in zip(plans, zip(*ranks, strict=True), strict=True):
        result = results[0]
        assert result["measured"] == pytest.approx(result["expected"], rel=1e-5), keys
        assert all(other["measured"] == result["measured"] for other in results), keys
        assert math.hypot(*result["measured"].values()) == pytest.approx(result["grad_norm"], rel=1e-6), keys
        assert result["second"] == {}, "take() returns the norms of a step once"
        assert ("layers.0" in result["measured"]) is (FROZEN not in keys)


def operations_of(run: Sharded, step: int) -> int:
    """Number of operators that a step runs, including collectives, of which every second is reported."""
    norms = GradientNorms(run.sharded, lambda step: step % 2 == 0)
    with Count("aten.", "c10d.") as counted:
        step_of(run, partial(norms.before_optimizer, step))
    return counted.count


def test_it_adds_operations_only_to_steps_that_are_reported() -> None:
    with sharded_alone([*TINY, *EAGER]) as run:
        step_of(run)  # FSDP initializes itself
        with Count("aten.", "c10d.") as usual:
            step_of(run)
        assert [operations_of(run, step) > usual.count for step in (1, 2, 3)] == [False, True, False]
