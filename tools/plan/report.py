"""The report of `tools.plan` on one run, as text and JSON: its plan with reasons, memory, time, whether it
fits, and runners-up."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.lint import advise, unused_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_dict, plan_to_table
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.planner.accuracy import MEMORY, load_errors, speed_errors, trust
from meshwright.parallel.planner.explain import needed_gib
from meshwright.parallel.planner.hardware import Hardware, Machines, load_hardware, machines_of_kind
from meshwright.parallel.planner.search import Candidate, SearchResult
from meshwright.parallel.planner.search_space import Choices
from meshwright.parallel.planner.timeline_plot import ROWS, in_ms
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import memory_table
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import choose_plan
from meshwright.train.planning.fit import MAX_PROCESSES, check_fits, fewest_processes
from meshwright.train.planning.predict import Prediction, plan_for, predict, predict_memory
from meshwright.train.planning.resolve import check_attention

HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True)
class PlanReport:
    """The report on one run.

    Args:
        job: the training
        machines: their `hardware` is None without --gpu
        plan: chosen by the planner, read from a file, or made from the config
        memory: of one rank, without allocator overhead
        prediction: None without --gpu
        fit_error: why the plan does not fit, and what would; "" if it fits or without --gpu
        choice: the result of the search; None without parallel.plan=auto
        advice: on questionable settings of a plan that the planner did not choose, one sentence each
    """

    job: TrainingJob
    machines: Machines
    plan: Plan
    memory: StepMemory
    prediction: Prediction | None
    fit_error: str
    choice: SearchResult | None
    advice: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the planner chose the plan, one sentence each; none if it did not."""
        return self.prediction.reasons if self.prediction else ()

    @property
    def where(self) -> tuple[Hardware, int, int]:
        """The kind of machine, the number of processes, and of those on a node."""
        return self.machines.kind, self.machines.processes, self.machines.per_node


def find_kind(name: str, option: str) -> Hardware:
    """Return a kind of machine from configs/hardware. Raises ConfigError with the nearest name for an unknown
    one. `option` is the option that names it, for the message."""
    kinds = load_hardware()
    if name not in kinds:
        near = sorted(
            (kind for kind in kinds if kind.startswith(name)), key=len
        ) or difflib.get_close_matches(name, kinds, n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{option}={name}: there is no configs/hardware/{name}.yaml. {hint}Known: {', '.join(kinds)}. "
            "python -m tools.plan --gpu list describes them"
        )
    return kinds[name]


def make_report(job: TrainingJob, machines: Machines) -> PlanReport:
    """Plan and predict a run. Raises PlanError if no plan is legal, and with plan=auto if none fits."""
    hardware, choice, prediction, fit_error = machines.hardware, None, None, ""
    advice = tuple[str, ...]()
    if job.parallel.plan == "auto":
        choice, prediction = choose_plan(job, machines)
        plan = prediction.plan
    else:
        plan = plan_for(job, machines)
        advice = (*advise(plan, machines.per_node), *unused_keys(job.parallel))
    if hardware:
        check_attention(job, plan, "cpu" if hardware.cores else "cuda")
        prediction = prediction or predict(job, plan, hardware, machines.per_node)
        if not choice:
            name = f"{hardware.name}, without allocator and process overhead,"
            try:
                check_fits(job, plan, machines, name)
            except PlanError as error:
                fit_error = str(error)
    memory = prediction.memory if prediction else predict_memory(job, plan)
    return PlanReport(job, machines, plan, memory, prediction, fit_error, choice, advice)


def find_fewest(job: TrainingJob, gpus_per_node: int, hardware: Hardware) -> int:
    """Return the fewest GPUs, a power of two, that the run fits on: with any plan for plan=auto, else with
    the config's plan. Raises PlanError if there are none."""
    if gpus := fewest_processes(job, lambda n: machines_of_kind(hardware, n, gpus_per_node)):
        return gpus
    failure = "no plan fits" if job.parallel.plan == "auto" else "this plan does not fit"
    raise PlanError(
        f"--min-gpus: {failure} on 1 to {MAX_PROCESSES} {hardware.name} with sequences of "
        f"{job.seq_len} tokens: reduce train.seq_len, or leave more keys at auto with "
        "--parallel.plan=auto"
    )


