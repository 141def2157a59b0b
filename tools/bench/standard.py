"""`bench train`: one run on the standard shape; and the options of all subcommands that run that shape."""

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench.measurement import KEYS, Result
from meshwright.tools.bench.processes import CACHE_MODES, cache_environment
from meshwright.tools.bench.run import (
    STANDARD_SHAPE,
    WARM_UP_STEPS,
    RunFigures,
    Setup,
    config_to_record,
    measure_run,
    resolve,
)
from meshwright.tools.command import format_table, positive

SHAPE = (
    "dim 256, 6 layers, 16 heads and kv heads, ffn 768, vocabulary 2048, sequences of 512, 4 of them per "
    "process and "
    "step, data.source=stdlib, no evaluation, no checkpoint"
)
SUMMARY = "one run: speed, memory, start-up"
DESCRIPTION = (
    f"Run train.main on the standard shape ({SHAPE}) and report tokens per second of a rank (median and best "
    f"of the steps after the first {WARM_UP_STEPS}), seconds from the command to the end of the first "
    f"step, peak "
    "memory, recompiles, and the share of time spent waiting for data."
)
EPILOG = KEYS


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How the standard shape is run."""
    parser.add_argument(
        "--processes",
        type=positive,
        default=2,
        metavar="N",
        help="processes of the run (default 2); it takes GPUs where it has one for each",
    )
    parser.add_argument(
        "--steps", type=positive, default=24, metavar="N", help="optimizer steps (default 24)"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads per process (default 1)"
    )
    parser.add_argument("--compile", choices=("true", "false"), default="true", help="default true")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters and computation (default float32); gradients are reduced in float32",
    )
    parser.add_argument(
        "--cache",
        choices=CACHE_MODES,
        default="keep",
        help="compile cache: as it is (keep, the default), empty for every run (cold), or filled by one "
        "more run "
        "that does not count (warm)",
    )


def standard_setup(options: argparse.Namespace, overrides: Sequence[str]) -> Setup:
    """The standard shape with the options, then the user's keys."""
    keys = [
        f"--train.steps={options.steps}",
        f"--parallel.compile.enabled={options.compile}",
        f"--parallel.param_dtype={options.dtype}",
    ]
    return Setup(options.processes, options.threads, [*STANDARD_SHAPE, *keys, *overrides])


def with_setup(options: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures after the options that they were measured with."""
    return {"processes": options.processes, "threads": options.threads, "cache": options.cache, **figures}


def measure_train(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """One run on the standard shape."""
    setup = standard_setup(options, overrides)
    config = resolve(setup)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        cache = cache_environment(options.cache, Path(name), "train", 0)
        if options.cache == "warm":
            measure_run(setup, cache)
        figures = measure_run(setup, cache)
    return Result(
        config_to_record(config), with_setup(options, dataclasses.asdict(figures)), train_text(figures)
    )


def train_text(figures: RunFigures) -> str:
    """A run's figures for people."""
    rows = [
        ("device", figures.device),
        ("tokens/s per rank, median", f"{figures.tokens_per_s_per_rank:,.0f}"),
        ("tokens/s per rank, best", f"{figures.tokens_per_s_per_rank_best:,.0f}"),
        ("spread, (best - worst) / median", f"{figures.spread:.1%}"),
        ("start to end of first step, s", f"{figures.startup_s:.2f}"),
        ("peak memory per rank, GiB", f"{figures.peak_memory_gib:.2f}"),
        ("recompiles", str(figures.recompiles)),
        ("waiting for data", f"{figures.data_wait_share:.2%}"),
    ]
    if figures.mfu is not None and figures.mfu_causal is not None:
        rows.append(("MFU, attention in full / causal", f"{figures.mfu:.1%} / {figures.mfu_causal:.1%}"))
    return format_table(("figure", "value"), rows)
