"""Run `train.main` and return its figures, from its metrics.jsonl and from outside, on the standard shape or
with the options that all benchmarks of runs have."""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.harness import BenchResult, Measurement, config_keys, run_benchmark
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError, make_environment, named_device, python_command, run_to_end
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.data.corpus import find_prepared
from meshwright.train.planning.resolve import plan_run

WARM_UP_STEPS = 4  # not counted in rates: compilation, caches and allocators settle in the first steps
CACHE_MODES = ("keep", "cold", "warm")
MFUS = ("mfu", "mfu_causal")  # as metrics.jsonl names them
ONLY_TRAINING = "data.source=stdlib checkpoint.every=0 train.eval_every=0"  # only training steps
STANDARD_SHAPE = config_keys(
    "model.dim=256 model.n_layers=6 model.n_heads=16 model.n_kv_heads=16 model.ffn_dim=768 "
    "model.vocab_size=2048 model.max_seq_len=512 train.seq_len=512 train.micro_batch_size=4 train.steps=24 "
    f"{ONLY_TRAINING}"
)


@dataclass(frozen=True)
class Setup:
    """A run to measure: number of processes, CPU threads of each, config keys of train.main, and steps per
    report; a report waits for the device."""

    processes: int
    threads: int
    arguments: Sequence[str]
    steps_per_report: int = 1

    def command_line(self) -> list[str]:
        """Return the arguments after `-m train.main`, except the run's folder."""
        # last, so that it overrides the user's: without reports there are no figures
        report = f"--metrics.every={self.steps_per_report}"
        return [*self.arguments, report, f"--run.threads={self.threads}"]


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run. Rates are of the reports after the first and the first WARM_UP_STEPS steps (of the
    last report only if the run is not longer).

    `startup_s`: wall seconds from starting the command to the first report; with a report for every step, to
    the end of the first optimizer step. `data_wait_share`: share of the step time. `step_times_s`: one value
    per report, including the first. `device`: as the run prints it. `spread`: (best - worst rate) / median.
    `mfu`, `mfu_causal`: medians, attention counted in full or half; None if the device's peak is unknown.
    """

    device: str
    tokens_per_s_per_rank: float
    tokens_per_s_per_rank_best: float
    startup_s: float
    peak_memory_gib: float
    recompiles: int
    data_wait_share: float
    step_times_s: list[float]
    spread: float = 0.0
    mfu: float | None = None
    mfu_causal: float | None = None


def resolve(setup: Setup) -> Config:
    """Return the config of a run, checked before it is started, and tokenize its text into the cache if it is
    not there yet.

    Raises ConfigError, PlanError and DataError.
    """
    if any(argument.split("=")[0] == "--run.dir" for argument in setup.arguments):
        raise BenchError("--run.dir: a measurement always runs in a temporary folder: remove this option")
    config = parse_config(setup.command_line())
    plan_run(config.job, setup.processes)
    find_prepared(config.data)  # not part of the measured time: peers also prepare their data beforehand
    return config


def config_to_record(config: Config) -> dict[str, Any]:
    """Return the resolved config as plain data, without the name of the temporary folder."""
    return dataclasses.asdict(dataclasses.replace(config, run=dataclasses.replace(config.run, dir="RUN_DIR")))


def cache_environment(mode: str, folder: Path, name: str, turn: int) -> dict[str, str]:
    """Return the environment variables that place a run's compile cache.

    `keep`: the user's cache; `cold`: a new folder for this turn; `warm`: one folder for all turns of `name`.
    """
    if mode == "keep":
        return {}
    cache_folder = folder / (f"{name}-{turn}" if mode == "cold" else name)
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder / "inductor"),
        "TRITON_CACHE_DIR": str(cache_folder / "triton"),
    }


def measure_run(setup: Setup, cache: dict[str, str]) -> RunFigures:
    """Run train.main in a temporary folder and return its figures. Raises BenchError if it fails."""
    first_report_at = 0.0
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        metrics, log = folder / "run" / "metrics.jsonl", folder / "log"

        def watch() -> None:
            nonlocal first_report_at
            if not first_report_at and read_rows(metrics):
                first_report_at = time.perf_counter()

        arguments = [*setup.command_line(), f"--run.dir={folder / 'run'}"]
        command = [
            *python_command("meshwright.train.main", setup.processes, folder / "torchrun"),
            *arguments,
        ]
        started_at = time.perf_counter()
        run_to_end(command, make_environment(setup.threads, cache), log, watch)
        watch()
        device = named_device(log.read_text(encoding="utf-8", errors="replace")) or "unknown"
        return make_figures(read_rows(metrics), first_report_at - started_at, device)


def read_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of optimizer steps in a metrics.jsonl, which may be incomplete or missing."""
    if not metrics.is_file():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def make_figures(rows: Sequence[dict[str, Any]], startup_s: float, device: str) -> RunFigures:
    """Return the figures from the rows of all reports. Raises BenchError if there are none."""
    if not rows:
        raise BenchError(
            "the run ended without a row in metrics.jsonl: it needs at least one optimizer step (train.steps)"
        )
    counted = [row for row in rows[1:] if row["step"] > WARM_UP_STEPS] or rows[-1:]
    rates = [row["tokens_per_s_per_gpu"] for row in counted]
    mfu, mfu_causal = (
        statistics.median(row[key] for row in counted) if key in counted[0] else None for key in MFUS
    )
    return RunFigures(
        device=device,
        tokens_per_s_per_rank=statistics.median(rates),
        tokens_per_s_per_rank_best=max(rates),
        startup_s=startup_s,
        peak_memory_gib=rows[-1]["peak_memory_gib"],
        recompiles=rows[-1]["recompiles"],
        data_wait_share=sum(row["data_wait_s"] for row in counted)
        / sum(row["step_time_s"] for row in counted),
        step_times_s=[row["step_time_s"] for row in rows],
        spread=spread(rates, statistics.median(rates)),
        mfu=mfu,
        mfu_causal=mfu_causal,
    )


