"""`python -m tools.plan --sweep gpus=8..4096`: the plan and the predicted speed for each number of GPUs."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.explain import needed_gib
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.host_memory import host_memory
from meshwright.tools.cli import format_table
from meshwright.tools.plan.report import Target, seconds, time_to_train
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import describe_choices
from meshwright.train.planning.predict import Prediction, predict, predict_memory, run_workload, search_plans
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.suggest import MAX_PROCESSES

BAR = 30  # characters of the longest bar


@dataclass(frozen=True)
class ScalingRow:
    """One number of GPUs: its plan (with plan=auto the best) and prediction, or why there is none."""

    gpus: int
    plan: Plan | None = None
    prediction: Prediction | None = None
    reason: str = ""


def read_sweep(text: str) -> list[int]:
    """Return the numbers of GPUs in a range such as "gpus=8..4096": the first one, doubled up to the last.
    Raises ConfigError for an invalid range."""
    match = re.fullmatch(r"(\w+)=(\d+)\.\.(\d+)", text)
    if not match:
        raise ConfigError(f"--sweep={text}: must have the form gpus=8..4096, the fewest and the most GPUs")
    name, low, high = match[1], int(match[2]), int(match[3])
    if name != "gpus":
        raise ConfigError(f"--sweep={text}: only gpus can be swept, as in gpus={low}..{high}")
    if not 1 <= low <= high <= MAX_PROCESSES:
        raise ConfigError(
            f"--sweep={text}: must ascend, from at least 1 to at most {MAX_PROCESSES}, as gpus=8..4096"
        )
    return [low * 2**n for n in range(MAX_PROCESSES.bit_length()) if low * 2**n <= high]


def sweep(
    job: TrainingJob, counts: Sequence[int], gpus_per_node: int, hardware: Hardware
) -> list[ScalingRow]:
    """Return a row for each number of GPUs. Raises PlanError with all reasons if none is possible."""
    make_row = _best_row if job.parallel.plan == "auto" else _config_row
    rows = [make_row(job, Target(gpus, min(gpus, gpus_per_node), hardware)) for gpus in counts]
    if not any(row.plan for row in rows):
        raise PlanError(
            "--sweep: the run is possible on none of these numbers of GPUs.\n"
            + "\n".join(f"  {row.gpus}: {row.reason}" for row in rows)
        )
    return rows


def _best_row(job: TrainingJob, target: Target) -> ScalingRow:
    """Return the row of the plan that the planner chooses."""
    machines = target.machines()
    try:
        choice = search_plans(job, target.gpus, machines)
    except PlanError as error:
        return ScalingRow(target.gpus, reason=_first_line(error))
    if not choice.ranked:
        nearest = choice.does_not_fit[0]
        needed = f"{needed_gib(nearest)} of {machines.available_bytes / GIB:.1f} GiB"
        return ScalingRow(
            target.gpus,
            reason=f"none of {len(choice.does_not_fit)} plans fits; the smallest needs {needed} "
            f"({describe_choices(nearest.choices)})",
        )
    return _predicted(job, target, choice.best.plan)


def _config_row(job: TrainingJob, target: Target) -> ScalingRow:
    """Return the row of the config's own plan, if it is legal and fits."""
    try:
        plan = plan_run(job, target.gpus, target.gpus_per_node, *target.best(job))
    except PlanError as error:
        return ScalingRow(target.gpus, reason=_first_line(error))
    machines, host = target.machines(), host_memory(plan, run_workload(job, plan))
    needed = machines.needed_bytes(predict_memory(job, plan), host)
    if machines.fits(needed, host):
        return _predicted(job, target, plan)
    of_device = f"needs {needed / GIB:.1f} of {machines.available_bytes / GIB:.1f} GiB"
    return ScalingRow(target.gpus, reason=f"does not fit: {machines.host_problem(host) or of_device}")


def _predicted(job: TrainingJob, target: Target, plan: Plan) -> ScalingRow:
    return ScalingRow(target.gpus, plan, predict(job, plan, target.machines().kind, target.gpus_per_node))


