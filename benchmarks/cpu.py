"""Compare this trainer with other trainers on a CPU, at two shapes and in two dtypes, and with the lower
bound of a step on this machine."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from benchmarks.support.cpu_limits import measure_allowed
from benchmarks.support.harness import BenchResult, Measurement, config_keys, run_benchmark
from benchmarks.support.peers import PEER_HELP, Contender, ours, parse_peers, run_rounds, to_figures
from benchmarks.train import (
    STANDARD_SHAPE,
    WARM_UP_STEPS,
    Setup,
    add_run_options,
    config_to_record,
    resolve,
    with_setup,
)
from meshwright.models.config import LlamaConfig
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError
from meshwright.train.config import Config

# environment variables of a peer, and the config keys whose values they have; BENCH_PROCESSES is added
VARIABLES = {
    "BENCH_DIM": "model.dim",
    "BENCH_LAYERS": "model.n_layers",
    "BENCH_HEADS": "model.n_heads",
    "BENCH_KV_HEADS": "model.n_kv_heads",
    "BENCH_FFN": "model.ffn_dim",
    "BENCH_VOCAB": "model.vocab_size",
    "BENCH_SEQ": "train.seq_len",
    "BENCH_MICRO_BATCH": "train.micro_batch_size",
    "BENCH_STEPS": "train.steps",
    "BENCH_DTYPE": "parallel.param_dtype",
    "BENCH_COMPILE": "parallel.compile.enabled",
}
HEAD_DIM_64 = config_keys("model.dim=512 model.n_heads=8 model.n_kv_heads=8 model.ffn_dim=1536")
SHAPES: Mapping[str, Sequence[str]] = {
    "head-dim-16": STANDARD_SHAPE,
    "head-dim-64": (*STANDARD_SHAPE, *HEAD_DIM_64),
}
DTYPES = ("float32", "bfloat16")


def add_cpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cpu`."""
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="NAME=COMMAND", help=PEER_HELP)
    add("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="default: both")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each trainer (default 3)")
    text = f"optimizer steps (default 20; the first {WARM_UP_STEPS} are not counted)"
    add("--steps", type=positive, default=20, metavar="N", help=text)
    add_run_options(parser)


