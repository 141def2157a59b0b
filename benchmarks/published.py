"""Compare the planner's predictions with published training runs: tokens per second and memory of each."""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu import make_setup
from benchmarks.support.frameworks import (
    ATTENTION,
    kempnerforge_plan,
    kempnerforge_times,
    kempnerforge_workload,
    own_h200_times,
    torchtitan_plan,
    torchtitan_workload,
)
from benchmarks.support.harness import (
    RECORDS,
    BenchResult,
    Measurement,
    config_keys,
    read_table,
    run_benchmark,
)
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import Hardware, load_hardware, reserved_bytes
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.parallel.planner.step_time import simulate_step
from meshwright.parallel.planner.workload import ModelWorkload
from meshwright.tools.cli import format_table
from meshwright.tools.processes import BenchError
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import run_workload
from meshwright.train.planning.resolve import best_attention, plan_run
from meshwright.train.planning.trace_model import model_workload

PUBLISHED = Path(__file__).with_name("published_runs.csv")
# hardware file by the GPU of a run: a framework's own, or the data sheet's
KINDS = {
    "h100-500w": "h100-500w-torchtitan",
    "h200": "h200-kempnerforge",
    "h100": "h100-sxm",
    "b200-capped": "b200",
}
CONFIGS = {
    "llama3-8b": "config=llama_8b.yaml",
    "llama3-70b": "config=llama_70b.yaml",
    "llama3-405b": "config=llama_405b.yaml",
    "kf-13b": "config=llama_8b.yaml model.dim=5120 model.n_layers=40 model.n_heads=40 model.ffn_dim=17920",
}
# by the first word of the source; torchao's runs are torchtitan's
PLANS = {"torchtitan": torchtitan_plan, "KempnerForge": kempnerforge_plan, "torchao": torchtitan_plan}
WORKLOADS = {
    "torchtitan": torchtitan_workload,
    "KempnerForge": kempnerforge_workload,
    "torchao": torchtitan_workload,
}
REDUCE_GRADIENTS = dict.fromkeys(PLANS, "every_micro_batch") | {"KempnerForge": "last_micro_batch"}
FLOAT8 = {"bf16": "none", "float8-tensorwise": "tensorwise"}
# frameworks whose source states the dtypes of its state, and that it reports reserved memory
MEMORY_OF = frozenset({"torchtitan"})
FITTED = frozenset({"h100-500w-torchtitan", "h200-kempnerforge"})  # hardware files with constants of the fit
ORDERED_APART = 1.10  # rows of one source that differ by a larger factor must be predicted in the right order


