"""The report of `tools.plan` on one run, as text and JSON: its plan with reasons, memory, time, whether it
fits, the best plans side by side, and the time and the price of a training."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.lint import advise, unused_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_dict
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.parallel.planner.accuracy import MEMORY, load_errors, speed_errors, trust
from meshwright.parallel.planner.explain import needed_gib
from meshwright.parallel.planner.hardware import Hardware, Machines, load_hardware, machines_of_kind
from meshwright.parallel.planner.search import Candidate, SearchResult
from meshwright.parallel.planner.timeline_plot import ROWS, in_ms
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import memory_table
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import choose_plan
from meshwright.train.planning.fit import MAX_PROCESSES, check_fits, fewest_processes
from meshwright.train.planning.predict import Prediction, check_legal_plans, plan_for, predict, predict_memory
from meshwright.train.planning.resolve import check_attention
from meshwright.train.planning.tracing_aside import traced_aside
from meshwright.train.training import describe_plan, training_flops

HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True)
class Goal:
    """The number of tokens to train on, and the price of a GPU hour in any currency; None: not known."""

    tokens: float | None = None
    price: float | None = None

    def time_to_train(self, rate: float | None, machines: Machines) -> dict[str, float]:
        """Return the time to train at `rate` tokens per second and GPU, without checkpoints, evaluation and
        failures, the fewest and the most days by the errors of such predictions, and the cost. Empty without
        a rate or tokens."""
        if not (rate and self.tokens):
            return {}
        gpus = machines.processes
        days = self.tokens / (rate * gpus) / DAY_S
        errors = speed_errors(machines.kind, gpus, machines.per_node)
        time = {
            "tokens": self.tokens,
            "days": days,
            "fewest_days": days * (1 + min(0.0, *(e.lowest for e in errors))),
            "most_days": days * (1 + max(e.highest for e in errors)),
            "gpu_days": gpus * days,
            "gpu_hours": gpus * days * DAY_S / HOUR_S,
        }
        return time | ({"cost": time["gpu_hours"] * self.price} if self.price else {})


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
        goal: the tokens that it trains on, and the price
    """

    job: TrainingJob
    machines: Machines
    plan: Plan
    memory: StepMemory
    prediction: Prediction | None
    fit_error: str
    choice: SearchResult | None
    advice: tuple[str, ...]
    goal: Goal

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the planner chose the plan, one sentence each; none if it did not."""
        return self.prediction.reasons if self.prediction else ()

    @property
    def where(self) -> tuple[Hardware, int, int]:
        """The kind of machine, the number of processes, and of those on a node."""
        return self.machines.kind, self.machines.processes, self.machines.per_node

    @property
    def time_to_train(self) -> dict[str, float]:
        """`Goal.time_to_train` at the predicted rate."""
        rate = self.prediction.tokens_per_s_per_gpu if self.prediction else None
        return self.goal.time_to_train(rate, self.machines)


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


def make_report(job: TrainingJob, machines: Machines, goal: Goal = Goal()) -> PlanReport:
    """Plan and predict a run. Raises PlanError if no plan is legal, and with plan=auto if none fits."""
    hardware, choice, prediction, fit_error = machines.hardware, None, None, ""
    advice = tuple[str, ...]()
    if job.parallel.plan == "auto":
        with traced_aside(job, machines):
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
    return PlanReport(job, machines, plan, memory, prediction, fit_error, choice, advice, goal)


def report_on_fewest(
    job: TrainingJob, gpus_per_node: int, hardware: Hardware, goal: Goal, days: float
) -> PlanReport:
    """Return the report on the fewest GPUs, a power of two, that the run fits on, with any plan for
    plan=auto, else with the config's, and on which the goal's tokens take at most `days` by the prediction.
    Raises PlanError if there are none."""
    powers = [machines_of_kind(hardware, 2**n, gpus_per_node) for n in range(MAX_PROCESSES.bit_length())]
    fewest = fewest_processes(job, lambda gpus: powers[gpus.bit_length() - 1])
    if not fewest:
        failure = "no plan fits" if job.parallel.plan == "auto" else "this plan does not fit"
        raise PlanError(
            f"{failure} on 1 to {MAX_PROCESSES} {hardware.name} with sequences of {job.seq_len} tokens: "
            "reduce train.seq_len, or leave more keys at auto with --parallel.plan=auto"
        )
    least = max(fewest, (goal.tokens or 0) / (days * DAY_S * most_rate(job, hardware)))
    legal = []
    for machines in powers[fewest.bit_length() - 1 :]:
        with suppress(PlanError):  # as of a global batch that so many GPUs do not divide
            (check_legal_plans if job.parallel.plan == "auto" else plan_for)(job, machines)
            legal.append(machines)
    for machines in [m for m in legal if m.processes >= least] or legal[-1:]:
        report = make_report(job, machines, goal)
        if report.time_to_train.get("days", 0.0) <= days:
            return report
    raise PlanError(
        f"--days={days:g}: no power of two up to {MAX_PROCESSES} {hardware.name} is sufficient. The most "
        f"that can run it, {machines.processes}, need {report.time_to_train['days']:,.1f} days by the "
        "prediction: allow more days, or for more GPUs a larger train.global_batch_size"
    )


def most_rate(job: TrainingJob, hardware: Hardware) -> float:
    """Return tokens per second and GPU that no prediction exceeds: those of the peak."""
    float8 = job.parallel.float8.recipe != "none"
    peak = max(peak for dtype, peak in hardware.peak_tflops.items() if float8 or dtype != "float8")
    return peak * 1e12 * max(hardware.cores, 1) / hardware.slower / training_flops(job)[1]


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain data: plan, reasons, advice, predicted; with plan=auto the candidates, and
    with tokens the time to train."""
    document: dict[str, Any] = {
        "plan": plan_to_dict(report.plan),
        "reasons": list(report.reasons),
        "advice": list(report.advice),
        "predicted": _predicted(report),
    }
    if report.choice:
        candidates = (*report.choice.ranked, *report.choice.does_not_fit)
        document["candidates"] = [_candidate(report, candidate) for candidate in candidates]
    return document | ({"time_to_train": time} if (time := report.time_to_train) else {})


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
        "optimizer_s": timeline and timeline.optimizer_s,
        "optimizer_share": timeline and timeline.optimizer_s / timeline.step_s,
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


