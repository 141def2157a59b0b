"""Compare the planner's predictions, by the calibrated hardware file, with real runs on a CPU with gloo."""

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.harness import BenchResult, Measurement, config_keys, run_benchmark
from benchmarks.train import (
    ONLY_TRAINING,
    WARM_UP_STEPS,
    RunFigures,
    Setup,
    config_to_record,
    measure_run,
    resolve,
)
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware
from meshwright.tools.calibrate import HERE, measure_this_machine
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.report import find_kind
from meshwright.train.config import TrainingJob
from meshwright.train.planning.predict import predict
from meshwright.train.planning.resolve import best_attention, plan_run

COMMON = f"{ONLY_TRAINING} parallel.plan=manual run.device=cpu"


@dataclass(frozen=True)
class PredictionCase:
    """A run with config keys of train.main. Cases of one `sweep` have the same model and number of processes;
    those with `choice` are the plans among which the planner would choose."""

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
    """Return the cases: two models on 1 to 4 ranks. The small model on 2 ranks has every combination of
    degrees, without and with full activation checkpointing."""
    return [
        _case("small", (1, 1, 1), "none"),
        *(_case("small", d, mode) for d in ((2, 1, 1), (1, 2, 1), (1, 1, 2)) for mode in ("none", "full")),
        _case("small", (1, 2, 1), "selective"),
        _case("small", (1, 2, 1), "none", compiled=False),
        _case("small", (2, 2, 1), "none"),
        _case("small", (1, 2, 2), "none"),
        _case("large", (1, 2, 1), "none"),
        _case("large", (1, 2, 1), "full"),
        _case("large", (1, 1, 2), "none"),
        _case("large", (1, 4, 1), "none"),
    ]


