"""Predicted against measured: real runs of small models on a CPU with gloo, and what the planner said of them
with the calibrated hardware file."""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware
from meshwright.tools.bench.harness import BenchResult, Measurement, config_keys
from meshwright.tools.bench.train_run import (
    ONLY_TRAINING,
    WARM_UP_STEPS,
    RunFigures,
    Setup,
    config_to_record,
    measure_run,
    resolve,
)
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.report import find_kind
from meshwright.train.config import TrainingJob
from meshwright.train.planning.device_defaults import best_attention
from meshwright.train.planning.predict import predict
from meshwright.train.planning.resolve import plan_run

COMMON = f"{ONLY_TRAINING} parallel.plan=manual run.device=cpu"


@dataclass(frozen=True)
class PredictionCase:
    """A run with these config keys of train.main. Of cases of one `sweep`, alike in model and processes, all
    with `choice`, a planner would choose one."""

    name: str
    sweep: str
    processes: int
    keys: tuple[str, ...]
    choice: bool = True


MODELS = {
    "small": (
        "model.dim=256 model.n_layers=4 model.n_heads=4 model.n_kv_heads=4 model.ffn_dim=768 "
        "model.vocab_size=2048 model.max_seq_len=256 train.seq_len=256"
    ),
    "large": (
        "model.dim=512 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 model.ffn_dim=1536 "
        "model.vocab_size=2048 model.max_seq_len=256 train.seq_len=256"
    ),
}
BATCH = {"small": 8, "large": 4}  # sequences of a step


def cpu_cases() -> list[PredictionCase]:
    """1 to 4 ranks of two models. The small one at 2 ranks is tried with every mix of degrees, with and
    without full checkpointing."""
    sweep = [
        _case("small", degrees, mode)
        for degrees in ((2, 1, 1), (1, 2, 1), (1, 1, 2))
        for mode in ("none", "full")
    ]
    return [
        _case("small", (1, 1, 1), "none"),
        *sweep,
        _case("small", (1, 2, 1), "selective"),
        _case("small", (1, 2, 1), "none", compiled=False),
        _case("small", (2, 2, 1), "none"),
        _case("small", (1, 2, 2), "none"),
        _case("large", (1, 2, 1), "none"),
        _case("large", (1, 2, 1), "full"),
        _case("large", (1, 1, 2), "none"),
        _case("large", (1, 4, 1), "none"),
    ]


def _case(model: str, degrees: tuple[int, int, int], mode: str, compiled: bool = True) -> PredictionCase:
    """`degrees` of dp_replicate, dp_shard, tp; the global batch in one micro batch."""
    replicate, shard, tp = degrees
    processes = replicate * shard * tp
    keys = (
        f"{COMMON} {MODELS[model]} parallel.dp_replicate={replicate} parallel.dp_shard={shard} "
        f"parallel.tp={tp} parallel.activation_checkpoint={mode} "
        f"parallel.compile.enabled={str(compiled).lower()} train.global_batch_size={BATCH[model]} "
        f"train.micro_batch_size={BATCH[model] // (replicate * shard)}"
    )
    name = " ".join([model, f"{replicate}x{shard}x{tp}", mode, *([] if compiled else ["eager"])])
    return PredictionCase(name, f"{model}, {processes} processes", processes, config_keys(keys), compiled)


THREADS = 1  # of a process
MEAN_ERROR, TAU, REGRET = 0.15, 0.8, 0.05  # what the project asks for of a CPU


@dataclass(frozen=True)
class Predicted:
    """Of one rank: a step's seconds, and the peak of what it allocates."""

    step_s: float
    peak_gib: float


@dataclass(frozen=True)
class PredictionRow:
    """One run."""

    name: str
    sweep: str
    choice: bool
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative; above 0 the prediction is too high."""
        return self.predicted_s / self.measured_s - 1


def add_predictions_options(parser: argparse.ArgumentParser) -> None:
    """Options of `predictions`."""
    add = parser.add_argument
    add("--hardware", metavar="KIND", default="cpu", help="hardware file to predict with (default cpu)")
    words = f"optimizer steps of a run (default 10; the first {WARM_UP_STEPS} do not count)"
    add("--steps", type=positive, default=10, metavar="N", help=words)
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each (default 2)")


def compare_predictions(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Configs by name, figures, and a text. Raises BenchError, and what a run's config may raise."""
    hardware = find_kind(options.hardware, "--hardware")
    keys = [f"--train.steps={options.steps}", *overrides]
    cases = {case: Setup(case.processes, THREADS, [*case.keys, *keys]) for case in cpu_cases()}
    configs = {case: resolve(setup) for case, setup in cases.items()}
    predicted = {
        case: predict_run(config.job, case.processes, THREADS, hardware) for case, config in configs.items()
    }
    runs = run_in_turn(cases, options.rounds)
    rows = [
        PredictionRow(case.name, case.sweep, case.choice, predicted[case].step_s, step_seconds(runs[case]))
        for case in cases
    ]
    figures = {
        "hardware_file": hardware.name,
        **summarise(rows),
        "rows": [{**dataclasses.asdict(row), "error": row.error} for row in rows],
        "step_times_s": {case.name: [run.step_times_s for run in runs[case]] for case in cases},
    }
    recorded = {case.name: config_to_record(config) for case, config in configs.items()}
    return BenchResult(recorded, figures, predictions_text(rows))


