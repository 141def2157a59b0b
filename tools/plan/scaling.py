"""`python -m tools.plan --sweep gpus=8..4096`: the plan and the predicted speed for each number of GPUs."""

import re
from collections.abc import Sequence
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.mistakes import planned_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.explain import describe_choices, needed_gib
from meshwright.parallel.planner.hardware import Hardware, Machines, machines_of_kind
from meshwright.tools.cli import format_table
from meshwright.tools.plan.report import FIGURES, TITLES, Goal
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.fit import MAX_PROCESSES
from meshwright.train.planning.predict import Prediction, plan_for, predict, predict_needs, search_plans

BAR = 30  # characters of the longest bar
SHOWN = ("reserved_gib", "step_time_s", "exposed_share", "days", "cost")
COLUMNS = [key for key in TITLES if key not in ("activation_checkpoint_blocks", "prefetch")]


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
    job: TrainingJob, counts: Sequence[int], gpus_per_node: int, hardware: Hardware, goal: Goal
) -> list[dict[str, Any]]:
    """Return for each number of GPUs its plan (with plan=auto the best) and figures, with those of the goal,
    or the reason why there is none. Raises PlanError with all reasons if none is possible."""
    rows = []
    for gpus in counts:
        machines = machines_of_kind(hardware, gpus, gpus_per_node)
        rows.append({"gpus": gpus, **_figures(predict_on(job, machines), machines, goal)})
    if not any(row["fits"] for row in rows):
        reasons = "\n".join(f"  {row['gpus']}: {row['reason']}" for row in rows)
        raise PlanError(f"--sweep: the run is possible on none of these numbers of GPUs.\n{reasons}")
    return rows


def predict_on(job: TrainingJob, machines: Machines) -> Prediction | str:
    """Return the prediction of the plan that the planner chooses, or of the config's own; or the first reason
    why there is none that is legal and fits."""
    available = f"{machines.available_bytes / GIB:.1f} GiB"
    try:
        if job.parallel.plan == "auto":
            choice = search_plans(job, machines)
            if not choice.ranked:
                nearest = choice.does_not_fit[0]
                smallest = f"{needed_gib(nearest)} of {available} ({describe_choices(nearest.choices)})"
                return f"none of {len(choice.does_not_fit)} plans fits; the smallest needs {smallest}"
            plan = choice.best.plan
        else:
            plan = plan_for(job, machines)
            _, host, needed = predict_needs(job, plan, machines)
            if not machines.fits(needed, host):
                of_device = f"needs {needed / GIB:.1f} of {available}"
                return f"does not fit: {machines.host_problem(host) or of_device}"
    except PlanError as error:
        first, *rest = str(error).splitlines()
        return first + (f" (and {len(rest)} more)" if rest else "")
    return predict(job, plan, machines.kind, machines.per_node)


def _figures(row: Prediction | str, machines: Machines, goal: Goal) -> dict[str, Any]:
    """Return a row as plain data; without a plan all values except fits and reason are null."""
    names = ("choices", "reserved_gib", "step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_share")
    if isinstance(row, str):
        return {"fits": False, "reason": row, **dict.fromkeys(names)}
    rate = row.tokens_per_s_per_gpu
    figures = row.reserved_bytes / GIB, row.timeline.step_s, rate, row.mfu
    values = (settings_of(row.plan), *figures, row.timeline.exposed_share)
    time = goal.time_to_train(rate, machines)
    return {"fits": True, "reason": None, **dict(zip(names, values, strict=True)), **time}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return degrees and settings of a plan. Those of the middle unit stand for all blocks, because the first
    and the last unit are not blocks."""
    planned = {key.partition(".")[2]: values[len(values) // 2] for key, values in planned_keys(plan).items()}
    if plan.mesh.cp == 1:
        planned["cp_exchange"] = "none"
    return {**{key: planned[key] for key in COLUMNS}, "accumulation": plan.accumulation}


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a bar for each number of GPUs, then the numbers without a plan, with reasons."""
    planned = [row for row in rows if row["fits"]]
    best = max(row["tokens_per_s_per_gpu"] for row in planned)
    uses_cp = any(row["choices"]["cp"] > 1 for row in planned)
    keys = [key for key in COLUMNS if uses_cp or key not in ("cp", "cp_exchange")]
    figures = [name for name in SHOWN if name in planned[0]]
    titles = [*(TITLES[key] for key in keys), *(FIGURES[name][0] for name in figures)]
    head = ["GPUs", *titles, "tokens/s per GPU"]
    reasons = "\n".join(f"{row['gpus']} GPUs: {row['reason']}" for row in rows if not row["fits"])
    return "\n\n".join(
        filter(None, (format_table(head, [_cells(row, keys, figures, best) for row in planned]), reasons))
    )


def _cells(row: dict[str, Any], keys: Sequence[str], figures: Sequence[str], best: float) -> list[str]:
    rate = row["tokens_per_s_per_gpu"]
    return [
        str(row["gpus"]),
        *(str(row["choices"][key]).lower() for key in keys),
        *(FIGURES[name][1](row[name]) for name in figures),
        f"{rate:>8,.0f} {'#' * max(1, round(BAR * rate / best))} {rate / best:.0%}",
    ]