def _first_line(error: PlanError) -> str:
    first, *rest = str(error).splitlines()
    return first + (f" (and {len(rest)} more)" if rest else "")


def sweep_json(rows: Sequence[ScalingRow], tokens: float | None) -> str:
    """Return the rows as a JSON document."""
    return json.dumps({"sweep": [row_json(row, tokens) for row in rows]}, indent=2)


def row_json(row: ScalingRow, tokens: float | None) -> dict[str, Any]:
    """Return a row as plain data; without a plan all values except gpus, fits and reason are null."""
    prediction, values = row.prediction, _values(row)
    timeline = prediction.timeline if prediction else None
    plain = {
        "gpus": row.gpus,
        "fits": prediction is not None,
        "reason": row.reason or None,
        "choices": values,
        "reserved_gib": prediction and prediction.reserved_bytes / GIB,
        "step_time_s": timeline and timeline.step_s,
        "tokens_per_s_per_gpu": prediction and prediction.tokens_per_s_per_gpu,
        "exposed_share": timeline and timeline.exposed_share,
    }
    if tokens:
        plain["days"] = prediction and time_to_train(prediction, row.gpus, tokens)["days"]
    return plain


def _values(row: ScalingRow) -> dict[str, Any] | None:
    """Return degrees and settings of the row's plan. Those of the middle unit stand for all blocks, because
    the first and the last unit are not blocks."""
    if row.plan is None:
        return None
    mesh, unit = row.plan.mesh, row.plan.units[len(row.plan.units) // 2]
    return {
        "tp": mesh.tp,
        "cp": mesh.cp,
        "cp_exchange": row.plan.context.exchange if mesh.cp > 1 else "none",
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "activation_checkpoint": unit.activation_checkpoint,
        "reshard_after_forward": unit.reshard_after_forward,
        "reduce_gradients": unit.reduce_gradients,
        "reshard_after_backward": unit.reshard_after_backward,
        "micro_batch_size": row.plan.micro_batch_size,
        "accumulation": row.plan.accumulation,
    }


def sweep_text(rows: Sequence[ScalingRow], tokens: float | None) -> str:
    """Return a table with a bar for each number of GPUs, then the numbers without a plan, with reasons."""
    best = max(row.prediction.tokens_per_s_per_gpu for row in rows if row.prediction)
    divides = any(row.plan and row.plan.mesh.cp > 1 for row in rows)
    head = [
        "GPUs",
        "tp",
        *(["cp", "exchange"] if divides else []),
        "replicate",
        "shard",
        "activation checkpoint",
        "reshard",
        "reduce",
        "after backward",
        "micro",
        "GiB",
        "step",
        "exposed",
        *([f"days for {tokens:.3g}"] if tokens else []),
        "tokens/s per GPU",
    ]
    left_out = ("accumulation",) if divides else ("accumulation", "cp", "cp_exchange")
    cells = [_cells(row, row.prediction, best, tokens, left_out) for row in rows if row.prediction]
    reasons = "\n".join(f"{row.gpus} GPUs: {row.reason}" for row in rows if row.reason)
    return "\n\n".join(filter(None, (format_table(head, cells), reasons)))


def _cells(
    row: ScalingRow, prediction: Prediction, best: float, tokens: float | None, left_out: Sequence[str]
) -> list[str]:
    values, timeline, rate = _values(row) or {}, prediction.timeline, prediction.tokens_per_s_per_gpu
    settings = [str(value).lower() for key, value in values.items() if key not in left_out]
    days = [f"{time_to_train(prediction, row.gpus, tokens)['days']:,.1f}"] if tokens else []
    bar = "#" * max(1, round(BAR * rate / best))
    return [
        str(row.gpus),
        *settings,
        f"{prediction.reserved_bytes / GIB:.1f}",
        seconds(timeline.step_s),
        f"{timeline.exposed_share:.1%}",
        *days,
        f"{rate:>8,.0f} {bar} {rate / best:.0%}",
    ]