def _candidate(report: PlanReport, candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as plain data; without a step, and with a reason, if it does not fit."""
    timeline, needed = candidate.timeline, candidate.needed_bytes / GIB
    row = {"choices": asdict(candidate.choices), "fits": timeline is not None, "needed_gib": needed}
    if timeline is None:
        reason = f"needs {needed_gib(candidate)} of {report.machines.available_bytes / GIB:.1f} GiB"
        return row | dict.fromkeys(OF_STEP) | {"reason": reason}
    rate = candidate.rate() * report.job.seq_len / report.machines.processes
    step = dict(zip(OF_STEP, (timeline.step_s, timeline.exposed_share, rate), strict=True))
    return row | step | report.goal.time_to_train(rate, report.machines)


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidates, and of those that differ only in the prefetch depth and in the number of
    blocks only the first."""
    first = dict[str, Candidate]()
    for candidate in candidates:
        same = replace(candidate.choices, prefetch=None, activation_checkpoint_blocks=0)
        first.setdefault(repr(same), candidate)  # repr: True == 1
    return list(first.values())[:SIDE_BY_SIDE]


SIDE_BY_SIDE = 3
OF_STEP = ("step_time_s", "exposed_share", "tokens_per_s_per_gpu")
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


def as_text(report: PlanReport) -> str:
    """Return the report as text."""
    strategy = report.job.parallel.strategy
    notes = [describe_strategy(strategy, report.plan.mesh)] if strategy else []
    notes += [f"advice: {sentence}" for sentence in report.advice]
    parts = ["\n".join([describe_plan(report.job, report.plan), *notes])]
    if report.reasons:
        parts.append("\n".join(["why:", *(f"- {sentence}" for sentence in report.reasons)]))
    parts.append(memory_table(report.memory))
    if report.prediction is not None:
        parts += [_figures(report, report.prediction), _verdict(report, report.prediction)]
    if report.choice:
        parts += _candidate_tables(report, report.choice)
    return "\n\n".join(parts)


def _figures(report: PlanReport, prediction: Prediction) -> str:
    timeline, gpus, kind = prediction.timeline, report.machines.processes, report.machines.kind
    rate = prediction.tokens_per_s_per_gpu
    bound = f", at most {rate / kind.reached:,.0f}" if kind.is_bound else ""
    optimizer = timeline.optimizer_s / timeline.step_s
    assumed = ", assumed to be AdamW's" if ":" in report.job.optim.name else ""
    rows = [
        ("step", seconds(timeline.step_s)),
        ("tokens/s per GPU", f"{rate:,.0f}{bound}"),
        *((f"  {name}", text) for name, text in trust(*report.where)),
        ("tokens/s", f"{rate * gpus:,.0f}"),
        ("MFU, full attention", _percent(prediction.mfu)),
        ("MFU, causal attention", _percent(prediction.mfu_causal)),
        ("computing", seconds(timeline.compute_s)),
        ("optimizer", f"{seconds(timeline.optimizer_s)}, {optimizer:.1%} of the step{assumed}"),
        ("host-bound", f"{seconds(timeline.host_s)}, {timeline.host_share:.1%} of the step"),
        ("exposed", f"{seconds(timeline.exposed_s)}, {timeline.exposed_share:.1%} of the step"),
    ]
    rows += [
        (f"  for {ROWS[lane]}", seconds(waited))
        for lane, waited in timeline.exposed_by_lane.items()
        if waited
    ]
    if time := report.time_to_train:
        text = (
            "{days:,.1f} days ({fewest_days:,.1f} to {most_days:,.1f} by these errors): {gpu_days:,.0f} GPU "
            "days, {gpu_hours:,.0f} GPU hours"
        ).format(**time)
        rows.append((f"{time['tokens']:.3g} tokens", text))
        if cost := time.get("cost"):
            low, high = (cost * time[end] / time["days"] for end in ("fewest_days", "most_days"))
            text = f"{cost:,.0f} ({low:,.0f} to {high:,.0f}) at {report.goal.price:,.2f} per GPU hour"
            rows.append(("cost", text))
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


def _candidate_tables(report: PlanReport, choice: SearchResult) -> Iterator[str]:
    """Yield tables of the best plans and of the smallest that do not fit, a column for each: the choices that
    are not all those of the chosen plan, and the figures."""
    best, too_large = distinct(choice.ranked), distinct(choice.does_not_fit)
    available = f"{report.machines.available_bytes / GIB:.1f} GiB"
    heads = ("best plans", "chosen"), (f"{len(choice.does_not_fit)} too large for {available}", "smallest")
    for head, plans in zip(heads, (best[1:] and best, too_large), strict=True):
        cells = {
            TITLES[key]: [str(plan.choices[key]).lower() for plan in (best[0], *plans)] for key in TITLES
        }
        rows = [(title, *values[1:]) for title, values in cells.items() if len(set(values)) > 1]
        rows.append(("GiB", *map(needed_gib, plans)))
        figures = [_candidate(report, plan) for plan in plans]
        for name, (title, form) in FIGURES.items():
            if all(of.get(name) is not None for of in figures):
                rows.append((title, *(form(of[name]) for of in figures)))
        if plans:
            yield format_table((*head, "second", "third")[: len(plans) + 1], rows)


def seconds(time_s: float) -> str:
    """Format a time in seconds, or in milliseconds below one second."""
    return f"{time_s:,.2f} s" if time_s >= 10 else f"{time_s:.3f} s" if time_s >= 1 else in_ms(time_s)


def _percent(share: float | None) -> str:
    return "unknown: no peak to compare with on a CPU" if share is None else f"{share:.1%}"


# title and format of the figures that stand side by side
FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "reserved_gib": ("GiB", "{:.1f}".format),
    "step_time_s": ("step", seconds),
    "exposed_share": ("exposed", "{:.1%}".format),
    "tokens_per_s_per_gpu": ("tokens/s per GPU", "{:,.0f}".format),
    "days": ("days", "{:,.1f}".format),
    "gpu_hours": ("GPU hours", "{:,.0f}".format),
    "cost": ("cost", "{:,.0f}".format),
}
