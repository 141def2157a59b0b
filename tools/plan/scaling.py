"""`python -m tools.plan --sweep gpus=8..4096`: the plan and the predicted speed for each number of GPUs."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.mistakes import planned_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.explain import describe_choices, needed_gib
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.machines import Machines, machines_of_kind
from meshwright.tools.cli import format_table
from meshwright.tools.plan.report import seconds, time_to_train
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.fit import MAX_PROCESSES
from meshwright.train.planning.predict import Prediction, plan_for, predict, predict_needs, search_plans

BAR = 30  # characters of the longest bar
COLUMNS = {
    "tp": "tp",
    "cp": "cp",
    "cp_exchange": "exchange",
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "activation_checkpoint": "activation checkpoint",
    "reshard_after_forward": "reshard",
    "reduce_gradients": "reduce",
    "reshard_after_backward": "after backward",
    "micro_batch_size": "micro",
}
# by number of GPUs: the prediction of its plan, or why there is none
Rows = Mapping[int, Prediction | str]


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


def sweep(job: TrainingJob, counts: Sequence[int], gpus_per_node: int, hardware: Hardware) -> Rows:
    """Return for each number of GPUs the prediction of its plan (with plan=auto the best), or why there is
    none. Raises PlanError with all reasons if none is possible."""
    plan_row = _best_row if job.parallel.plan == "auto" else _config_row
    rows = {gpus: plan_row(job, machines_of_kind(hardware, gpus, gpus_per_node)) for gpus in counts}
    if all(isinstance(row, str) for row in rows.values()):
        raise PlanError(
            "--sweep: the run is possible on none of these numbers of GPUs.\n"
            + "\n".join(f"  {gpus}: {reason}" for gpus, reason in rows.items())
        )
    return rows


def _best_row(job: TrainingJob, machines: Machines) -> Prediction | str:
    """Return the prediction of the plan that the planner chooses."""
    try:
        choice = search_plans(job, machines)
    except PlanError as error:
        return _first_line(error)
    if choice.ranked:
        return predict(job, choice.best.plan, machines.kind, machines.per_node)
    nearest = choice.does_not_fit[0]
    return (
        f"none of {len(choice.does_not_fit)} plans fits; the smallest needs {needed_gib(nearest)} of "
        f"{machines.available_bytes / GIB:.1f} GiB ({describe_choices(nearest.choices)})"
    )


def _config_row(job: TrainingJob, machines: Machines) -> Prediction | str:
    """Return the prediction of the config's own plan, if it is legal and fits."""
    try:
        plan = plan_for(job, machines)
    except PlanError as error:
        return _first_line(error)
    _, host, needed = predict_needs(job, plan, machines)
    if machines.fits(needed, host):
        return predict(job, plan, machines.kind, machines.per_node)
    of_device = f"needs {needed / GIB:.1f} of {machines.available_bytes / GIB:.1f} GiB"
    return f"does not fit: {machines.host_problem(host) or of_device}"


def _first_line(error: PlanError) -> str:
    first, *rest = str(error).splitlines()
    return first + (f" (and {len(rest)} more)" if rest else "")


def sweep_json(rows: Rows, tokens: float | None) -> str:
    """Return the rows as a JSON document."""
    return json.dumps({"sweep": [row_json(gpus, row, tokens) for gpus, row in rows.items()]}, indent=2)


def row_json(gpus: int, row: Prediction | str, tokens: float | None) -> dict[str, Any]:
    """Return a row as plain data; without a plan all values except gpus, fits and reason are null."""
    names = ("choices", "reserved_gib", "step_time_s", "tokens_per_s_per_gpu", "exposed_share")
    if isinstance(row, str):
        none = dict.fromkeys((*names, "days") if tokens else names)
        return {"gpus": gpus, "fits": False, "reason": row, **none}
    figures = row.reserved_bytes / GIB, row.timeline.step_s, row.tokens_per_s_per_gpu
    values = (settings_of(row.plan), *figures, row.timeline.exposed_share)
    days = {"days": time_to_train(row, gpus, tokens)["days"]} if tokens else {}
    return {"gpus": gpus, "fits": True, "reason": None, **dict(zip(names, values, strict=True)), **days}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return degrees and settings of a plan. Those of the middle unit stand for all blocks, because the first
    and the last unit are not blocks."""
    planned = {key.partition(".")[2]: values[len(values) // 2] for key, values in planned_keys(plan).items()}
    exchange = planned["cp_exchange"] if plan.mesh.cp > 1 else "none"
    return {
        **{key: planned[key] for key in COLUMNS},
        "cp_exchange": exchange,
        "accumulation": plan.accumulation,
    }


def sweep_text(rows: Rows, tokens: float | None) -> str:
    """Return a table with a bar for each number of GPUs, then the numbers without a plan, with reasons."""
    planned = {gpus: row for gpus, row in rows.items() if not isinstance(row, str)}
    best = max(row.tokens_per_s_per_gpu for row in planned.values())
    divides = any(row.plan.mesh.cp > 1 for row in planned.values())
    keys = [key for key in COLUMNS if divides or key not in ("cp", "cp_exchange")]
    days = [f"days for {tokens:.3g}"] if tokens else []
    head = ["GPUs", *(COLUMNS[key] for key in keys), "GiB", "step", "exposed", *days, "tokens/s per GPU"]
    cells = [_cells(gpus, row, keys, best, tokens) for gpus, row in planned.items()]
    reasons = "\n".join(f"{gpus} GPUs: {row}" for gpus, row in rows.items() if isinstance(row, str))
    return "\n\n".join(filter(None, (format_table(head, cells), reasons)))


def _cells(gpus: int, row: Prediction, keys: Sequence[str], best: float, tokens: float | None) -> list[str]:
    settings, timeline, rate = settings_of(row.plan), row.timeline, row.tokens_per_s_per_gpu
    days = [f"{time_to_train(row, gpus, tokens)['days']:,.1f}"] if tokens else []
    return [
        str(gpus),
        *(str(settings[key]).lower() for key in keys),
        f"{row.reserved_bytes / GIB:.1f}",
        seconds(timeline.step_s),
        f"{timeline.exposed_share:.1%}",
        *days,
        f"{rate:>8,.0f} {'#' * max(1, round(BAR * rate / best))} {rate / best:.0%}",
    ]
