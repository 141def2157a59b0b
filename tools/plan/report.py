"""The report of `tools.plan` on one run, as text and JSON: its plan with reasons, memory, time, whether it
fits, and runners-up."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.lint import advise, unused_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_dict, plan_to_table
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.devices import Devices
from meshwright.parallel.planner.explain import give_reasons, needed_gib
from meshwright.parallel.planner.hardware import Hardware, load_hardware
from meshwright.parallel.planner.search import Candidate, SearchResult
from meshwright.parallel.planner.timeline_plot import ROWS, in_ms
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import memory_table
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import choose_plan
from meshwright.train.planning.device_defaults import best_attention, best_dtype, check_attention
from meshwright.train.planning.predict import Prediction, predict, predict_memory, run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.suggest import MAX_PROCESSES, check_fits, fewest_processes

HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True)
class Target:
    """The machines that a run is planned for. `hardware` is None without --gpu."""

    gpus: int
    gpus_per_node: int
    hardware: Hardware | None

    def best(self, job: TrainingJob) -> tuple[str, str]:
        """Return the attention kernel and the dtype that `auto` selects there, as arguments of `plan_run`."""
        return best_attention(job, self.hardware), best_dtype(self.hardware)

    def machines(self) -> Devices:
        """Return the devices for the planner. Processes on a CPU share its memory."""
        assert self.hardware is not None, "callers need --gpu, which is checked with the options"
        sharing = min(self.gpus, self.gpus_per_node) if self.hardware.cores else 1
        host = None if self.hardware.cores else int(self.hardware.host_memory_gib * GIB)
        source = f"host_memory_gib in configs/hardware/{self.hardware.name}.yaml"
        available = int(self.hardware.memory_gib * GIB / sharing)
        return Devices(available, self.gpus_per_node, self.hardware, host, source)


@dataclass(frozen=True)
class PlanReport:
    """The report on one run.

    Args:
        job: the training
        target: its machines
        plan: chosen by the planner, read from a file, or made from the config
        memory: of one rank, without allocator overhead
        prediction: None without --gpu
        fit_error: why the plan does not fit, and what would; "" if it fits or without --gpu
        choice: the result of the search; None without parallel.plan=auto
        reasons: for the chosen plan, one sentence each
        advice: on questionable settings of a plan that the planner did not choose, one sentence each
    """

    job: TrainingJob
    target: Target
    plan: Plan
    memory: StepMemory
    prediction: Prediction | None
    fit_error: str
    choice: SearchResult | None
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


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
            f"{option}={name}: there is no configs/hardware/{name}.yaml. {hint}Known: {', '.join(kinds)}"
        )
    return kinds[name]


def make_report(job: TrainingJob, target: Target) -> PlanReport:
    """Plan and predict a run. Raises PlanError if no plan is legal, and with plan=auto if none fits."""
    choice, reasons, advice = None, list[str](), list[str]()
    if job.parallel.plan == "auto":
        machines = target.machines()
        choice = choose_plan(job, target.gpus, machines)
        plan = choice.best.plan
        times = step_times(plan, run_workload(job, plan), machines.kind, target.gpus_per_node)
        reasons = give_reasons(choice, machines, times)
    else:
        plan = plan_run(job, target.gpus, target.gpus_per_node, *target.best(job))
        advice = [*advise(plan, target.gpus_per_node), *unused_keys(job.parallel)]
    if target.hardware:
        check_attention(job, plan, "cpu" if target.hardware.cores else "cuda")
    prediction = predict(job, plan, target.hardware, target.gpus_per_node) if target.hardware else None
    memory = prediction.memory if prediction else predict_memory(job, plan)
    return PlanReport(
        job,
        target,
        plan,
        memory,
        prediction,
        _find_fit_error(job, target, plan),
        choice,
        tuple(reasons),
        tuple(advice),
    )


def find_fewest(job: TrainingJob, gpus_per_node: int, hardware: Hardware | None) -> int:
    """Return the fewest GPUs, a power of two, that the run fits on: with any plan for plan=auto, else with
    the config's plan. Raises PlanError if there are none."""
    target = Target(gpus_per_node, gpus_per_node, hardware)
    if gpus := fewest_processes(job, lambda n: Target(n, min(n, gpus_per_node), hardware).machines()):
        return gpus
    failure = "no plan fits" if job.parallel.plan == "auto" else "this plan does not fit"
    raise PlanError(
        f"--min-gpus: {failure} on 1 to {MAX_PROCESSES} {target.machines().kind.name} with sequences of "
        f"{job.seq_len} tokens: reduce train.seq_len, or leave more keys at auto with "
        "--parallel.plan=auto"
    )


