"""Compare the planner's memory predictions with the real code, run as one rank on a fake process group."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.harness import BenchResult, Measurement, config_keys, read_table, run_benchmark
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.tools.cli import format_table
from meshwright.tools.plan.check import EXACT_KINDS, relative_error
from meshwright.tools.simulate import simulate_run
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

PLANS = Path(__file__).with_name("memory_plans.csv")
EXACT_ERROR, MEAN_ERROR, WORST_ERROR = 0.01, 0.03, 0.08  # targets: of those kinds; mean and worst of the peak
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PlanCase:
    """A plan to compare: a shipped config, the number of ranks, and config keys without their dashes."""

    config: str
    ranks: int
    keys: str = ""

    @property
    def name(self) -> str:
        """The keys without their sections, or "as shipped"."""
        return " ".join(key.split(".", 1)[1] for key in self.keys.split()) or "as shipped"

    @property
    def arguments(self) -> list[str]:
        """The arguments of train.main for this plan, without compilation."""
        return [f"--config={self.config}.yaml", "--parallel.compile.enabled=false", *config_keys(self.keys)]


@dataclass(frozen=True)
class MemoryRow:
    """Predicted and simulated memory of one plan, in bytes of one rank. `peak_error`: predicted / simulated -
    1; `exact_error`: the largest such error of EXACT_KINDS."""

    case: PlanCase
    predicted: StepMemory
    simulated: StepMemory

    @property
    def peak_error(self) -> float:
        """The relative error of the predicted peak."""
        return relative_error(self.predicted.peak_bytes, self.simulated.peak_bytes)

    @property
    def exact_error(self) -> float:
        """The largest relative error, by absolute value, of EXACT_KINDS."""
        pairs = (
            (getattr(self.predicted.memory, kind), getattr(self.simulated.memory, kind))
            for kind in EXACT_KINDS
        )
        return max((relative_error(*pair) for pair in pairs), key=abs)


def read_cases() -> list[PlanCase]:
    """Return all plans to compare."""
    return [PlanCase(row["config"], int(row["ranks"]), row["keys"]) for row in read_table(PLANS)]


def compare_memory(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict and simulate all plans. Raises ConfigError and PlanError."""
    rows = []
    for case in read_cases():
        rows.append(compare_case(case, overrides))
        message = f"{case.config} {case.ranks} {case.name}: {rows[-1].peak_error:+.2%}"
        print(message, file=sys.stderr, flush=True)
    figures = {**summarize(rows), "rows": [_row_figures(row) for row in rows]}
    return BenchResult(None, figures, memory_text(rows))


def compare_case(case: PlanCase, overrides: Sequence[str] = ()) -> MemoryRow:
    """Predict and simulate one plan."""
    config = parse_config([*case.arguments, *overrides])
    plan = plan_run(config.job, case.ranks, GPUS_PER_NODE)
    return MemoryRow(case, predict_memory(config.job, plan), simulate_run(config.job, plan))


def summarize(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Return mean and worst error of the peak, the worst of the exact kinds, and whether targets are met."""
    errors = [abs(row.peak_error) for row in rows]
    mean, worst, exact = statistics.mean(errors), max(errors), max(abs(row.exact_error) for row in rows)
    within = mean <= MEAN_ERROR and worst <= WORST_ERROR and exact <= EXACT_ERROR
    return {
        "plans": len(rows),
        "mean_error": mean,
        "worst_error": worst,
        "exact_error": exact,
        "within": within,
    }


def memory_text(rows: Sequence[MemoryRow]) -> str:
    """Return the table and a summary with the targets."""
    head = ("model", "ranks", "plan", "exact kinds", "predicted GiB", "simulated GiB", "error")
    cells = [
        (
            row.case.config.removeprefix("llama_"),
            f"{row.case.ranks:,}",
            row.case.name,
            f"{row.exact_error:+.2%}",
            f"{row.predicted.peak_bytes / GIB:.2f}",
            f"{row.simulated.peak_bytes / GIB:.2f}",
            f"{row.peak_error:+.2%}",
        )
        for row in rows
    ]
    figures = summarize(rows)
    lines = [
        f"{figures['plans']} plans; peak: mean error {figures['mean_error']:.2%} (target: {MEAN_ERROR:.0%}), "
        f"worst {figures['worst_error']:.2%} (target: {WORST_ERROR:.0%})",
        f"parameters, gradients, optimizer state: worst error {figures['exact_error']:.2%} (target: "
        f"{EXACT_ERROR:.0%})",
        "all within the targets" if figures["within"] else "NOT within the targets",
    ]
    return "\n".join([format_table(head, cells), "", *lines])


def _row_figures(row: MemoryRow) -> dict[str, Any]:
    """Return a row as plain data, memory in GiB."""
    return {
        **dataclasses.asdict(row.case),
        "peak_error": row.peak_error,
        "exact_error": row.exact_error,
        "predicted_peak_gib": row.predicted.peak_bytes / GIB,
        "simulated_peak_gib": row.simulated.peak_bytes / GIB,
        "predicted": _by_kind(row.predicted),
        "simulated": _by_kind(row.simulated),
    }


def _by_kind(memory: StepMemory) -> dict[str, dict[str, float]]:
    """Return the maximum of each kind of memory, and each kind at the peak, in GiB."""
    return {"most": memory.memory.gib(), "at_peak": memory.at_peak.gib()}


MEASUREMENT = Measurement(
    "memory",
    lambda parser: None,
    compare_memory,
    description=(
        "Predict the memory of plans for 8B, 70B and 405B models on 1 to 4,096 ranks, and compare it with "
        "the memory that tools.simulate counts while the real model, optimizer and training step run on fake "
        "tensors. Simulations run without compilation, so it is off in the plans. This needs no GPU, starts "
        "no processes, and takes several minutes."
    ),
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
