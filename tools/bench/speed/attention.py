"""Our CPU attention against torch's: CPU time of forward and backward. That its gradients are those of plain
attention is tested (tests/models/test_cpu_attention.py).

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
from meshwright.tools.bench.timing import AttentionShape, Timer, attention_runs
from meshwright.tools.cli import format_table, positive

SHAPES = (
    AttentionShape(4, 16, 16, 16, 512),  # of `bench train`
    AttentionShape(8, 8, 4, 24, 256),  # of llama_debug.yaml
    AttentionShape(2, 8, 2, 64, 512),
    AttentionShape(1, 8, 8, 64, 1024),
    AttentionShape(1, 8, 2, 128, 512),
)
DTYPES = ("float32", "bfloat16")
BUDGET_S = 0.1  # seconds that a kernel is repeated for in a round


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Options of `attention`."""
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="of each (default 5)")


def measure_attention(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Both kernels on every shape and dtype, on one thread: CPU time of several is also their waiting."""
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
    """CPU seconds of both, the best of rounds in turn."""
    cpu = torch.device("cpu")
    kernels = {"ours_s": our_attention, "torch_s": torch_attention}
    runs = {name: attention_runs(kernel, shape, dtype, cpu, 0)[1] for name, kernel in kernels.items()}
    clock = Timer(cpu, BUDGET_S)
    times = [{name: clock.best_seconds(runs[name]) for name in kernels} for _ in range(rounds)]
    best = {name: min(found[name] for found in times) for name in kernels}
    return {"shape": str(shape), "dtype": dtype, **best, "ratio": best["ours_s"] / best["torch_s"]}


def our_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """The kernel, on the views that the model hands it."""
    return causal_attention(*(x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH)))[0].transpose(1, 2)


def torch_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """torch's own, on the same views."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


MEASUREMENT = Measurement(
    "attention",
    add_attention_options,
    measure_attention,
    summary="our CPU attention kernel against torch's",
    description=(
        "Time forward and backward of the CPU attention kernel and of torch's scaled_dot_product_attention, "
        "one thread, the best of several in turn."
    ),
    takes_keys=False,
)