def predict_run(job: TrainingJob, processes: int, threads: int, hardware: Hardware) -> Predicted:
    """What the planner says; of a CPU with as many of its cores as the run uses."""
    hardware = dataclasses.replace(hardware, cores=min(hardware.cores, processes * threads))
    plan = plan_run(job, processes, attention=best_attention(job, hardware))
    prediction = predict(job, plan, hardware, processes)
    return Predicted(prediction.timeline.step_s, prediction.memory.peak_bytes / GIB)


def run_in_turn(cases: Mapping[PredictionCase, Setup], rounds: int) -> dict[PredictionCase, list[RunFigures]]:
    """Each `rounds` times: all of them, then all of them again, so that a machine that drifts hurts all
    alike."""
    runs: dict[PredictionCase, list[RunFigures]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case, setup in cases.items():
            runs[case].append(measure_run(setup, {}))
            print(
                f"round {turn + 1} {case.name}: {1e3 * step_seconds(runs[case][-1:]):,.0f} ms",
                file=sys.stderr,
                flush=True,
            )
    return runs


def step_seconds(runs: Sequence[RunFigures]) -> float:
    """The median over the steps of all runs after the warm-up."""
    counted = [run.step_times_s[min(WARM_UP_STEPS, len(run.step_times_s) - 1) :] for run in runs]
    return statistics.median(itertools.chain.from_iterable(counted))


def summarise(rows: Sequence[PredictionRow]) -> dict[str, Any]:
    """Mean and worst error, tau, and the regret of every sweep with a choice."""
    return {
        "mean_error": statistics.mean(abs(row.error) for row in rows),
        "worst_error": max(abs(row.error) for row in rows),
        "tau": kendall_tau([row.predicted_s for row in rows], [row.measured_s for row in rows]),
        "regret": regrets(rows),
    }


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Of all pairs, the share that both put in the same order less the share that they do not: 1 for the same
    order, -1 for the opposite (Kendall, A New Measure of Rank Correlation, 1938). Ties count for neither."""
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    products = [(a - b) * (x - y) for (a, x), (b, y) in pairs]
    return (sum(p > 0 for p in products) - sum(p < 0 for p in products)) / len(pairs) if pairs else 1.0


def regrets(rows: Sequence[PredictionRow]) -> dict[str, float]:
    """By sweep, how much slower the plan predicted to be the fastest is than the fastest, as a share of its
    time."""
    found = {}
    for sweep in dict.fromkeys(row.sweep for row in rows if row.choice):
        those = [row for row in rows if row.sweep == sweep and row.choice]
        if len(those) > 1:
            chosen = min(those, key=lambda row: row.predicted_s)
            found[sweep] = chosen.measured_s / min(row.measured_s for row in those) - 1
    return found


def predictions_text(rows: Sequence[PredictionRow]) -> str:
    """The table, and what it comes to, beside what is asked for."""
    cells = [
        (row.name, f"{1e3 * row.predicted_s:,.0f}", f"{1e3 * row.measured_s:,.0f}", f"{row.error:+.1%}")
        for row in rows
    ]
    figures = summarise(rows)
    lines = [
        "run: model, dp_replicate x dp_shard x tp, activation checkpointing",
        f"mean error {figures['mean_error']:.1%} (asked: {MEAN_ERROR:.0%}), worst "
        f"{figures['worst_error']:.1%}; Kendall's tau {figures['tau']:.2f} (asked: {TAU})",
        *(
            f"the plan chosen for {sweep}: {regret:.1%} slower than the best (asked: {REGRET:.0%})"
            for sweep, regret in figures["regret"].items()
        ),
    ]
    table = format_table(("run", "predicted ms", "measured ms", "error"), cells)
    return "\n".join([table, "", *lines])


MEASUREMENT = Measurement(
    "predictions",
    add_predictions_options,
    compare_predictions,
    summary="the planner's predictions against real runs",
    description=(
        "Run configurations of 1 to 4 ranks on this CPU in turn, and compare each one's step time with what "
        "the planner says of it. Prints every error, their mean, Kendall's tau of the order, and how much "
        "slower than the best the plan is that the planner would choose. Calibrate first, on a machine where "
        "nothing else runs. `gpu` does the same on a GPU."
    ),
)
