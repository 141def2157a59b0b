"""Collectives and seconds of an optimizer step on gloo ranks: AdamW, our Muon with AdamW for the rest, and
torch's Muon on DTensors without it, in float32. They take turns in the same processes."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.support.forked_ranks import run_forked
from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from meshwright.parallel.mesh import build_mesh
from meshwright.train.config_parser import parse_config
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.resolve import plan_run
from meshwright.train.training import build_training, groups_of

RANKS = 4
MESHES = {
    "FSDP 4": (),
    "FSDP 2 x TP 2": ("--parallel.tp=2",),
    "TP 4": ("--parallel.tp=4",),
    "HSDP 2 x 2": ("--parallel.dp_replicate=2",),
}
FIXED = (
    "--config=llama_debug",
    "--optim.name=muon",
    "--parallel.param_dtype=float32",
    "--train.micro_batch_size=1",
)


def compare(arguments: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Return of each optimizer the collectives of a step and its seconds, the median. Every rank calls it."""
    config = parse_config([*FIXED, *arguments])
    plan = plan_run(config.job, RANKS)
    training = build_training(config, plan, build_mesh(plan.mesh, "cpu"))
    model = training.sharded.model
    named = dict(model.named_parameters())
    for p in named.values():
        p.grad = torch.randn_like(p)
    matrices = [
        name for group in groups_of(config.model, config.optim) if group.by == "muon" for name in group.kinds
    ]
    adamw = build_optimizer(model, parse_config([*FIXED, *arguments, "--optim.name=adamw"]).optim)
    torchs = torch.optim.Muon([named[name] for name in matrices], lr=1e-3)

    def of_torch() -> None:
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):
            torchs.step()

    steps: dict[str, Callable[[], Any]] = {
        "adamw": adamw.step,
        "muon": training.optimizer.step,
        "torch.optim.Muon": of_torch,
    }
    found = {name: {"collectives": float(_count(step))} for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: figures | {"seconds": statistics.median(seconds[name])} for name, figures in found.items()}


def _count(step: Callable[[], Any]) -> int:
    """Return how many collectives a step calls. The first one is also its warm-up."""
    with CommDebugMode() as counter:
        step()
    return counter.get_total_counts()


def measure_all(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure every mesh."""
    rows = {
        name: run_forked(RANKS, compare, (*keys, *overrides), options.repeats)
        for name, keys in MESHES.items()
    }
    lines = ["| mesh | optimizer | collectives | seconds | of torch's |", "|---|---|---|---|---|"]
    for mesh, found in rows.items():
        whole = found["torch.optim.Muon"]["seconds"]
        for name, row in found.items():
            shown = f"{row['collectives']:.0f} | {row['seconds']:.3f} | {row['seconds'] / whole:.0%}"
            lines.append(f"| {mesh} | {name} | {shown} |")
    return BenchResult(None, {"meshes": rows}, "\n".join(lines))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="steps of each optimizer that are timed")


MEASUREMENT = Measurement("optimizers", add_options, measure_all, description=str(__doc__))

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
