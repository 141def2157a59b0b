"""Compile time against depth: one compiled block serves all layers, so it should not grow with them."""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.tools.bench.processes import cache_environment
from meshwright.tools.bench.run import Setup, measure_run

LATER_STEPS = 3
TINY_WIDTH = (
    "--model.dim=64",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=128",
    "--model.vocab_size=264",
    "--model.max_seq_len=64",
    "--train.seq_len=64",
    "--train.micro_batch_size=2",
    f"--train.steps={1 + LATER_STEPS}",
    "--data.source=stdlib",
    "--checkpoint.every=0",
    "--train.eval_every=0",
    "--metrics.tensorboard=false",
)


@dataclass(frozen=True)
class Compilation:
    """`compile_s`: seconds of the first optimizer step beyond those of the median later one."""

    layers: int
    compile_s: float
    first_step_s: float
    later_step_s: float
    startup_s: float


def depth_setup(layers: int, threads: int, overrides: Sequence[str]) -> Setup:
    """One process, a tiny width, so that what takes time is compiling."""
    return Setup(1, threads, [*TINY_WIDTH, *overrides, f"--model.n_layers={layers}"])


def run_depths(setups: dict[int, Setup], rounds: int) -> list[dict[int, Compilation]]:
    """Every round compiles every depth once, each with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        results = []
        for turn in range(1, rounds + 1):
            result = {}
            for layers, setup in setups.items():
                result[layers] = _compile(
                    layers, setup, cache_environment("cold", Path(name), f"{layers}-layers", turn)
                )
                print(
                    f"round {turn} {layers} layers: {result[layers].compile_s:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            results.append(result)
    return results


def median_seconds(rounds: Sequence[dict[int, Compilation]]) -> dict[int, float]:
    """Median compile seconds by depth."""
    return {layers: statistics.median(r[layers].compile_s for r in rounds) for layers in rounds[0]}


def median_ratio(rounds: Sequence[dict[int, Compilation]]) -> float:
    """Deepest / shallowest: the median of the ratios within each round."""
    return statistics.median(r[max(r)].compile_s / r[min(r)].compile_s for r in rounds)


def _compile(layers: int, setup: Setup, cache: dict[str, str]) -> Compilation:
    figures = measure_run(setup, cache)
    first, *later = figures.step_times_s
    later_s = statistics.median(later) if later else 0.0
    return Compilation(layers, first - later_s, first, later_s, figures.startup_s)
