"""Compare the planner's memory predictions with the real code, run as one rank on a fake process group; and
of compiled models of transformers with `tools.dryrun`."""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.harness import BenchResult, Measurement, config_keys, read_table, run_benchmark
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.tools.cli import format_table
from meshwright.tools.dryrun.__main__ import main as dry_run
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


# models of transformers, by model_type: their keys beside SIZES
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "vocab_size": 65536,
    "max_position_embeddings": 8192,
}
GROUPED, PADDED, HEADS = {"num_key_value_heads": 8}, {"pad_token_id": 0}, {"head_dim": 128}
FAMILIES: dict[str, dict[str, int]] = {
    **dict.fromkeys(("llama", "qwen2", "olmo2", "stablelm", "starcoder2"), GROUPED),
    **dict.fromkeys(("phi3", "smollm3"), GROUPED | PADDED),
    "gemma": GROUPED | HEADS,
    "glm": GROUPED | HEADS | PADDED,
    "gpt_neox": {},
}
SHIPPED = ("qwen3_8b", "mistral_7b")
ALLOCATED_ERROR, LEAST_RESERVED, MOST_RESERVED = 0.02, 0.0, 0.08  # targets: beside a dry run


@dataclass(frozen=True)
class DryRunRow:
    """Errors of predicted allocated and reserved memory beside a dry run of 8 GPUs, and its host waits."""

    name: str
    allocated_error: float
    reserved_error: float
    host_waits: int

    @property
    def within(self) -> bool:
        """Whether both are within the targets."""
        reserved = LEAST_RESERVED <= self.reserved_error <= MOST_RESERVED
        return abs(self.allocated_error) <= ALLOCATED_ERROR and reserved


def dry_run_arguments(name: str) -> list[str]:
    """Return the arguments of tools.dryrun for a shipped config or a family, with two layers."""
    if name in SHIPPED:
        return [f"--config={name}.yaml", "--model.args.num_hidden_layers=2"]
    args = json.dumps({"model_type": name, **SIZES, **FAMILIES[name]})
    factory = "--model.factory=meshwright.models.from_transformers:causal_lm"
    return [factory, f"--model.args={args}", "--parallel.param_dtype=bfloat16", "--train.seq_len=8192"]


def compare_dry_run(name: str, overrides: Sequence[str] = ()) -> DryRunRow:
    """Predict a model's memory, and run it on the fake H100."""
    text = io.StringIO()
    keys = ["--parallel.activation_checkpoint=none", *overrides]
    with contextlib.redirect_stdout(text):
        dry_run(["--gpus=8", "--json", *dry_run_arguments(name), *keys])
    run = json.loads(text.getvalue())
    allocated, reserved = (
        relative_error(run["predicted"][key], run[key]) for key in ("peak_memory_gib", "reserved_memory_gib")
    )
    return DryRunRow(name, allocated, reserved, run["host_waits"])


def compare_dry_runs(overrides: Sequence[str]) -> BenchResult:
    """Compare all families and shipped configs with their dry runs."""
    rows = [compare_dry_run(name, overrides) for name in (*SHIPPED, *FAMILIES)]
    cells = [
        (r.name, f"{r.allocated_error:+.1%}", f"{r.reserved_error:+.1%}", str(r.host_waits)) for r in rows
    ]
    within = all(row.within for row in rows)
    text = format_table(("model, two layers", "allocated", "reserved", "host waits"), cells)
    figures = {"rows": [dataclasses.asdict(row) for row in rows], "within": within}
    return BenchResult(None, figures, f"{text}\n\n{'all' if within else 'NOT all'} within the targets")


def read_cases() -> list[PlanCase]:
    """Return all plans to compare."""
    return [PlanCase(row["config"], int(row["ranks"]), row["keys"]) for row in read_table(PLANS)]


def compare_memory(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict and simulate all plans. Raises ConfigError and PlanError."""
    if options.dry_runs:
        return compare_dry_runs(overrides)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's option."""
    parser.add_argument(
        "--dry-runs",
        action="store_true",
        help="compare compiled models of transformers with tools.dryrun instead (10 minutes)",
    )


MEASUREMENT = Measurement(
    "memory",
    add_options,
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