def measure_cpu(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure every shape and dtype, this trainer and peers in turn. Raises BenchError if this one fails."""
    if ignoring := [text for text in options.peer if "BENCH_DIM" not in text]:
        raise BenchError(
            f"--peer {ignoring[0]!r} does not use BENCH_DIM, so it would run another model: pass the BENCH_* "
            "variables on, see benchmarks.cpu -h"
        )
    setups = {
        f"{shape} {dtype}": make_setup(shape, dtype, options, overrides)
        for shape in options.shapes
        for dtype in options.dtypes
    }
    configs = {name: resolve(setup) for name, setup in setups.items()}
    peers = {
        name: parse_peers(options.peer, options.threads, shape_variables(config, options.processes))
        for name, config in configs.items()
    }
    cells = {}
    for name, setup in setups.items():
        print(name, file=sys.stderr, flush=True)
        cells[name] = measure_cell(setup, configs[name], peers[name], options)
    recorded = {name: config_to_record(config) for name, config in configs.items()}
    return BenchResult(recorded, with_setup(options, {"cells": cells}), cpu_text(cells, options.rounds))


def make_setup(shape: str, dtype: str, options: argparse.Namespace, overrides: Sequence[str]) -> Setup:
    """Return the run of this trainer at a shape and dtype."""
    keys = [f"--train.steps={options.steps}", f"--parallel.param_dtype={dtype}", "--run.device=cpu"]
    return Setup(options.processes, options.threads, [*SHAPES[shape], *keys, *overrides])


def measure_cell(
    setup: Setup, config: Config, peers: Sequence[Contender], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure this trainer and the peers in turn, and directly afterwards the lower bound, because a
    machine's speed drifts."""
    sequences, seq_len, dtype = (
        config.train.micro_batch_size,
        config.train.seq_len,
        config.parallel.param_dtype,
    )
    if not isinstance(sequences, int):
        raise BenchError(
            f"train.micro_batch_size={sequences}: cpu needs a number to compute a step's work: remove the key"
        )
    if not isinstance(config.model, LlamaConfig):
        raise BenchError("model.factory: cpu compares trainers on our Llama's shape: remove the key")
    rounds, left_out = run_rounds([ours(setup), *peers], options.rounds, options.cache)
    allowed = measure_allowed(config.model, sequences, seq_len, dtype, setup.processes, setup.threads)
    figures = to_figures(rounds)
    shares = {  # the lower bound as a share of the step's time
        name: allowed.total_s / (sequences * seq_len / median["tokens_per_s_per_rank"])
        for name, median in figures["median"].items()
    }
    return {
        **figures,
        "allowed": dataclasses.asdict(allowed),
        "share_of_allowed": shares,
        "left_out": left_out,
    }


def shape_variables(config: Config, processes: int) -> dict[str, str]:
    """Return the environment variables of a peer."""
    values = {name: attrgetter(key)(config) for name, key in VARIABLES.items()}
    values |= {"BENCH_COMPILE": int(values["BENCH_COMPILE"]), "BENCH_PROCESSES": processes}
    return {name: str(value) for name, value in values.items()}


def cpu_text(cells: Mapping[str, Any], rounds: int) -> str:
    """Return a table with a row for each shape, dtype and trainer, the lower bounds, and peers left out."""
    head = (
        "shape, dtype",
        "trainer",
        "tokens/s per rank",
        "spread",
        "GiB per rank",
        "of lower bound",
        "speed: ours / peer",
        "memory: ours / peer",
    )
    rows = [_cells(name, cell, trainer) for name, cell in cells.items() for trainer in cell["median"]]
    left_out = [
        f"left out of {name}: {trainer} ({reason.splitlines()[0]})"
        for name, cell in cells.items()
        for trainer, reason in cell["left_out"].items()
    ]
    allowed = [
        f"{name}: lower bound of a step: matmul {a['matmul_s']:.3f} s + attention {a['attention_s']:.3f} s "
        f"({a['matmul_gflop_s']:.0f} GFLOP/s)"
        for name, cell in cells.items()
        for a in [cell["allowed"]]
    ]
    last = (
        f"median of {rounds} rounds; spread: (best - worst) / median; of lower bound: lower bound (matmul "
        "and attention alone) / step time"
    )
    return "\n".join([format_table(head, rows), "", *allowed, *left_out, last])


def _cells(name: str, cell: Mapping[str, Any], trainer: str) -> list[str]:
    median = cell["median"][trainer]
    peer_ratios = [cell["ours_over_peer"][figure] for figure in ("tokens_per_s_per_rank", "peak_memory_gib")]
    ratios = [f"{by_peer[trainer]:.3f}" if trainer in by_peer else "-" for by_peer in peer_ratios]
    spread = (
        f"{cell['spread'][trainer]['tokens_per_s_per_rank']:.1%}" if len(cell["rounds"]) > 1 else "one round"
    )
    return [
        name,
        trainer,
        f"{median['tokens_per_s_per_rank']:,.0f}",
        spread,
        f"{median['peak_memory_gib']:.2f}",
        f"{cell['share_of_allowed'][trainer]:.1%}",
        *ratios,
    ]


MEASUREMENT = Measurement(
    "cpu",
    add_cpu_options,
    measure_cpu,
    description=(
        "Run this trainer and other trainers in turn, compiled, on CPUs with gloo: two shapes (head dim 16: "
        "the standard one of `train`; head dim 64: dim 512, 8 heads) in float32 and bfloat16. Print tokens "
        "per second and memory of each rank, the ratios of this trainer to each peer, and the step time's "
        "lower bound as a share of the step time: the time of matrix products and attention alone at this "
        "machine's rates, measured at the same shapes in as many processes."
    ),
    epilog=(
        "A peer's command receives the shape in environment variables, which it must pass on: "
        f"{', '.join([*VARIABLES, 'BENCH_PROCESSES'])} (BENCH_DTYPE is float32 or bfloat16, BENCH_COMPILE "
        "1). Example: titan='TT_DIM=$BENCH_DIM ... bash run.sh $BENCH_PROCESSES'. A peer that fails is left "
        "out of that shape; the output names it. It must print, from one rank or all, `BENCH "
        "startup_to_first_step_s=26.5` and `BENCH tok/s/rank median=1399 peak_rss_GiB=0.92` (or another "
        "peak_..._GiB)."
    ),
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