@dataclass(frozen=True)
class PublishedRun:
    """A published run, per GPU, with the columns of `benchmarks/published_runs.csv`.
    `peak_memory_gib` 0: not published."""

    source: str
    gpu: str
    n_gpus: int
    gpus_per_node: int
    model: str
    seq_len: int
    micro_batch: int
    grad_accum: int
    dp_replicate: int
    dp_shard: int
    tp: int
    async_tp: bool
    activation_checkpoint: str
    matmul_dtype: str
    compile: bool
    tokens_per_s_per_gpu: float
    peak_memory_gib: float

    @property
    def framework(self) -> str:
        """The first word of the source: the framework that ran."""
        return self.source.split()[0]

    @property
    def kind(self) -> str:
        """The hardware file to predict the run with."""
        return KINDS[self.gpu]

    @property
    def name(self) -> str:
        """A name that differs from those of the other rows."""
        parts = [
            self.framework,
            f"{self.model} seq {self.seq_len} x {self.micro_batch}",
            f"{self.n_gpus} {self.gpu}",
            f"tp {self.tp}" if self.tp > 1 else "",
            self.activation_checkpoint,
            self.matmul_dtype,
            "async tp" if self.async_tp else "",
            "" if self.compile else "eager",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class ComparedRun:
    """The predicted and the measured value of a run."""

    run: PublishedRun
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error; above 0 if the prediction is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class PublishedComparison:
    """The comparison of all published runs: tokens per second per GPU, by the files of frameworks, and where
    there is none by data sheets; reserved memory in GiB, of runs whose source states the dtypes of its
    state; and pairs of one source predicted in the wrong order, the faster first."""

    speed: tuple[ComparedRun, ...]
    by_data_sheet: tuple[ComparedRun, ...]
    memory: tuple[ComparedRun, ...]
    wrong_order: tuple[tuple[PublishedRun, PublishedRun], ...]


def published_rows(path: Path = PUBLISHED) -> list[PublishedRun]:
    """Return the published runs of a file. Raises BenchError for a file that is not such a table, or names a
    model, framework or dtype that is not known."""
    try:
        rows = [{key: text or "0" for key, text in row.items()} for row in read_table(path)]
        runs = msgspec.convert(rows, list[PublishedRun], strict=False)
    except (OSError, ValueError) as error:
        raise BenchError(f"--runs {path}: {error}") from None
    for run in runs:
        for key, value, known in (
            ("model", run.model, CONFIGS),
            ("source", run.framework, PLANS),
            ("gpu", run.gpu, KINDS),
            ("matmul_dtype", run.matmul_dtype, FLOAT8),
        ):
            if value not in known:
                raise BenchError(f"--runs {path}: {key}={value}: use one of {', '.join(known)}")
    return runs


def plan_published(run: PublishedRun) -> tuple[Config, Plan]:
    """Return a published run as config and plan of this trainer.

    Both frameworks compute all logits at once. torchtitan's selective activation checkpointing keeps every
    second matrix product, and it compiles only the blocks. KempnerForge reduces gradients once per step
    (maybe_no_sync in kempnerforge/training/grad.py).
    """
    sequences = run.micro_batch * run.grad_accum * run.dp_replicate * run.dp_shard
    keys = {
        "parallel.dp_replicate": run.dp_replicate,
        "parallel.dp_shard": run.dp_shard,
        "parallel.tp": run.tp,
        "parallel.activation_checkpoint": run.activation_checkpoint,
        "parallel.selective_policy": "half_matmul",
        "parallel.reduce_gradients": REDUCE_GRADIENTS[run.framework],
        "parallel.compile.enabled": str(run.compile).lower(),
        "parallel.loss_chunk_tokens": 0,
        "model.max_seq_len": run.seq_len,
        "train.seq_len": run.seq_len,
        "parallel.async_tp": str(run.async_tp).lower(),
        "parallel.float8.recipe": FLOAT8[run.matmul_dtype],
        "parallel.float8.all_gather": str(run.matmul_dtype != "bf16").lower(),
        "parallel.float8.min_dim": 16,
        "train.micro_batch_size": run.micro_batch,
        "train.global_batch_size": sequences,
    }
    config = parse_config(
        [*config_keys(CONFIGS[run.model]), *(f"--{key}={value}" for key, value in keys.items())]
    )
    plan = plan_run(config.job, run.n_gpus, run.gpus_per_node)
    return config, replace(PLANS[run.framework](plan), attention=ATTENTION[run.gpu])


@cache
def trace_published(run: PublishedRun) -> tuple[Plan, ModelWorkload]:
    """Return the plan and the workload of a published run. Both frameworks write RMSNorm out, so that it is
    traced as on a CPU."""
    config, plan = plan_published(run)
    work = model_workload(config.model, replace(plan, attention="cpu"), run.seq_len)
    return plan, WORKLOADS[run.framework](plan, work)


def predict_tokens_per_s(run: PublishedRun, hardware: Hardware) -> float:
    """Return the predicted tokens per second per GPU."""
    plan, work = trace_published(run)
    times = step_times(plan, work, hardware, run.gpus_per_node)
    if run.framework == "KempnerForge":
        times = kempnerforge_times(plan, work, hardware, times)
    return plan.global_batch_size * run.seq_len / simulate_step(plan, times).step_s / run.n_gpus


OWN = RECORDS / "2026-11-26-gpu.json"
OWN_KIND = "h200"
NOT_COMPUTED = "activations in host memory"  # copies to host memory decide


@cache
def own_runs() -> dict[str, float]:
    """Return tokens per second by case of `benchmarks.gpu`, of this project's own H200: of all cases that ran
    but NOT_COMPUTED."""
    cases = json.loads(OWN.read_text(encoding="utf-8"))["figures"]["cases"]
    return {
        name: case["run"]["tokens_per_s_per_rank"]
        for name, case in cases.items()
        if "run" in case and name != NOT_COMPUTED
    }


def predict_own_tokens_per_s(case: str, hardware: Hardware) -> float:
    """Return the predicted tokens per second of a case, as the project was when it ran."""
    job = parse_config(make_setup(case, False, 1, ()).command_line()).job
    plan = plan_run(job, 1, attention=best_attention(job, hardware))
    work = run_workload(job, plan)
    times = own_h200_times(plan, work, hardware, step_times(plan, work, hardware, 1))
    return plan.global_batch_size * job.seq_len / simulate_step(plan, times).step_s


def predict_reserved_gib(run: PublishedRun, hardware: Hardware) -> float:
    """Return the predicted GiB that the allocator reserves on each GPU."""
    return reserved_bytes(predict_step_memory(*trace_published(run)), hardware) / GIB


def compare_published(runs: Sequence[PublishedRun]) -> PublishedComparison:
    """Predict every run and compare."""
    kinds = load_hardware()
    speed = tuple(
        ComparedRun(run, predict_tokens_per_s(run, kinds[run.kind]), run.tokens_per_s_per_gpu) for run in runs
    )
    fitted, by_sheet = (
        tuple(row for row in speed if (row.run.kind in FITTED) == known) for known in (True, False)
    )
    known = [run for run in runs if run.peak_memory_gib and run.framework in MEMORY_OF]
    memory = tuple(
        ComparedRun(run, predict_reserved_gib(run, kinds[run.kind]), run.peak_memory_gib) for run in known
    )
    order = tuple((a.run, b.run) for a, b in wrong_order(speed))
    return PublishedComparison(fitted, by_sheet, memory, order)


def wrong_order(rows: Iterable[ComparedRun]) -> list[tuple[ComparedRun, ComparedRun]]:
    """Return the pairs of runs of one framework whose measured speeds differ by more than ORDERED_APART and
    whose predicted order is wrong."""
    pairs = itertools.permutations(rows, 2)
    return [
        (fast, slow)
        for fast, slow in pairs
        if fast.run.framework == slow.run.framework
        and fast.measured > ORDERED_APART * slow.measured
        and fast.predicted <= slow.predicted
    ]


def mean_error(rows: Iterable[ComparedRun]) -> float:
    """Return the mean of the absolute errors."""
    return statistics.mean(abs(row.error) for row in rows)


def worst_error(rows: Iterable[ComparedRun]) -> float:
    """Return the largest absolute error."""
    return max(abs(row.error) for row in rows)


def check_published(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Compare all published runs."""
    comparison = compare_published(published_rows(options.runs))
    return BenchResult(None, published_figures(comparison), published_text(comparison))


def published_figures(comparison: PublishedComparison) -> dict[str, Any]:
    """Return the comparison as plain data."""
    figures: dict[str, Any] = {
        "wrong_order": [[fast.name, slow.name] for fast, slow in comparison.wrong_order]
    }
    for name, rows in (
        ("tokens_per_s_per_gpu", comparison.speed),
        ("by_data_sheet", comparison.by_data_sheet),
        ("reserved_gib", comparison.memory),
    ):
        figures[name] = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
        if rows:
            figures |= {f"{name}_mean_error": mean_error(rows), f"{name}_worst_error": worst_error(rows)}
    return figures


def published_text(comparison: PublishedComparison) -> str:
    """Return the comparison as tables."""
    wrong = [f"  {fast.name} is faster than {slow.name}" for fast, slow in comparison.wrong_order]
    order = (
        f"pairs of one source that differ by more than {ORDERED_APART - 1:.0%} and are predicted in the "
        f"wrong order: {len(wrong)}"
    )
    parts = [
        ("tokens per second per GPU", "speed", comparison.speed, ",.0f"),
        ("same, by data sheets", "by data sheets", comparison.by_data_sheet, ",.0f"),
        ("reserved GiB", "memory", comparison.memory, ".1f"),
    ]
    return "\n\n".join(
        [
            *(_table(title, rows, form) for title, _, rows, form in parts),
            *(_summary(name, rows) for _, name, rows, _ in parts if rows),
            "\n".join([order, *wrong]),
            "Constants were fitted to all rows but those by data sheets: `python -m benchmarks.fit` has the "
            "errors on unseen rows.",
        ]
    )


def _table(title: str, rows: Sequence[ComparedRun], form: str) -> str:
    cells = [
        (row.run.name, format(row.predicted, form), format(row.measured, form), f"{row.error:+.1%}")
        for row in rows
    ]
    return format_table((title, "predicted", "measured", "error"), cells)


def _summary(title: str, rows: Sequence[ComparedRun]) -> str:
    return f"{title}: mean error {mean_error(rows):.1%}, worst {worst_error(rows):.1%} of {len(rows)} runs"


def add_published_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `published`."""
    parser.add_argument(
        "--runs",
        type=Path,
        default=PUBLISHED,
        metavar="FILE.csv",
        help="other runs, with the columns of benchmarks/published_runs.csv",
    )


MEASUREMENT = Measurement(
    "published",
    add_published_options,
    check_published,
    description=(
        "Predict published training runs with the planner, using hardware files of their machines and "
        "frameworks (configs/hardware), and compare tokens per second and reserved memory with the published "
        "measurements. Constants were fitted to the rows of the default file: see `fit`."
    ),
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
