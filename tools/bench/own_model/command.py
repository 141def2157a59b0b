"""`tools.bench own_model`: the matrix of models and plans, and transformers' Llama under a plan against the
same model sharded by hand."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.model.check import compare
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.materialize import load_weights
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.tools.bench.harness import BenchResult, Measurement, run_workers
from meshwright.tools.bench.own_model.models import MODELS, PLANS, hf_llama, on_meta, plans_of
from meshwright.tools.cli import format_table, positive
from meshwright.train.memory import peak_resident_bytes

RANKS = 2
ROWS, TOKENS, STEPS, WARM_UP_STEPS = 4, 256, 14, 4
SIZES = {  # of the Llama that is timed: 27M parameters
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 4096,
    "max_position_embeddings": TOKENS,
}
LEAST_SPEED, MOST_MEMORY = 0.98, 1.02  # targets


def add_own_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `own_model`."""
    text = "time transformers' Llama under a plan against fully_shard by hand instead: N pairs of runs"
    parser.add_argument("--pairs", type=positive, metavar="N", help=text)


def measure_own_model(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Compare all models under all plans, or time pairs. Raises BenchError if a process fails."""
    return time_pairs(options.pairs) if options.pairs else compare_all()


def compare_all() -> BenchResult:
    """Compare every model under every plan with the same model on one process."""
    rows = []
    for name in MODELS:
        for processes in sorted({count for count, _ in PLANS.values()}):
            if plans := plans_of(name, processes):
                found = run_workers("own_model", processes, 1, "cpu", {"name": name, "plans": plans})[0]
                rows += [{"model": name, "plan": plan, **result} for plan, result in found.items()]
    cells = [
        (
            row["model"],
            row["plan"],
            str(row["compared"]),
            f"{row['largest']:.1e}",
            str(len(row["differences"])),
        )
        for row in rows
    ]
    table = format_table(("model", "plan", "compared", "largest difference", "above 1e-4"), cells)
    return BenchResult(None, {"rows": rows}, table)


def compare_in_worker(device: torch.device, name: str, plans: dict[str, Any]) -> dict[str, Any]:
    """Compare a model under each plan."""
    results = {}
    for plan_name, keys in plans.items():
        torch._dynamo.reset()
        model, example = on_meta(MODELS[name])
        config = ParallelConfig(compile=CompileConfig(backend="aot_eager"), **keys)
        size = dist.get_world_size()
        plan = make_plan(config, describe(model, example), RunShape(size, size, seq_len=1))
        result = compare(plan, model, example)
        differences = [dataclasses.asdict(each) for each in result["differences"]]
        results[plan_name] = result | {"differences": differences}
    return results


def time_pairs(pairs: int) -> BenchResult:
    """Time both ways in turn."""
    runs: dict[str, list[dict[str, float]]] = {"planned": [], "by hand": []}
    for _ in range(pairs):
        for way, of_way in runs.items():
            results = run_workers("own_llama", RANKS, 1, "cpu", {"way": way})
            of_way.append({key: max(result[key] for result in results) for key in results[0]})
    ratios = {
        key: statistics.median(a[key] / b[key] for a, b in zip(*runs.values(), strict=True))
        for key in ("step_s", "peak_gib")
    }
    speed, memory = 1 / ratios["step_s"], ratios["peak_gib"]
    text = (
        f"transformers' Llama, compiled, {RANKS} ranks, median of {pairs} pairs: tokens/s {speed:.3f} of "
        f"fully_shard by hand (target: {LEAST_SPEED}), memory {memory:.3f} (target: {MOST_MEMORY})"
    )
    return BenchResult(None, {"speed": speed, "memory": memory, "runs": runs}, text)


def time_in_worker(device: torch.device, way: str) -> dict[str, float]:
    """Train the Llama; return the seconds of a step and the peak memory of this process."""
    torch.manual_seed(0)
    model, step = _planned() if way == "planned" else _by_hand()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times = []
    for _ in range(STEPS):
        ids = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS), generator=generator)
        started_at = time.perf_counter()
        step(ids)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - started_at)
    return {"step_s": statistics.median(times[WARM_UP_STEPS:]), "peak_gib": peak_resident_bytes() / 2**30}


Step = Callable[[Tensor], None]


def _planned() -> tuple[nn.Module, Step]:
    """The model under a plan."""
    model, example = on_meta(hf_llama, **SIZES)
    config = ParallelConfig(forward_prefetch=0)  # as plain fully_shard; on a CPU it would delay computation
    plan = make_plan(config, describe(model, example), RunShape(RANKS, RANKS, TOKENS, ROWS))
    sharded = apply_plan(model, plan, build_mesh(plan.mesh, "cpu"), gradients="mean_of_ranks")
    built, _ = hf_llama(**SIZES)
    load_weights(sharded, dict(built.named_parameters()) | dict(built.named_buffers()))

    def step(ids: Tensor) -> None:
        for batch, divisor in sharded.micro_batches([ids]):
            (model(input_ids=batch, labels=batch).loss / divisor).backward()
        sharded.clip_grad_norm(1.0)

    return model, step


def _by_hand() -> tuple[nn.Module, Step]:
    """The model with FSDP2 and compiled blocks, as torch's tutorial shows."""
    built, _ = hf_llama(**SIZES)
    model: Any = built
    mesh, policy = init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(cast_forward_inputs=False)
    for block in model.model.layers:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
            module.set_force_sum_reduction_for_comms(True)

    def step(ids: Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return model, step


MEASUREMENT = Measurement(
    "own_model",
    add_own_model_options,
    measure_own_model,
    summary="models of transformers and torch: the same on every mesh, and as fast as by hand",
    description=(
        "Compare outputs and gradients of tiny models of transformers and torch, sharded, recomputed, "
        "compiled and split over 2 and 4 gloo processes, with the unsharded models; with --pairs compare the "
        "speed and memory of transformers' Llama with FSDP2 applied by hand."
    ),
    takes_keys=False,
)
