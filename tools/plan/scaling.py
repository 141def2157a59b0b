"""`python -m tools.plan --sweep gpus=8..4096`: the best plan for each number of GPUs, and how the run
scales."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import AXES, Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.tools.cli import format_table
from meshwright.tools.plan.report import DAY_S, Target, needed_words, seconds
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import describe_choices
from meshwright.train.planning.predict import Prediction, predict, search_plans
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.suggest import MAX_PROCESSES

HIDDEN = 0.05  # of the step: with less than that exposed, communication counts as hidden
BAR = 30  # letters of the longest bar


@dataclass(frozen=True)
class ScalingRow:
    """One number of GPUs: the plan that is best there, or as asked, with its prediction; else the reason why
    there is none."""

    gpus: int
    plan: Plan | None = None
    prediction: Prediction | None = None
    reason: str = ""


def read_sweep(text: str) -> list[int]:
    """The numbers of GPUs that "gpus=8..4096" means: doublings from the first to the last. Raises
    ConfigError."""
    match = re.fullmatch(r"(\w+)=(\d+)\.\.(\d+)", text)
    if not match:
        raise ConfigError(f"--sweep={text} must be as gpus=8..4096: the fewest and the most GPUs")
    name, low, high = match[1], int(match[2]), int(match[3])
    if name != "gpus":
        raise ConfigError(f"--sweep={text}: only gpus can be swept, as in gpus={low}..{high}")
    if not 1 <= low <= high <= MAX_PROCESSES:
        raise ConfigError(
            f"--sweep={text}: it must go up, from 1 at least to {MAX_PROCESSES} at most, as gpus=8..4096"
        )
    return [low * 2**n for n in range(MAX_PROCESSES.bit_length()) if low * 2**n <= high]


@dataclass(frozen=True)
class Sweep:
    """A row for each number of GPUs, and the axes whose degrees the planner was free to choose."""

    rows: tuple[ScalingRow, ...]
    free_axes: tuple[str, ...]


def sweep(job: TrainingJob, counts: Sequence[int], gpus_per_node: int, hardware: Hardware) -> Sweep:
    """Plan for each number of GPUs. Raises PlanError where none can run, with all reasons."""
    look = _chosen if job.parallel.plan == "auto" else _asked
    rows = [look(job, Target(gpus, min(gpus, gpus_per_node), hardware)) for gpus in counts]
    if not any(row.plan for row in rows):
        raise PlanError(
            "--sweep: the run is possible on none of these numbers of GPUs.\n"
            + "\n".join(f"  {row.gpus}: {row.reason}" for row in rows)
        )
    free = [axis for axis in AXES if job.parallel.plan == "auto" and getattr(job.parallel, axis) == "auto"]
    return Sweep(tuple(rows), tuple(free))


def _chosen(job: TrainingJob, place: Target) -> ScalingRow:
    """What the planner chooses there."""
    machines = place.machines()
    try:
        choice = search_plans(job, place.gpus, machines)
    except PlanError as error:
        return ScalingRow(place.gpus, reason=_first_line(error))
    if not choice.ranked:
        nearest = choice.does_not_fit[0]
        needed = f"{needed_words(nearest)} of {machines.available_bytes / GIB:.1f} GiB"
        return ScalingRow(
            place.gpus,
            reason=f"none of {len(choice.does_not_fit)} plans fits: the smallest needs {needed} "
            f"({describe_choices(nearest.choices)})",
        )
    return _predicted(job, place, choice.best.plan)


def _asked(job: TrainingJob, place: Target) -> ScalingRow:
    """What the config asks for, if it can be and fits."""
    try:
        plan = plan_run(job, place.gpus, place.gpus_per_node, *place.best(job))
    except PlanError as error:
        return ScalingRow(place.gpus, reason=_first_line(error))
    row, available = _predicted(job, place, plan), place.machines().available_bytes
    if row.prediction and row.prediction.reserved_bytes > available:
        needed = f"{row.prediction.reserved_bytes / GIB:.1f} of {available / GIB:.1f} GiB"
        return ScalingRow(place.gpus, reason=f"does not fit: needs {needed}")
    return row


def _predicted(job: TrainingJob, place: Target, plan: Plan) -> ScalingRow:
    return ScalingRow(place.gpus, plan, predict(job, plan, place.machines().hardware, place.gpus_per_node))


def _first_line(error: PlanError) -> str:
    first, *rest = str(error).splitlines()
    return first + (f" (and {len(rest)} more)" if rest else "")


def sweep_json(swept: Sweep, tokens: float | None) -> dict[str, Any]:
    """Plain data: the rows, and what they say, in sentences."""
    return {"sweep": [_plain(row, tokens) for row in swept.rows], "said": list(conclusions(swept))}


def _plain(row: ScalingRow, tokens: float | None) -> dict[str, Any]:
    """A row; without a plan all but the number of GPUs and the reason is null."""
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
    return plain | ({"days": prediction and _days(row, prediction, tokens)} if tokens else {})


def _values(row: ScalingRow) -> dict[str, Any] | None:
    """Degrees and settings of the row's plan. The middle unit's stand for all: first and last are no
    blocks."""
    if row.plan is None:
        return None
    mesh, unit = row.plan.mesh, row.plan.units[len(row.plan.units) // 2]
    return {
        "tp": mesh.tp,
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "activation_checkpoint": unit.activation_checkpoint,
        "reshard_after_forward": unit.reshard_after_forward,
        "micro_batch_size": row.plan.micro_batch_size,
        "accumulation": row.plan.accumulation,
    }


def _days(row: ScalingRow, prediction: Prediction, tokens: float) -> float:
    return tokens / (prediction.tokens_per_s_per_gpu * row.gpus) / DAY_S


def sweep_text(swept: Sweep, tokens: float | None) -> str:
    """A table with a bar for each count, the counts that cannot be, and what follows."""
    rows = swept.rows
    best = max(row.prediction.tokens_per_s_per_gpu for row in rows if row.prediction)
    head = [
        "GPUs",
        "tp",
        "replicate",
        "shard",
        "checkpointing",
        "reshard",
        "micro",
        "GiB",
        "step",
        "exposed",
        *([f"days for {tokens:.3g}"] if tokens else []),
        "tokens/s per GPU",
    ]
    cells = [_cells(row, row.prediction, best, tokens) for row in rows if row.prediction]
    parts = [format_table(head, cells)]
    parts += (
        ["\n".join(f"{row.gpus} GPUs: {row.reason}" for row in rows if row.reason)]
        if any(r.reason for r in rows)
        else []
    )
    return "\n\n".join([*parts, "\n".join(conclusions(swept))])


def _cells(row: ScalingRow, prediction: Prediction, best: float, tokens: float | None) -> list[str]:
    values, timeline, rate = _values(row) or {}, prediction.timeline, prediction.tokens_per_s_per_gpu
    settings = [str(value).lower() for key, value in values.items() if key != "accumulation"]
    days = [f"{_days(row, prediction, tokens):,.1f}"] if tokens else []
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


def conclusions(swept: Sweep) -> Iterator[str]:
    """Where FSDP stops hiding its communication, and where replication and tensor parallelism take over, a
    sentence each."""
    possible = [(row.gpus, row.plan, row.prediction) for row in swept.rows if row.plan and row.prediction]
    waiting = next(
        ((gpus, p.timeline.exposed_share) for gpus, _, p in possible if p.timeline.exposed_share > HIDDEN),
        None,
    )
    if waiting:
        yield (
            f"At {waiting[0]} GPUs communication is for the first time not hidden: {waiting[1]:.1%} of the "
            f"step waits for it, which is over {HIDDEN:.0%}."
        )
    else:
        yield f"Communication is hidden on all of them: at most {HIDDEN:.0%} of a step waits for it."
    for name, axis in (("HSDP", "dp_replicate"), ("Tensor parallelism", "tp")):
        if axis in swept.free_axes:
            yield (
                f"{name} "
                f"{_takes_over([(gpus, getattr(plan.mesh, axis)) for gpus, plan, _ in possible], axis)}."
            )


def _takes_over(degrees: Sequence[tuple[int, int]], axis: str) -> str:
    """Where an axis is used, of pairs of a number of GPUs and the axis's degree there."""
    used = [(gpus, degree) for gpus, degree in degrees if degree > 1]
    if not used:
        return "is nowhere the best"
    if used == list(degrees[-len(used) :]):
        return f"takes over at {used[0][0]} GPUs, with {axis}={used[0][1]}"
    return "is the best at " + ", ".join(f"{gpus} GPUs ({axis}={degree})" for gpus, degree in used) + " only"