def compile_seconds(step_times_s: Sequence[float]) -> float:
    """Return the seconds of the first step minus those of the median later step."""
    first_s, *later_s = step_times_s
    return first_s - statistics.median(later_s or [0.0])


def spread(values: Sequence[float], median: float) -> float:
    """Return (largest - smallest) / `median`."""
    return (max(values) - min(values)) / median


SHAPE = (
    "dim 256, 6 layers, 16 heads and kv heads, ffn 768, vocabulary 2048, 4 sequences of 512 tokens per "
    "process and step, data.source=stdlib, no evaluation, no checkpoint"
)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that set how a run is started."""
    add = parser.add_argument
    add("--processes", type=positive, default=2, metavar="N", help="processes of a run (default 2)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads per process (default 1)")
    text = (
        "compile cache: unchanged (keep, the default), empty for every run (cold), or filled by an "
        "additional run that is not counted (warm)"
    )
    add("--cache", choices=CACHE_MODES, default="keep", help=text)


def with_setup(options: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures together with the options of their measurement."""
    return {"processes": options.processes, "threads": options.threads, "cache": options.cache, **figures}


def measure_train(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure one run on the standard shape."""
    setup = Setup(options.processes, options.threads, [*STANDARD_SHAPE, *overrides])
    config = resolve(setup)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        cache = cache_environment(options.cache, Path(name), "train", 0)
        if options.cache == "warm":
            measure_run(setup, cache)
        figures = measure_run(setup, cache)
    return BenchResult(
        config_to_record(config), with_setup(options, dataclasses.asdict(figures)), train_text(figures)
    )


def train_text(figures: RunFigures) -> str:
    """Return a run's figures as a table."""
    rows = [
        ("device", figures.device),
        ("tokens/s per rank, median", f"{figures.tokens_per_s_per_rank:,.0f}"),
        ("tokens/s per rank, best", f"{figures.tokens_per_s_per_rank_best:,.0f}"),
        ("spread, (best - worst) / median", f"{figures.spread:.1%}"),
        ("command to end of first step, s", f"{figures.startup_s:.2f}"),
        ("first step minus a later one, s", f"{compile_seconds(figures.step_times_s):.2f}"),
        ("peak memory per rank, GiB", f"{figures.peak_memory_gib:.2f}"),
        ("recompiles", str(figures.recompiles)),
        ("waiting for data", f"{figures.data_wait_share:.2%}"),
    ]
    if figures.mfu is not None and figures.mfu_causal is not None:
        rows.append(("MFU, attention in full / causal", f"{figures.mfu:.1%} / {figures.mfu_causal:.1%}"))
    return format_table(("figure", "value"), rows)


MEASUREMENT = Measurement(
    "train",
    add_run_options,
    measure_train,
    description=(
        f"Run train.main on the standard shape ({SHAPE}) and print tokens per second per rank (median and "
        f"best of the steps after the first {WARM_UP_STEPS}), seconds from the command to the end of the "
        "first step, the first step's time minus a later one's (with --cache cold: the compile time), peak "
        "memory, recompiles, and the share of time spent waiting for data."
    ),
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
