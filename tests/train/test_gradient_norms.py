"""`metrics.gradient_norms`: right under every way of sharding, and free where it is off."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallel.mesh import build_mesh, data_parallel_group
from tests.support.launch import EAGER, TINY
from tests.support.worlds import run_ranks
from tests.train.test_step import Count, make_batches
from train.build import build_model
from train.config import parse_config
from train.gradient_norms import GradientNorms
from train.metrics import Metrics, MetricsConfig, Throughput
from train.optim import build_optimizer
from train.place import Place
from train.planning import plan_run
from train.runtime import start_process
from train.step import train_step

BFLOAT16 = ["--parallel.storage_dtype=bfloat16", "--parallel.param_dtype=bfloat16", "--optim.state_dtype=bfloat16"]
PLANS = {
    2: [[], ["--parallel.dp_replicate=2", "--parallel.dp_shard=1", *BFLOAT16],
        ["--parallel.tp=2", "--parallel.sequence_parallel=false", "--train.freeze=[layers.0.*]", *BFLOAT16]],
    4: [["--parallel.dp_replicate=2", "--parallel.dp_shard=2"],
        ["--parallel.dp_shard=2", "--parallel.tp=2", "--model.tie_embeddings=true"]],
}  # fmt: skip


def take_step(keys: list[str]) -> dict[str, Any]:
    """The norm that the step found; by unit those that were taken and those of the whole gradients."""
    config = parse_config([*TINY, "--model.n_kv_heads=4", *EAGER, *keys])
    plan = plan_run(config, dist.get_world_size())
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim, config.run.seed)
    expected: dict[str, float] = {}

    def gather(*_: Any) -> None:
        for unit in plan.units:
            held = dict.fromkeys(p for name in unit.modules for p in model.get_submodule(name).parameters() if p.grad is not None)
            whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in held]
            if whole:
                expected[unit.name] = torch.cat([grad.double().flatten() for grad in whole]).norm().item()

    optimizer.register_step_pre_hook(gather)
    norms = GradientNorms(model, plan, optimizer)
    norms.want(True)
    torch.manual_seed(mesh.get_rank() // plan.mesh.tp)  # ranks of one tp group see the same data
    result = train_step(model, optimizer, make_batches(2), 0.01, data_parallel_group(mesh))
    found = norms.take()
    return {"grad_norm": result.grad_norm.item(), "found": found, "expected": expected, "then": norms.take()}


def take_steps(plans: list[list[str]]) -> list[dict[str, Any]]:
    return [take_step(keys) for keys in plans]


@pytest.mark.parametrize("processes", PLANS)
def test_the_norms_of_units_are_those_of_the_whole_gradients_on_all_ranks_and_add_up(processes: int) -> None:
    plans = PLANS[processes]
    results = run_ranks(processes, take_steps, plans)
    for number, keys in enumerate(plans):
        result = results[0][number]
        assert result["found"] == pytest.approx(result["expected"], rel=1e-5), keys
        assert all(other[number]["found"] == result["found"] for other in results), keys
        assert math.hypot(*result["found"].values()) == pytest.approx(result["grad_norm"], rel=1e-6), keys
        assert result["then"] == {}, "they are told once"
        assert ("layers.0" in result["found"]) is (not any("freeze" in key for key in keys))


@pytest.fixture
def trainer():
    config = parse_config([*TINY, *EAGER])
    start_process(config.run, Place(0, 1, 0, 1, False), torch.device("cpu"))
    plan = plan_run(config, 1)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    yield model, plan, build_optimizer(model, config.optim), data_parallel_group(mesh)
    dist.destroy_process_group()


def operations_of(trainer: Any, metrics: Metrics, reported: bool) -> int:
    """How many operators a step runs, collectives among them."""
    model, _, optimizer, group = trainer
    metrics.before_step(reported)
    with Count("aten.", "c10d.") as counted:
        train_step(model, optimizer, make_batches(1), 1.0, group)
    return counted.count


def test_off_it_adds_no_operation_to_any_step_and_on_only_to_those_that_are_reported(trainer, tmp_path: Path) -> None:
    model, plan, optimizer, _ = trainer
    throughput = Throughput(tokens_per_step=1, flops_per_token=1.0, flops_per_token_causal=1.0, world_size=1, peak_flops=None)

    def opened(on: bool) -> Metrics:
        config = MetricsConfig(tensorboard=False, gradient_norms=on)
        metrics = Metrics(config, throughput, tmp_path, torch.device("cpu"), False, {})
        metrics.watch_gradients(model, plan, optimizer)
        return metrics

    off = opened(False)
    assert not optimizer._optimizer_step_pre_hooks, "off, not even a function is called"
    operations_of(trainer, off, False)  # FSDP sets itself up
    usual = operations_of(trainer, off, False)
    assert operations_of(trainer, off, True) == usual
    on = opened(True)
    assert operations_of(trainer, on, False) == usual
    assert operations_of(trainer, on, True) > usual
    assert operations_of(trainer, on, False) == usual
