"""What matrix products and attention alone allow: the least seconds of a step, from rates of this machine at
the run's shape.

Measured as a run does its work: as many processes at once as the run has, each with as many threads; the best
of several, on inputs that may stay in the caches, so that no machine does better. Shapes: T tokens of a
rank's step, D dim, F ffn, V vocabulary.
"""

import argparse
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.models.attention import CausalAttention
from meshwright.models.llama import LlamaConfig
from meshwright.tools.bench.timing import AttentionShape, Products, Timer, attention_runs, product_runs
from meshwright.tools.processes import make_environment, python_command, run_to_end
from meshwright.train.config import RunConfig
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import choose_device, read_rank_info

WORKER = "meshwright.tools.bench.speed.cpu_limits"
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
    with tempfile.TemporaryDirectory(prefix="meshwright-rates-") as name:
        folder = Path(name)
        work = {"products": list(products), "attention": dataclasses.astuple(shape), "dtype": dtype}
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        command = [*python_command(WORKER, processes, folder / "torchrun"), str(folder), str(threads)]
        run_to_end(command, make_environment(threads, {}), folder / "log", lambda: None)
        found = [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)
        ]
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


def main() -> None:
    """One process of the measurement: reads FOLDER/work.json, writes FOLDER/RANK.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    place, config = read_rank_info(), RunConfig(threads=options.threads, device="cpu")
    device, _ = choose_device(config, place)
    start_process(config, place, device)
    work = json.loads((options.folder / "work.json").read_text(encoding="utf-8"))
    dist.barrier()
    found = measure_here(
        [tuple(p) for p in work["products"]], AttentionShape(*work["attention"]), work["dtype"], device
    )
    dist.destroy_process_group()
    (options.folder / f"{place.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
