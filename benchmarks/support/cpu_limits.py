"""The lower bound of a step's time: the time of its matrix products and attention alone, from this machine's
rates at the run's shapes.

The rates are measured with as many processes and threads as the run has: the best of several repetitions, on
inputs that may stay in the caches, so that no step can be faster. Shapes: T tokens of a rank's step, D dim, F
ffn, V vocabulary.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.models.attention import CausalAttention
from meshwright.models.config import LlamaConfig
from meshwright.tools.workers import run_workers
from meshwright.train.calibration.compute import AttentionShape, Products, Timer, attention_runs, product_runs

BUDGET_S = 0.5  # seconds of repetition of each product and of attention


@dataclass(frozen=True)
class Allowed:
    """The lower bound in seconds of a rank's step: all matrix products, attention, and both. Other work and
    communication count as 0."""

    matmul_s: float
    attention_s: float
    total_s: float
    matmul_gflop_s: float


def step_products(model: LlamaConfig, tokens: int) -> dict[Products, int]:
    """Return the number of linear layers of a step by shape: tokens, inputs, outputs."""
    kv_dim = model.n_kv_heads * model.head_dim
    layers = [(model.dim, model.dim)] * 2 + [(model.dim, kv_dim)] * 2 + [(model.dim, model.ffn_dim)] * 2
    layers += [(model.ffn_dim, model.dim)]
    counts = Counter({shape: number * model.n_layers for shape, number in Counter(layers).items()})
    counts[model.dim, model.vocab_size] += 1
    return {(tokens, *shape): number for shape, number in counts.items()}


def measure_allowed(
    model: LlamaConfig, sequences: int, seq_len: int, dtype: str, processes: int, threads: int
) -> Allowed:
    """Measure the rates in several processes and return the lower bound from their means, because a step
    waits for all ranks. Raises BenchError if a process fails."""
    shape = AttentionShape(sequences, model.n_heads, model.n_kv_heads, model.head_dim, seq_len)
    products = step_products(model, sequences * seq_len)
    settings = {"products": list(products), "attention": dataclasses.astuple(shape), "dtype": dtype}
    ranks = run_workers("benchmarks.support.cpu_limits:measure_rates", processes, threads, "cpu", settings)
    product_s = [sum(times) / processes for times in zip(*(rank["products"] for rank in ranks), strict=True)]
    return add_up(products, product_s, sum(rank["attention_s"] for rank in ranks) / processes, model.n_layers)


def add_up(
    products: dict[Products, int], product_s: Sequence[float], attention_s: float, layers: int
) -> Allowed:
    """Return a step's seconds from those of one linear layer of each shape (its three products) and of the
    attention of one layer."""
    matmul_s = sum(number * s for number, s in zip(products.values(), product_s, strict=True))
    flops = sum(
        6 * tokens * inputs * outputs * number for (tokens, inputs, outputs), number in products.items()
    )
    return Allowed(matmul_s, layers * attention_s, matmul_s + layers * attention_s, flops / matmul_s / 1e9)


def measure_rates(
    device: torch.device, products: Sequence[Products], attention: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Call `measure_in_process` in all processes at the same time."""
    dist.barrier()
    return measure_in_process(products, AttentionShape(*attention), dtype, device)


def measure_in_process(
    products: Sequence[Products], shape: AttentionShape, dtype: str, device: torch.device
) -> dict[str, Any]:
    """Return the best seconds of each linear layer's three products, and of attention's forward and backward,
    in this process."""
    clock = Timer(device, BUDGET_S, rotated_bytes=0)
    product_s = [min(clock.times(product_runs(clock, product, dtype))) for product in products]
    both_runs = attention_runs(clock, CausalAttention(), shape, dtype)[1]
    return {"products": product_s, "attention_s": min(clock.times(both_runs))}
