"""What matrix products and attention alone allow: the least seconds of a step, from rates of this machine at
the run's shape.

Measured as a run does its work: as many processes at once as the run has, each with as many threads; the best
of several, on inputs that may stay in the caches, so that no machine does better. Shapes: T tokens of a
rank's step, D dim, F ffn, V vocabulary.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.models.attention import CausalAttention
from meshwright.models.llama import LlamaConfig
from meshwright.tools.bench.harness import run_workers
from meshwright.tools.bench.timing import AttentionShape, Products, Timer, attention_runs, product_runs

BUDGET_S = 0.5  # seconds that each product is repeated for, and attention


@dataclass(frozen=True)
class Allowed:
    """Least seconds of a rank's step: of all products, of attention, and of both. Work besides and
    communication: nothing."""

    matmul_s: float
    attention_s: float
    total_s: float
    matmul_gflop_s: float


def step_products(model: LlamaConfig, tokens: int) -> dict[Products, int]:
    """The linear layers of a step, how often each: tokens, inputs, outputs."""
    kv_dim = model.n_kv_heads * model.head_dim
    layers = [(model.dim, model.dim)] * 2 + [(model.dim, kv_dim)] * 2 + [(model.dim, model.ffn_dim)] * 2
    layers += [(model.ffn_dim, model.dim)]
    counts = Counter({shape: number * model.n_layers for shape, number in Counter(layers).items()})
    counts[model.dim, model.vocab_size] += 1
    return {(tokens, *shape): number for shape, number in counts.items()}


def measure_allowed(
    model: LlamaConfig, sequences: int, seq_len: int, dtype: str, processes: int, threads: int
) -> Allowed:
    """Start the processes and take the mean of what they find: a step waits for all. Raises BenchError if one
    fails."""
    shape = AttentionShape(sequences, model.n_heads, model.n_kv_heads, model.head_dim, seq_len)
    products = step_products(model, sequences * seq_len)
    settings = {"products": list(products), "attention": dataclasses.astuple(shape), "dtype": dtype}
    found = run_workers("rates", processes, threads, "cpu", settings)
    product_s = [sum(ranks) / processes for ranks in zip(*(rank["products"] for rank in found), strict=True)]
    return add_up(products, product_s, sum(rank["attention_s"] for rank in found) / processes, model.n_layers)


def add_up(
    products: dict[Products, int], product_s: Sequence[float], attention_s: float, layers: int
) -> Allowed:
    """A step's seconds from those of one linear layer of each kind (its three products) and of attention in
    one layer."""
    matmul_s = sum(number * s for number, s in zip(products.values(), product_s, strict=True))
    flops = sum(
        6 * tokens * inputs * outputs * number for (tokens, inputs, outputs), number in products.items()
    )
    return Allowed(matmul_s, layers * attention_s, matmul_s + layers * attention_s, flops / matmul_s / 1e9)


def measure_rates(
    device: torch.device, products: Sequence[Products], attention: Sequence[int], dtype: str
) -> dict[str, Any]:
    """What `measure_here` does, in all processes at once."""
    dist.barrier()
    return measure_here(products, AttentionShape(*attention), dtype, device)


def measure_here(
    products: Sequence[Products], shape: AttentionShape, dtype: str, device: torch.device
) -> dict[str, Any]:
    """Best seconds of each linear layer's products and of attention, forward and backward, in this
    process."""
    clock = Timer(device, BUDGET_S)
    found = [
        clock.best_seconds(product_runs(product, dtype, device, rotated_bytes=0)) for product in products
    ]
    together = attention_runs(CausalAttention(), shape, dtype, device, rotated_bytes=0)[1]
    return {"products": found, "attention_s": clock.best_seconds(together)}
