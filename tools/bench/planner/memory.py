"""The planner's memory against the real code run as one rank on a fake process group, plan by plan."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.tools.bench.harness import BenchResult, Measurement, config_keys, read_table
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import simulate_run
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run

PLANS = Path(__file__).with_name("memory_plans.csv")
EXACT_KINDS = ("params", "grads", "optimizer")  # exact by nature
EXACT_ERROR, MEAN_ERROR, WORST_ERROR = 0.01, 0.03, 0.08  # asked of those kinds, and of the peak
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PlanCase:
    """A plan to compare: a shipped config, the ranks, and config keys without their dashes."""

    config: str
    ranks: int
    keys: str = ""

    @property
    def name(self) -> str:
        return " ".join(key.split(".", 1)[1] for key in self.keys.split()) or "as shipped"

    @property
    def arguments(self) -> list[str]:
        return [f"--config={self.config}.yaml", "--parallel.compile.enabled=false", *config_keys(self.keys)]


@dataclass(frozen=True)
class MemoryRow:
    """One plan: both figures in bytes, of one rank. `peak_error`: predicted / simulated - 1; `exact_error`:
    the largest such of the kinds that are exact by nature."""

    case: PlanCase
    predicted: StepMemory
    simulated: StepMemory

    @property
    def peak_error(self) -> float:
        return relative_error(self.predicted.peak_bytes, self.simulated.peak_bytes)

    @property
    def exact_error(self) -> float:
        pairs = (
            (getattr(self.predicted.memory, kind), getattr(self.simulated.memory, kind))
            for kind in EXACT_KINDS
        )
        return max((relative_error(*pair) for pair in pairs), key=abs)


def relative_error(predicted: float, simulated: float) -> float:
    """predicted / simulated - 1; 0 where both are 0, infinite where only the second is."""
    if simulated:
        return predicted / simulated - 1
    return float("inf") if predicted else 0.0


def read_cases(path: Path = PLANS) -> list[PlanCase]:
    """All plans that are compared."""
    return [PlanCase(row["config"], int(row["ranks"]), row["keys"]) for row in read_table(path)]


def compare_memory(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Figures and a text. Raises ConfigError and PlanError."""
    rows = []
    for case in read_cases(PLANS):
        rows.append(compare_case(case, overrides))
        said = f"{case.config} {case.ranks} {case.name}: {rows[-1].peak_error:+.2%}"
        print(said, file=sys.stderr, flush=True)
    figures = {**summarise(rows), "rows": [_row_figures(row) for row in rows]}
    return BenchResult(None, figures, memory_text(rows))


def compare_case(case: PlanCase, overrides: Sequence[str] = ()) -> MemoryRow:
    """One plan, predicted and simulated."""
    config = parse_config([*case.arguments, *overrides])
    plan = plan_run(config.job, case.ranks, GPUS_PER_NODE)
    return MemoryRow(case, predict_memory(config.job, plan), simulate_run(config.job, plan))


def summarise(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Mean and worst error of the peak, the worst of the exact kinds, and whether all are within what is
    asked."""
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
    """The table, and what it comes to, beside what is asked for."""
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
    figures = summarise(rows)
    lines = [
        f"{figures['plans']} plans; peak: mean error {figures['mean_error']:.2%} (asked: {MEAN_ERROR:.0%}), "
        f"worst {figures['worst_error']:.2%} (asked: {WORST_ERROR:.0%})",
        f"parameters, gradients, optimizer state: worst error {figures['exact_error']:.2%} (asked: "
        f"{EXACT_ERROR:.0%})",
        "all within what is asked" if figures["within"] else "NOT within what is asked",
    ]
    return "\n".join([format_table(head, cells), "", *lines])


def _row_figures(row: MemoryRow) -> dict[str, Any]:
    """A row as plain data, memory in GiB."""
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
    """The most of each kind, and each kind at the peak, in GiB."""
    return {"most": memory.memory.gib(), "at_peak": memory.at_peak.gib()}


MEASUREMENT = Measurement(
    "memory",
    lambda parser: None,
    compare_memory,
    summary="the planner's memory against the real code on fake tensors",
    description=(
        "Predict the memory of plans for 8B, 70B and 405B models on 1 to 4,096 ranks, and compare it with "
        "what tools.simulate counts while the real model, optimizer and training step run on fake tensors. A "
        "simulation is eager, so the plans are too. Needs no GPU and starts no processes; it takes several "
        "minutes."
    ),
)
