"""`metrics.gradient_norms`: correct with every kind of sharding, and free when it is off."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.train.config import MetricsConfig
from meshwright.train.metrics.collector import GradientNorms, Metrics, Throughput
from meshwright.train.metrics.tensorboard import RunSummary
from meshwright.train.model.llama import loss_of_llama
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import Sharded, build_sharded, random_batches, sharded_alone
from tests.support.worlds import run_ranks
from tests.train.test_step import Count

BFLOAT16 = [
    "--parallel.storage_dtype=bfloat16",
    "--parallel.param_dtype=bfloat16",
    "--optim.state_dtype=bfloat16",
]
PLANS = {
    2: [
        [],
        ["--parallel.dp_replicate=2", "--parallel.dp_shard=1", *BFLOAT16],
        ["--parallel.tp=2", "--parallel.sequence_parallel=false", "--train.freeze=[layers.0.*]", *BFLOAT16],
    ],
    4: [
        ["--parallel.dp_replicate=2", "--parallel.dp_shard=2"],
        ["--parallel.dp_shard=2", "--parallel.tp=2", "--model.tie_embeddings=true"],
    ],
}


def take_step(keys: list[str]) -> dict[str, Any]:
    """The gradient norm of the step; and by unit the measured norms and those of the full gradients."""
    run = build_sharded([*TINY, "--model.n_kv_heads=4", *EAGER, *keys])
    expected: dict[str, float] = {}

    def gather(*_: Any) -> None:
        for unit in run.plan.units:
            modules = [run.model.get_submodule(name) for name in unit.modules]
            trained = dict.fromkeys(
                p for module in modules for p in module.parameters() if p.grad is not None
            )
            full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in trained]
            if full:
                expected[unit.name] = torch.cat([grad.double().flatten() for grad in full]).norm().item()

    run.optimizer.register_step_pre_hook(gather)
    norms = GradientNorms(run.model, run.plan, run.optimizer)
    norms.request(True)
    result = train_step(
        run.model, run.plan.units, run.optimizer, random_batches(run), 0.01, run.group, loss_of_llama
    )
    measured = norms.take()
    return {
        "grad_norm": result.grad_norm.item(),
        "measured": measured,
        "expected": expected,
        "second": norms.take(),
    }


def take_steps(plans: list[list[str]]) -> list[dict[str, Any]]:
    return [take_step(keys) for keys in plans]


@pytest.mark.parametrize("processes", PLANS)
def test_the_norms_of_units_are_those_of_the_whole_gradients_on_all_ranks_and_add_up(processes: int) -> None:
    plans = PLANS[processes]
    results = run_ranks(processes, take_steps, plans)
    for number, keys in enumerate(plans):
        result = results[0][number]
        assert result["measured"] == pytest.approx(result["expected"], rel=1e-5), keys
        assert all(rank[number]["measured"] == result["measured"] for rank in results), keys
        assert math.hypot(*result["measured"].values()) == pytest.approx(result["grad_norm"], rel=1e-6), keys
        assert result["second"] == {}, "take() returns the norms of a step once"
        assert ("layers.0" in result["measured"]) is (not any("freeze" in key for key in keys))


@pytest.fixture
def trainer() -> Iterator[Sharded]:
    with sharded_alone([*TINY, *EAGER]) as run:
        yield run


def operations_of(trainer: Sharded, metrics: Metrics, reported: bool) -> int:
    """Number of operators that a step runs, including collectives."""
    batches = random_batches(trainer)
    metrics.before_step(reported)
    with Count("aten.", "c10d.") as counted:
        train_step(
            trainer.model, trainer.plan.units, trainer.optimizer, batches, 1.0, trainer.group, loss_of_llama
        )
    return counted.count


def test_off_it_adds_no_operation_to_any_step_and_on_only_to_those_that_are_reported(
    trainer: Sharded, tmp_path: Path
) -> None:
    throughput = Throughput(
        tokens_per_step=1, flops_per_token=1.0, flops_per_token_causal=1.0, world_size=1, peak_flops=None
    )

    def opened(on: bool) -> Metrics:
        config = MetricsConfig(tensorboard=False, gradient_norms=on)
        metrics = Metrics(config, throughput, tmp_path, torch.device("cpu"), False, {}, RunSummary(), print)
        metrics.watch_gradients(trainer.model, trainer.plan, trainer.optimizer)
        return metrics

    off = opened(False)
    assert not trainer.optimizer._optimizer_step_pre_hooks, "without norms no hook is registered"
    operations_of(trainer, off, False)  # FSDP initializes itself
    usual = operations_of(trainer, off, False)
    assert operations_of(trainer, off, True) == usual
    on = opened(True)
    assert operations_of(trainer, on, False) == usual
    assert operations_of(trainer, on, True) > usual
    assert operations_of(trainer, on, False) == usual