def _find_fit_error(job: TrainingJob, target: Target, plan: Plan) -> str:
    """Return why the plan does not fit and what would; "" if it fits, as the planner's always do."""
    if target.hardware is None or job.parallel.plan == "auto":
        return ""
    try:
        name = f"{target.hardware.name}, without allocator and process overhead,"
        check_fits(job, plan, target.machines(), name)
    except PlanError as error:
        return str(error)
    return ""


def time_to_train(prediction: Prediction, gpus: int, tokens: float) -> dict[str, float]:
    """Return the time to train on `tokens`, without checkpoints, evaluation and failures."""
    seconds = tokens / (prediction.tokens_per_s_per_gpu * gpus)
    return {
        "tokens": tokens,
        "days": seconds / DAY_S,
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
        "fits": None if prediction is None else not report.fit_error,
    }


def _candidates(report: PlanReport, choice: SearchResult) -> Iterator[dict[str, Any]]:
    """Yield the plans that fit, the best first; then those that do not, the smallest first."""
    available_gib = report.target.machines().available_bytes / GIB
    for candidate in (*choice.ranked, *choice.does_not_fit):
        timeline = candidate.timeline
        row = {
            "choices": dict(candidate.choices),
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


def distinct(candidates: Sequence[Candidate], shown: Sequence[Mapping[str, Any]] = ()) -> Iterator[Candidate]:
    """Yield candidates, only the first of those that differ in nothing but the prefetch depth. `shown`:
    choices to leave out in the same way."""
    seen = {_without_prefetch(choices) for choices in shown}
    for candidate in candidates:
        key = _without_prefetch(candidate.choices)
        if key not in seen:
            seen.add(key)
            yield candidate


def _without_prefetch(choices: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(repr(value) for key, value in choices.items() if key != "prefetch")


RUNNERS_UP = 5
TOO_LARGE = 3
CHOICES = {
    "tp": "tp",
    "cp": "cp",
    "cp_exchange": "cp exchange",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "activation_checkpoint": "activation checkpoint",
    "activation_checkpoint_blocks": "blocks",
    "reshard_after_forward": "reshard",
    "reduce_gradients": "reduce",
    "reshard_after_backward": "after backward",
    "prefetch": "prefetch",
    "micro_batch_size": "micro batch",
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
        parts += _others(report.job, report.choice, report.target.machines())
    return "\n\n".join(parts)


def _figures(report: PlanReport, prediction: Prediction, tokens: float | None) -> str:
    timeline, gpus, target = prediction.timeline, report.plan.mesh.world_size, report.target
    name = target.hardware.name if target.hardware else ""
    rows = [
        ("step", seconds(timeline.step_s)),
        ("tokens/s per GPU", f"{prediction.tokens_per_s_per_gpu:,.0f}"),
        ("tokens/s", f"{prediction.tokens_per_s_per_gpu * gpus:,.0f}"),
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
        time = time_to_train(prediction, gpus, tokens)
        rows.append(
            (
                f"{tokens:.3g} tokens",
                f"{time['days']:,.1f} days: {time['gpu_days']:,.0f} GPU days, "
                f"{time['gpu_hours']:,.0f} GPU hours",
            )
        )
    plural = "s" if gpus > 1 else ""
    where = (
        f"on {gpus} process{'es' if gpus > 1 else ''}, {target.gpus_per_node} per node: {name}"
        if target.hardware and target.hardware.cores
        else f"on {gpus} {name}, {target.gpus_per_node} GPU{plural} per node"
    )
    return format_table(("predicted", where), rows)


def _verdict(report: PlanReport, prediction: Prediction) -> str:
    if report.fit_error:
        return f"does not fit: {report.fit_error}"
    machines = report.target.machines()
    return (
        f"fits {machines.kind.name}: {prediction.reserved_bytes / GIB:.1f} of "
        f"{machines.available_bytes / GIB:.1f} GiB, including allocator and process overhead"
    )


def _others(job: TrainingJob, choice: SearchResult, machines: Devices) -> Iterator[str]:
    """Yield tables of the runners-up and of the smallest plans that do not fit."""
    runners_up = list(islice(distinct(choice.ranked[1:], [choice.best.choices]), RUNNERS_UP))
    too_large = list(islice(distinct(choice.does_not_fit), TOO_LARGE))
    divides = any(candidate.choices["cp"] > 1 for candidate in (choice.best, *runners_up, *too_large))
    keys = [key for key in CHOICES if divides or key not in ("cp", "cp_exchange")]
    head = [*(CHOICES[key] for key in keys), "GiB", "step", "tokens/s per GPU", "exposed"]
    if runners_up:
        yield "runners-up:\n" + format_table(head, [_row(job, candidate, keys) for candidate in runners_up])
    if too_large:
        rows = [_row(job, candidate, keys) for candidate in too_large]
        yield (
            f"too large for {machines.available_bytes / GIB:.1f} GiB, the smallest of "
            f"{len(choice.does_not_fit)}:\n" + format_table(head[: len(keys) + 1], rows)
        )


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
