"""Compile time against depth: one compiled block serves all layers, so it should not grow with them."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench.harness import BenchResult, Measurement, config_keys
from meshwright.tools.bench.train_run import ONLY_TRAINING, Setup, config_to_record, measure_run, resolve
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import cache_environment

TINY_WIDTH = config_keys(
    "model.dim=64 model.n_heads=4 model.n_kv_heads=4 model.ffn_dim=128 model.vocab_size=264 "
    "model.max_seq_len=64 train.seq_len=64 train.micro_batch_size=2 train.steps=4 metrics.tensorboard=false "
    f"{ONLY_TRAINING}"
)


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Options of `compile`."""
    add, depths = parser.add_argument, [4, 32]
    add("--layers", type=positive, nargs="+", default=depths, metavar="N", help="depths (default 4 32)")
    add("--rounds", type=positive, default=2, metavar="N", help="compilations of each (default 2)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads (default 1)")


def measure_compile(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Every round compiles every depth once."""
    setups = {
        layers: Setup(1, options.threads, [*TINY_WIDTH, *overrides, f"--model.n_layers={layers}"])
        for layers in options.layers
    }
    configs = {str(layers): config_to_record(resolve(setup)) for layers, setup in setups.items()}
    rounds: list[dict[int, float]] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        for turn in range(options.rounds):
            found = {}
            for layers, setup in setups.items():
                cache = cache_environment("cold", Path(name), f"{layers}-layers", turn)
                found[layers] = compile_seconds(measure_run(setup, cache).step_times_s)
                print(f"round {turn + 1} {layers} layers: {found[layers]:.2f} s", file=sys.stderr, flush=True)
            rounds.append(found)
    figures = depth_figures(rounds)
    return BenchResult(configs, figures, depth_text(figures))


def compile_seconds(step_times_s: Sequence[float]) -> float:
    """Of the first step beyond those of the median later one."""
    first_s, *later_s = step_times_s
    return first_s - statistics.median(later_s or [0.0])


def depth_figures(rounds: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """Median seconds by depth; deepest over shallowest: the median of the ratios within each round."""
    return {
        "median_compile_s": {layers: statistics.median(r[layers] for r in rounds) for layers in rounds[0]},
        "deepest_over_shallowest": statistics.median(r[max(r)] / r[min(r)] for r in rounds),
        "rounds": [dict(r) for r in rounds],
    }


def depth_text(figures: Mapping[str, Any]) -> str:
    """The table, and the deepest against the shallowest."""
    seconds = figures["median_compile_s"]
    table = format_table(("layers", "compile s"), [(str(n), f"{s:.2f}") for n, s in seconds.items()])
    ratio = f"{max(seconds)} layers / {min(seconds)} layers: {figures['deepest_over_shallowest']:.2f}"
    return f"{table}\n\n{ratio} (median of {len(figures['rounds'])} rounds)"


MEASUREMENT = Measurement(
    "compile",
    add_compile_options,
    measure_compile,
    summary="compile time against depth",
    description=(
        "Compile models of several depths and a tiny width (dim 64, 4 heads, sequences of 64), one process, "
        "each with an empty cache: compile time is the first step's beyond a later one's. What a start costs "
        "with an empty or a filled cache says `train --cache cold` or `warm`; what each graph costs, the "
        "compile.json of a profile."
    ),
)