def choice_cases() -> list[PredictionCase]:
    """Return 12 plans of the small model on 2 ranks and 12 on 4 ranks: all degrees, without and with full
    activation checkpointing, on 2 ranks with one or two micro batches per step."""
    return [
        _case("small", (replicate, shard, ranks // (replicate * shard)), mode, parts=parts)
        for ranks, micro_batches in ((2, (1, 2)), (4, (1,)))
        for replicate, shard in itertools.product((1, 2, 4), repeat=2)
        if replicate * shard <= ranks
        for mode in ("none", "full")
        for parts in micro_batches
    ]


def _case(
    model: str, degrees: tuple[int, int, int], mode: str, compiled: bool = True, parts: int = 1
) -> PredictionCase:
    """Return a case with `degrees` of dp_replicate, dp_shard, tp, and `parts` micro batches per step."""
    replicate, shard, tp = degrees
    processes = replicate * shard * tp
    keys = (
        f"{COMMON} {MODELS[model]} parallel.dp_replicate={replicate} parallel.dp_shard={shard} "
        f"parallel.tp={tp} parallel.activation_checkpoint={mode} "
        f"parallel.compile.enabled={str(compiled).lower()} train.global_batch_size={BATCH[model]} "
        f"train.micro_batch_size={BATCH[model] // (replicate * shard) // parts}"
    )
    labels = [*([] if compiled else ["eager"]), *([f"{parts} micro batches"] if parts > 1 else [])]
    name = " ".join([model, f"{replicate}x{shard}x{tp}", mode, *labels])
    return PredictionCase(name, f"{model}, {processes} processes", processes, config_keys(keys), compiled)


THREADS = 1  # per process
MEAN_ERROR, WORST_ERROR, TAU, REGRET = 0.06, 0.15, 0.8, 0.03  # targets on a CPU


@dataclass(frozen=True)
class Predicted:
    """Predicted seconds of a step, and peak allocated memory of one rank."""

    step_s: float
    peak_gib: float


@dataclass(frozen=True)
class PredictionRow:
    """Predicted and measured step time of one run."""

    name: str
    sweep: str
    choice: bool
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error; above 0 if the prediction is too high."""
        return self.predicted_s / self.measured_s - 1


def add_predictions_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predictions`."""
    add = parser.add_argument
    add(
        "--hardware",
        metavar="KIND",
        default=HERE,
        help="hardware file to predict with (default here: this machine measures itself)",
    )
    add(
        "--choice",
        action="store_true",
        help="run 12 plans on 2 ranks and 12 on 4 instead, to see how the plan that the planner would choose "
        "compares with the best",
    )
    text = f"optimizer steps of a run (default 10; the first {WARM_UP_STEPS} are not counted)"
    add("--steps", type=positive, default=10, metavar="N", help=text)
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each configuration (default 2)")


def compare_predictions(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict and measure all cases. Raises BenchError, ConfigError, PlanError and DataError."""
    keys = [f"--train.steps={options.steps}", *overrides]
    chosen = choice_cases() if options.choice else cpu_cases()
    cases = {case: Setup(case.processes, THREADS, [*case.keys, *keys]) for case in chosen}
    configs = {case: resolve(setup) for case, setup in cases.items()}
    predicted_s: dict[PredictionCase, list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as cache:

        def predict_now(case: PredictionCase) -> None:
            """The machine's speed drifts, so every run has a prediction of its own."""
            machine = find_machine(options.hardware, case, cases[case], cache)
            prediction = predict_run(configs[case].job, case.processes, THREADS, machine)
            predicted_s[case].append(prediction.step_s)

        runs = run_in_turn(cases, options.rounds, before=predict_now)
    rows = [
        PredictionRow(
            case.name, case.sweep, case.choice, statistics.median(predicted_s[case]), step_seconds(runs[case])
        )
        for case in cases
    ]
    figures = {
        "hardware": options.hardware,
        **summarize(rows),
        "rows": [{**dataclasses.asdict(row), "error": row.error} for row in rows],
        "predicted_s": {case.name: predicted_s[case] for case in cases},
        "step_times_s": {case.name: [run.step_times_s for run in runs[case]] for case in cases},
    }
    recorded = {case.name: config_to_record(config) for case, config in configs.items()}
    return BenchResult(recorded, figures, predictions_text(rows))


def find_machine(kind: str, case: PredictionCase, setup: Setup, cache: str) -> Hardware:
    """Return the hardware of a kind, or this machine as it measures itself now for the case."""
    if kind != HERE:
        return find_kind(kind, "--hardware")
    for kept in Path(cache).glob("hardware-*.yaml"):
        kept.unlink()
    keys = [*sized(setup.arguments), f"--parallel.compile.cache_dir={cache}"]
    return measure_this_machine(keys, case.processes, THREADS, "cpu")[0]


def sized(arguments: Sequence[str]) -> list[str]:
    """Return a run's arguments without the plan's degrees: the sizes of its operations on any plan."""
    open_keys = ("parallel.tp", "parallel.dp_", "train.micro_batch_size", "train.global_batch_size")
    return [key for key in arguments if not key.removeprefix("--").startswith(open_keys)]


def predict_run(job: TrainingJob, processes: int, threads: int, hardware: Hardware) -> Predicted:
    """Return the planner's prediction of a run, with only as many CPU cores as the run uses."""
    hardware = dataclasses.replace(hardware, cores=min(hardware.cores, processes * threads))
    plan = plan_run(job, processes, attention=best_attention(job, hardware))
    prediction = predict(job, plan, hardware, processes)
    return Predicted(prediction.timeline.step_s, prediction.memory.peak_bytes / GIB)


def run_in_turn(
    cases: Mapping[PredictionCase, Setup],
    rounds: int,
    before: Callable[[PredictionCase], None],
) -> dict[PredictionCase, list[RunFigures]]:
    """Run all cases in turn, `rounds` times, so that a drift of the machine's speed affects all equally.
    `before` is called before each run."""
    runs: dict[PredictionCase, list[RunFigures]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case, setup in cases.items():
            before(case)
            runs[case].append(measure_run(setup, {}))
            step_ms = 1e3 * step_seconds(runs[case][-1:])
            print(f"round {turn + 1} {case.name}: {step_ms:,.0f} ms", file=sys.stderr, flush=True)
    return runs


def step_seconds(runs: Sequence[RunFigures]) -> float:
    """Return the median over the steps of all runs after the warm-up."""
    counted = [run.step_times_s[min(WARM_UP_STEPS, len(run.step_times_s) - 1) :] for run in runs]
    return statistics.median(itertools.chain.from_iterable(counted))


def summarize(rows: Sequence[PredictionRow]) -> dict[str, Any]:
    """Return mean and worst error, Kendall's tau, and the regret of every sweep with a choice."""
    return {
        "mean_error": statistics.mean(abs(row.error) for row in rows),
        "worst_error": max(abs(row.error) for row in rows),
        "bias": statistics.mean(row.error for row in rows),
        "tau": kendall_tau([row.predicted_s for row in rows], [row.measured_s for row in rows]),
        "regret": regrets(rows),
    }


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau: the share of pairs that both sequences order the same minus the share that they
    order oppositely; 1 for the same order, -1 for the opposite (Kendall, A New Measure of Rank Correlation,
    1938). Ties count as neither."""
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    products = [(a - b) * (x - y) for (a, x), (b, y) in pairs]
    return (sum(p > 0 for p in products) - sum(p < 0 for p in products)) / len(pairs) if pairs else 1.0


def regrets(rows: Sequence[PredictionRow]) -> dict[str, float]:
    """Return the regret by sweep: the extra time of the plan that is predicted to be fastest, as a share of
    the time of the plan that is fastest."""
    regret_by_sweep = {}
    for sweep in dict.fromkeys(row.sweep for row in rows if row.choice):
        choices = [row for row in rows if row.sweep == sweep and row.choice]
        if len(choices) > 1:
            chosen = min(choices, key=lambda row: row.predicted_s)
            regret_by_sweep[sweep] = chosen.measured_s / min(row.measured_s for row in choices) - 1
    return regret_by_sweep


def predictions_text(rows: Sequence[PredictionRow]) -> str:
    """Return the table and a summary with the targets."""
    cells = [
        (row.name, f"{1e3 * row.predicted_s:,.0f}", f"{1e3 * row.measured_s:,.0f}", f"{row.error:+.1%}")
        for row in rows
    ]
    figures = summarize(rows)
    lines = [
        "run: model, dp_replicate x dp_shard x tp, activation checkpointing",
        f"mean error {figures['mean_error']:.1%} (target: {MEAN_ERROR:.0%}), worst "
        f"{figures['worst_error']:.1%} (target: {WORST_ERROR:.0%}), on average {figures['bias']:+.1%}; "
        f"Kendall's tau {figures['tau']:.2f} (target: {TAU})",
        *(
            f"the plan chosen for {sweep}: {regret:.1%} slower than the best (target: {REGRET:.0%})"
            for sweep, regret in figures["regret"].items()
        ),
    ]
    table = format_table(("run", "predicted ms", "measured ms", "error"), cells)
    return "\n".join([table, "", *lines])


MEASUREMENT = Measurement(
    "predictions",
    add_predictions_options,
    compare_predictions,
    description=(
        "Run configurations of 1 to 4 ranks on this CPU in turn, and compare their step times with the "
        "planner's predictions. Print every error, the mean error, Kendall's tau of the order, and how much "
        "slower the plan that the planner would choose is than the best. Run nothing else meanwhile: the "
        "machine measures itself before each run. `gpu` makes this comparison on a GPU."
    ),
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