def time_to_train(rate: float, machines: Machines, tokens: float) -> dict[str, float]:
    """Return the time to train on `tokens` at `rate` per second and GPU, without checkpoints, evaluation and
    failures; and the fewest and the most days by the errors of such predictions."""
    gpus = machines.processes
    seconds, errors = tokens / (rate * gpus), speed_errors(machines.kind, gpus, machines.per_node)
    longest, shortest = max(e.highest for e in errors), min(0.0, *(e.lowest for e in errors))
    return {
        "tokens": tokens,
        "days": seconds / DAY_S,
        "fewest_days": seconds / DAY_S * (1 + shortest),
        "most_days": seconds / DAY_S * (1 + longest),
        "gpu_days": gpus * seconds / DAY_S,
        "gpu_hours": gpus * seconds / HOUR_S,
    }


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain data: plan, reasons, advice, predicted; with plan=auto the candidates."""
    document: dict[str, Any] = {
        "plan": plan_to_dict(report.plan),
        "reasons": list(report.reasons),
        "advice": list(report.advice),
        "predicted": _predicted(report),
    }
    if report.choice:
        document["candidates"] = list(_candidates(report, report.choice))
    return document


def _predicted(report: PlanReport) -> dict[str, Any]:
    """Return the predictions, memory in GiB; values that need --gpu are null without it."""
    prediction, memory = report.prediction, report.memory
    timeline = prediction.timeline if prediction else None
    return {
        "peak_memory_gib": memory.peak_bytes / GIB,
        "reserved_gib": prediction and prediction.reserved_bytes / GIB,
        "memory": memory.memory.gib(),
        "memory_at_peak": memory.at_peak.gib(),
        "step_time_s": timeline and timeline.step_s,
        "compute_s": timeline and timeline.compute_s,
        "exposed_comm_s": timeline and timeline.exposed_s,
        "exposed_share": timeline and timeline.exposed_share,
        "host_bound_s": timeline and timeline.host_s,
        "exposed_by_lane_s": timeline and dict(timeline.exposed_by_lane),
        "tokens_per_s_per_gpu": prediction and prediction.tokens_per_s_per_gpu,
        "mfu": prediction and prediction.mfu,
        "mfu_causal": prediction and prediction.mfu_causal,
        "bound": prediction and _bound(report.machines.kind, prediction),
        "source": prediction and report.machines.kind.source,
        "errors": prediction and list(map(asdict, speed_errors(*report.where))),
        "fits": None if prediction is None else not report.fit_error,
    }


def _bound(kind: Hardware, prediction: Prediction) -> dict[str, float | None] | None:
    """Return the bounds by the data sheet of a machine of which nothing else is known; else None."""
    step_s, rate, mfu = prediction.timeline.step_s, prediction.tokens_per_s_per_gpu, prediction.mfu
    bounds = {"step_time_s": step_s * kind.reached, "tokens_per_s_per_gpu": rate / kind.reached}
    return {**bounds, "mfu": mfu and mfu / kind.reached} if kind.is_bound else None


def _candidates(report: PlanReport, choice: SearchResult) -> Iterator[dict[str, Any]]:
    """Yield the plans that fit, the best first; then those that do not, the smallest first."""
    available_gib = report.machines.available_bytes / GIB
    for candidate in (*choice.ranked, *choice.does_not_fit):
        timeline = candidate.timeline
        row = {
            "choices": asdict(candidate.choices),
            "fits": timeline is not None,
            "needed_gib": candidate.needed_bytes / GIB,
            "step_time_s": timeline and timeline.step_s,
            "tokens_per_s_per_gpu": timeline and token_rate(report.job, candidate),
            "exposed_share": timeline and timeline.exposed_share,
        }
        yield (
            row if timeline else row | {"reason": f"needs {needed_gib(candidate)} of {available_gib:.1f} GiB"}
        )


def token_rate(job: TrainingJob, candidate: Candidate) -> float:
    """Return tokens per second and GPU."""
    return candidate.rate() * job.seq_len / candidate.plan.mesh.world_size


def distinct(candidates: Sequence[Candidate], shown: Sequence[Choices] = ()) -> Iterator[Candidate]:
    """Yield candidates, only the first of those that differ in nothing but the prefetch depth. `shown`:
    choices to leave out in the same way."""
    seen = {repr(replace(choices, prefetch=None)) for choices in shown}  # repr, because True == 1
    for candidate in candidates:
        key = repr(replace(candidate.choices, prefetch=None))
        if key not in seen:
            seen.add(key)
            yield candidate


RUNNERS_UP = 5
TOO_LARGE = 3
TITLES = {
    "tp": "tp",
    "cp": "cp",
    "cp_exchange": "exchange",
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "activation_checkpoint": "activation checkpoint",
    "activation_checkpoint_blocks": "blocks",
    "reshard_after_forward": "reshard",
    "reduce_gradients": "reduce",
    "reshard_after_backward": "after backward",
    "prefetch": "prefetch",
    "micro_batch_size": "micro",
}


def as_text(report: PlanReport, tokens: float | None = None) -> str:
    """Return the report as text. `tokens`: also show the time to train on this many."""
    strategy = report.job.parallel.strategy
    notes = [describe_strategy(strategy, report.plan.mesh)] if strategy else []
    notes += [f"advice: {sentence}" for sentence in report.advice]
    parts = ["\n".join([plan_to_table(report.plan), *notes])]
    if report.reasons:
        parts.append("\n".join(["why:", *(f"- {sentence}" for sentence in report.reasons)]))
    parts.append(memory_table(report.memory))
    if report.prediction is not None:
        parts += [_figures(report, report.prediction, tokens), _verdict(report, report.prediction)]
    if report.choice:
        parts += _others(report.job, report.choice, report.machines)
    return "\n\n".join(parts)


def _figures(report: PlanReport, prediction: Prediction, tokens: float | None) -> str:
    timeline, gpus, kind = prediction.timeline, report.machines.processes, report.machines.kind
    rate = prediction.tokens_per_s_per_gpu
    bound = f", at most {rate / kind.reached:,.0f}" if kind.is_bound else ""
    rows = [
        ("step", seconds(timeline.step_s)),
        ("tokens/s per GPU", f"{rate:,.0f}{bound}"),
        *((f"  {name}", text) for name, text in trust(*report.where)),
        ("tokens/s", f"{rate * gpus:,.0f}"),
        ("MFU, full attention", _percent(prediction.mfu)),
        ("MFU, causal attention", _percent(prediction.mfu_causal)),
        ("computing", seconds(timeline.compute_s)),
        ("host-bound", f"{seconds(timeline.host_s)}, {timeline.host_share:.1%} of the step"),
        ("exposed", f"{seconds(timeline.exposed_s)}, {timeline.exposed_share:.1%} of the step"),
    ]
    rows += [
        (f"  for {ROWS[lane]}", seconds(waited))
        for lane, waited in timeline.exposed_by_lane.items()
        if waited
    ]
    if tokens:
        time = time_to_train(rate, report.machines, tokens)
        rows.append(
            (
                f"{tokens:.3g} tokens",
                f"{time['days']:,.1f} days ({time['fewest_days']:,.1f} to {time['most_days']:,.1f} by these "
                f"errors): {time['gpu_days']:,.0f} GPU days, {time['gpu_hours']:,.0f} GPU hours",
            )
        )
    plural = "s" if gpus > 1 else ""
    where = (
        f"on {gpus} process{'es' if gpus > 1 else ''}, {report.machines.per_node} per node: {kind.name}"
        if kind.cores
        else f"on {gpus} {kind.name}, {report.machines.per_node} GPU{plural} per node"
    )
    return format_table(("predicted", where), rows)


def _verdict(report: PlanReport, prediction: Prediction) -> str:
    if report.fit_error:
        return f"does not fit: {report.fit_error}"
    machines = report.machines
    return (
        f"fits {machines.kind.name}: {prediction.reserved_bytes / GIB:.1f} of "
        f"{machines.available_bytes / GIB:.1f} GiB, including allocator and process overhead"
        + ("" if machines.kind.cores else f" ({load_errors()[MEMORY]})")
    )


def _others(job: TrainingJob, choice: SearchResult, machines: Machines) -> Iterator[str]:
    """Yield tables of the runners-up and of the smallest plans that do not fit."""
    runners_up = list(islice(distinct(choice.ranked[1:], [choice.best.choices]), RUNNERS_UP))
    too_large = list(islice(distinct(choice.does_not_fit), TOO_LARGE))
    shown = (choice.best, *runners_up, *too_large)
    keys = keys_to_show(TITLES, [candidate.choices.cp for candidate in shown])
    head = [*(TITLES[key] for key in keys), "GiB", "step", "tokens/s per GPU", "exposed"]
    if runners_up:
        yield "runners-up:\n" + format_table(head, [_row(job, candidate, keys) for candidate in runners_up])
    if too_large:
        rows = [_row(job, candidate, keys) for candidate in too_large]
        yield (
            f"too large for {machines.available_bytes / GIB:.1f} GiB, the smallest of "
            f"{len(choice.does_not_fit)}:\n" + format_table(head[: len(keys) + 1], rows)
        )


def keys_to_show(keys: Iterable[str], cp: Iterable[int]) -> list[str]:
    """Return the keys without those of context parallelism if none of the plans, with these degrees `cp`,
    uses it."""
    return [key for key in keys if max(cp) > 1 or key not in ("cp", "cp_exchange")]


def _row(job: TrainingJob, candidate: Candidate, keys: Sequence[str]) -> Sequence[str]:
    cells = [str(candidate.choices[key]).lower() for key in keys]
    timeline = candidate.timeline
    if timeline is None:
        return [*cells, needed_gib(candidate)]
    times = (
        seconds(timeline.step_s),
        f"{token_rate(job, candidate):,.0f}",
        f"{timeline.exposed_share:.1%}",
    )
    return [*cells, needed_gib(candidate), *times]


def seconds(time_s: float) -> str:
    """Format a time in seconds, or in milliseconds below one second."""
    return f"{time_s:,.2f} s" if time_s >= 10 else f"{time_s:.3f} s" if time_s >= 1 else in_ms(time_s)


def _percent(share: float | None) -> str:
    return "unknown: no peak to compare with on a CPU" if share is None else f"{share:.1%}"
