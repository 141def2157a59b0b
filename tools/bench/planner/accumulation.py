"""Compare the ways to accumulate gradients over micro batches: measured on this CPU beside the prediction, or
predicted for GPUs with fast and slow networks."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.machines import machines_of_kind
from meshwright.parallel.planner.search import Candidate
from meshwright.tools.bench.harness import BenchResult, Measurement, config_keys
from meshwright.tools.bench.planner.predictions import (
    COMMON,
    THREADS,
    PredictionCase,
    predict_run,
    run_in_turn,
    step_seconds,
)
from meshwright.tools.bench.train_run import RunFigures, Setup, config_to_record, resolve
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.report import find_kind
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import search_plans

# Many parameters for few tokens: communication is a large part of the step.
MODEL = (
    "model.dim=512 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 model.ffn_dim=1536 "
    "model.vocab_size=2048 model.max_seq_len=32 train.seq_len=32 train.micro_batch_size=1"
)
MICRO_BATCHES = 4
DEFAULT = ("true", "true", "every_micro_batch")
MIB = 2**20
NETWORKS = {"400 Gb/s": 50.0, "100 Gb/s": 12.5}  # GB/s of a GPU's share of its node's network
GPUS_PER_NODE = 8
TODAY = ("--parallel.reduce_gradients=every_micro_batch", "--parallel.reshard_after_backward=true")


@dataclass(frozen=True)
class WayRow:
    """One way to accumulate on a number of processes, predicted and measured. Speed and `more_mib`, the peak
    memory of one process, are relative to reducing and freeing in every micro batch."""

    processes: int
    way: str
    predicted_speed: float
    measured_speed: float
    tokens_per_s: float
    predicted_more_mib: float
    measured_more_mib: float


def way_cases(processes: int) -> dict[tuple[str, str, str], PredictionCase]:
    """Return a case for each pair of reshardings and each reduction, the default first."""
    ways = product(("true", "false"), ("true", "false"), ("every_micro_batch", "last_micro_batch"))
    return {way: _case(processes, *way) for way in ways}


def _case(processes: int, forward: str, backward: str, reduce: str) -> PredictionCase:
    keys = (
        f"{COMMON} {MODEL} train.global_batch_size={MICRO_BATCHES * processes} "
        f"parallel.reshard_after_forward={forward} parallel.reshard_after_backward={backward} "
        f"parallel.reduce_gradients={reduce}"
    )
    name = f"{processes} processes: {describe_way((forward, backward, reduce))}"
    return PredictionCase(name, f"{processes} processes", processes, config_keys(keys))


def describe_way(way: tuple[str, str, str]) -> str:
    """Return the values of reshard_after_forward, reshard_after_backward and reduce_gradients."""
    forward, backward, reduce = way
    return f"{forward} / {backward} / {reduce.removesuffix('_micro_batch')}"


def measure_accumulation(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure runs on this CPU, or with `--predict` predict GPUs. Raises USER_ERRORS."""
    return predict_table(options, overrides) if options.predict else measure_ways(options, overrides)


