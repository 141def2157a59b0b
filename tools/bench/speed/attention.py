"""Compare the CPU time of this project's CPU attention with torch's, forward and backward.
tests/models/test_cpu_attention.py checks the gradients.

Shapes: B batch, N query heads, K key-value heads, H head dim, T tokens.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.kernels.cpu_attention import causal_attention
from meshwright.tools.bench.harness import BenchResult, Measurement
from meshwright.tools.cli import format_table, positive
from meshwright.train.calibration.timing import AttentionShape, Timer, attention_runs

SHAPES = (
    AttentionShape(4, 16, 16, 16, 512),  # of `bench train`
    AttentionShape(8, 8, 4, 24, 256),  # of llama_debug.yaml
    AttentionShape(2, 8, 2, 64, 512),
    AttentionShape(1, 8, 8, 64, 1024),
    AttentionShape(1, 8, 2, 128, 512),
)
DTYPES = ("float32", "bfloat16")
BUDGET_S = 0.1  # seconds of repetition of a kernel in a round


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `attention`."""
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="rounds (default 5)")


def measure_attention(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Compare both kernels on every shape and dtype, on one thread: CPU time of several includes waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [compare(shape, dtype, options.rounds) for shape in SHAPES for dtype in DTYPES]
    finally:
        torch.set_num_threads(before)
    head = ("batch x heads x kv heads x head dim x tokens", "dtype", "ours ms", "torch ms", "ours / torch")
    cells = [
        (r["shape"], r["dtype"], f"{1e3 * r['ours_s']:.2f}", f"{1e3 * r['torch_s']:.2f}", f"{r['ratio']:.3f}")
        for r in rows
    ]
    return BenchResult(None, {"rows": rows}, format_table(head, cells))


def compare(shape: AttentionShape, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of both kernels, run in turn, the best of all rounds."""
    cpu = torch.device("cpu")
    kernels = {"ours_s": our_attention, "torch_s": torch_attention}
    runs = {name: attention_runs(kernel, shape, dtype, cpu, 0)[1] for name, kernel in kernels.items()}
    clock = Timer(cpu, BUDGET_S)
    times = [{name: clock.best_seconds(runs[name]) for name in kernels} for _ in range(rounds)]
    best = {name: min(seconds[name] for seconds in times) for name in kernels}
    return {"shape": str(shape), "dtype": dtype, **best, "ratio": best["ours_s"] / best["torch_s"]}


def our_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Call this project's kernel on the same views as the model does."""
    return causal_attention(*(x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH)))[0].transpose(1, 2)


def torch_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Call torch's kernel on the same views."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


MEASUREMENT = Measurement(
    "attention",
    add_attention_options,
    measure_attention,
    summary="this project's CPU attention kernel against torch's",
    description=(
        "Time forward and backward of this project's CPU attention kernel and of torch's "
        "scaled_dot_product_attention, on one thread, in turn, and print the best of several rounds."
    ),
    takes_keys=False,
)