def measure_ways(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure every way in turn on each number of processes, beside the prediction."""
    hardware, rows, configs = find_kind("cpu", "--hardware"), list[WayRow](), dict[str, Any]()
    for processes in options.processes:
        cases = way_cases(processes)
        keys = [f"--train.steps={options.steps}", *overrides]
        setups = {case: Setup(processes, THREADS, [*case.keys, *keys]) for case in cases.values()}
        resolved = {case: resolve(setup) for case, setup in setups.items()}
        configs |= {case.name: config_to_record(config) for case, config in resolved.items()}
        jobs = {way: resolved[case].job for way, case in cases.items()}
        runs = run_in_turn(setups, options.rounds)
        rows += way_rows(processes, jobs, {way: runs[case] for way, case in cases.items()}, hardware)
    figures = {"rows": [dataclasses.asdict(row) for row in rows]}
    return BenchResult(configs, figures, ways_text(rows))


def way_rows(
    processes: int,
    jobs: Mapping[tuple[str, str, str], TrainingJob],
    runs: Mapping[tuple[str, str, str], Sequence[RunFigures]],
    hardware: Hardware,
) -> list[WayRow]:
    """Compare every way with the default, in the prediction and in the runs."""
    predicted = {way: predict_run(job, processes, THREADS, hardware) for way, job in jobs.items()}
    measured_s = {way: step_seconds(of_way) for way, of_way in runs.items()}
    peak = {way: statistics.median(run.peak_memory_gib for run in of_way) for way, of_way in runs.items()}
    return [
        WayRow(
            processes,
            describe_way(way),
            predicted[DEFAULT].step_s / predicted[way].step_s,
            measured_s[DEFAULT] / measured_s[way],
            jobs[way].seq_len * MICRO_BATCHES * processes / measured_s[way],
            (predicted[way].peak_gib - predicted[DEFAULT].peak_gib) * GIB / MIB,
            (peak[way] - peak[DEFAULT]) * GIB / MIB,
        )
        for way in jobs
    ]


def ways_text(rows: Sequence[WayRow]) -> str:
    """Return the table."""
    head = (
        *("processes", "reshard forward / backward / reduce", "tokens/s", "speed, measured", "predicted"),
        *("more MiB, measured", "predicted"),
    )
    cells = [
        (
            str(row.processes),
            row.way,
            f"{row.tokens_per_s:,.0f}",
            f"{row.measured_speed:.3f}",
            f"{row.predicted_speed:.3f}",
            f"{row.measured_more_mib:+.0f}",
            f"{row.predicted_more_mib:+.0f}",
        )
        for row in rows
    ]
    note = f"{MICRO_BATCHES} micro batches; the first line of each number of processes is the default"
    return f"{format_table(head, cells)}\n\n{note}"


@dataclass(frozen=True)
class PlannedCell:
    """The planner's choice for one model, number of GPUs and network: with the keys open, and with `today`'s
    values; None where no plan fits."""

    config: str
    gpus: int
    network: str
    chosen: Candidate | None
    today: Candidate | None


def predict_table(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Plan every model, number of GPUs and network in both ways."""
    cells, base = list[PlannedCell](), find_kind("h100-sxm", "--gpu")
    for name, gpus, network in product(options.config, options.gpus, NETWORKS):
        shared = dataclasses.replace(base.network, gb_s=NETWORKS[network] * GPUS_PER_NODE)
        hardware = dataclasses.replace(base, network=shared)
        keys = [
            *(f"--config={name}", "--parallel.plan=auto", "--train.micro_batch_size=1"),
            *("--parallel.forward_prefetch=1", "--parallel.backward_prefetch=1"),
            *(f"--train.global_batch_size={gpus * options.sequences_per_gpu}", *overrides),
        ]
        both = [choose([*keys, *way], gpus, hardware) for way in ((), TODAY)]
        cells.append(PlannedCell(Path(name).stem, gpus, network, *both))
        print(f"{name} {gpus} {network}", file=sys.stderr, flush=True)
    figures = {"predicted": True, "rows": [_plain(cell) for cell in cells]}
    return BenchResult(None, figures, planned_text(cells))


def choose(keys: Sequence[str], gpus: int, hardware: Hardware) -> Candidate | None:
    """Return the planner's choice; None if none fits. Raises ConfigError, and PlanError if none is legal."""
    job = parse_config(list(keys), "tools.bench").job
    machines = machines_of_kind(hardware, gpus, GPUS_PER_NODE)
    return next(iter(search_plans(job, machines).ranked), None)


def _plain(cell: PlannedCell) -> dict[str, Any]:
    sides = {"chosen": cell.chosen, "today": cell.today}
    return {
        **{key: getattr(cell, key) for key in ("config", "gpus", "network")},
        **{
            side: plan
            and {
                "choices": dataclasses.asdict(plan.choices),
                "accumulation": plan.plan.accumulation,
                "sequences_per_s": plan.rate(),
                "gib": plan.needed_bytes / GIB,
            }
            for side, plan in sides.items()
        },
    }


def planned_text(cells: Sequence[PlannedCell]) -> str:
    """Return the table in Markdown."""
    head = (
        *("model", "GPUs", "network a GPU", "today: tp, recomputed, GiB", "chosen: tp, recomputed, GiB"),
        *("reduce", "reshard fwd/bwd", "micro batches", "speed"),
    )
    rows = [head, ["---"] * len(head), *(_planned_row(cell) for cell in cells)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\npredicted with configs/hardware/h100-sxm.yaml; nothing is measured"


def _planned_row(cell: PlannedCell) -> list[str]:
    start = [cell.config, f"{cell.gpus:,}", cell.network]
    if cell.chosen is None:
        return [*start, "does not fit", *"-----"]
    choices = dataclasses.asdict(cell.chosen.choices)
    resharded = f"{choices['reshard_after_forward']}/{choices['reshard_after_backward']}".lower()
    reduce = str(choices["reduce_gradients"]).removesuffix("_micro_batch")
    speed = f"{cell.chosen.rate() / cell.today.rate():.2f}" if cell.today else "-"
    settings = [_settings(cell.today) if cell.today else "does not fit", _settings(cell.chosen)]
    return [*start, *settings, reduce, resharded, str(cell.chosen.plan.accumulation), speed]


def _settings(plan: Candidate) -> str:
    choices = dataclasses.asdict(plan.choices)
    mode, blocks = choices["activation_checkpoint"], choices["activation_checkpoint_blocks"]
    recomputed = mode if mode == "none" else f"{mode} {blocks}"
    return f"{choices['tp']}, {recomputed}, {plan.needed_bytes / GIB:.1f}"


def add_accumulation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `accumulation`."""
    add = parser.add_argument
    text = "numbers of processes to measure (default 2 4)"
    add("--processes", type=positive, nargs="+", default=[2, 4], metavar="N", help=text)
    add("--steps", type=positive, default=12, metavar="N", help="optimizer steps of a run (default 12)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each way, in turn (default 3)")
    add("--predict", action="store_true", help="run nothing: plan models for H100s on two networks")
    models = ["llama_8b", "llama_70b", "llama_405b"]
    text = f"with --predict: configs to plan (default {' '.join(models)})"
    add("--config", nargs="+", default=models, metavar="NAME", help=text)
    text = "with --predict: numbers of GPUs (default 32 128 1024)"
    add("--gpus", type=positive, nargs="+", default=[32, 128, 1024], metavar="N", help=text)
    text = "with --predict: sequences of the global batch per GPU (default 8)"
    add("--sequences-per-gpu", type=positive, default=8, metavar="N", help=text)


MEASUREMENT = Measurement(
    "accumulation",
    add_accumulation_options,
    measure_accumulation,
    summary="the ways to accumulate gradients over micro batches",
    description=(
        f"Run a small model with {MICRO_BATCHES} micro batches per step in all eight ways: parameters freed "
        "or kept after the forward and after the backward, gradients reduced in every micro batch or once "
        "per step. Runs of all ways take turns. Print their speed relative to the default and their "
        "additional memory, beside the prediction. With --predict, let the planner choose for H100s with 400 "
        "and with 100 Gb/s of network each, one sequence per micro batch, with and without these choices."
    ),
)
