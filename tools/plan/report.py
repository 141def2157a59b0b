"""What `tools.plan` says of one run, as data and for people: its plan, chosen or as asked, with reasons,
memory, time, whether it fits, and runners-up."""

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
from meshwright.parallel.planner.explain import give_reasons
from meshwright.parallel.planner.hardware import Hardware, load_hardware
from meshwright.parallel.planner.search import Candidate, Cluster, SearchResult
from meshwright.parallel.planner.timeline_plot import ROWS, in_ms
from meshwright.tools.cli import format_table
from meshwright.tools.simulate import memory_table
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.planning.auto import choose_plan
from meshwright.train.planning.device_defaults import best_attention, best_dtype, check_attention
from meshwright.train.planning.predict import Prediction, predict, predict_memory, run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.suggest import MAX_PROCESSES, Devices, check_fits, fewest_processes

HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True)
class Target:
    """Where a run is to run. `hardware`: None where no kind was given."""

    gpus: int
    gpus_per_node: int
    hardware: Hardware | None

    def best(self, job: TrainingJob) -> tuple[str, str]:
        """The attention kernel and the dtype that auto is there, as `plan_run` takes them."""
        return best_attention(job, self.hardware), best_dtype(self.hardware)

    def machines(self) -> Cluster:
        """For the planner. Processes on a CPU share its memory."""
        assert self.hardware is not None, "options without --gpu are refused before"
        sharing = min(self.gpus, self.gpus_per_node) if self.hardware.cores else 1
        return Cluster(self.hardware, self.gpus_per_node, int(self.hardware.memory_gib * GIB / sharing))

    def devices(self) -> Devices:
        """The same for suggestions."""
        machines = self.machines()
        return Devices(machines.available_bytes, machines.gpus_per_node, machines.hardware)


@dataclass(frozen=True)
class PlanReport:
    """All there is to say of one run.

    Args:
        job: as asked
        place: where it is to run
        plan: chosen, read or made
        memory: of one rank, without what the allocator adds
        prediction: None where no kind of GPU was given
        too_much: why the plan does not fit, and what would; "" if it does, or if nobody knows
        choice: what the search found, with parallel.plan=auto
        reasons: for what was chosen, a sentence each
        advice: what makes little sense in a plan that was asked for, a sentence each: the planner weighs it
            itself
    """

    job: TrainingJob
    place: Target
    plan: Plan
    memory: StepMemory
    prediction: Prediction | None
    too_much: str
    choice: SearchResult | None
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


def find_kind(name: str, option: str) -> Hardware:
    """A kind of machine from configs/hardware, which `option` names. ConfigError names the nearest."""
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


def answer(job: TrainingJob, place: Target) -> PlanReport:
    """Plan and predict. Raises PlanError for what cannot be, and with plan=auto for what fits nowhere."""
    choice, reasons, advice = None, list[str](), list[str]()
    if job.parallel.plan == "auto":
        machines = place.machines()
        choice = choose_plan(job, place.gpus, machines)
        plan = choice.best.plan
        times = step_times(plan, run_workload(job, plan), machines.hardware, place.gpus_per_node)
        reasons = give_reasons(choice, machines, times)
    else:
        plan = plan_run(job, place.gpus, place.gpus_per_node, *place.best(job))
        advice = [*advise(plan, place.gpus_per_node), *unused_keys(job.parallel)]
    if place.hardware:
        check_attention(job, plan, "cpu" if place.hardware.cores else "cuda")
    prediction = predict(job, plan, place.hardware, place.gpus_per_node) if place.hardware else None
    memory = prediction.memory if prediction else predict_memory(job, plan)
    return PlanReport(
        job,
        place,
        plan,
        memory,
        prediction,
        _too_much(job, place, plan),
        choice,
        tuple(reasons),
        tuple(advice),
    )


def find_fewest(job: TrainingJob, gpus_per_node: int, hardware: Hardware | None) -> int:
    """The fewest GPUs, a power of two, that the run fits on: with any plan if the planner chooses, else as
    the config says. Raises PlanError if none does."""
    target = Target(gpus_per_node, gpus_per_node, hardware)
    if found := fewest_processes(job, lambda n: Target(n, min(n, gpus_per_node), hardware).devices()):
        return found
    words = "no plan fits" if job.parallel.plan == "auto" else "this plan does not fit"
    raise PlanError(
        f"--min-gpus: {words} on 1 to {MAX_PROCESSES} {target.machines().hardware.name} with sequences of "
        f"{job.seq_len} tokens. Shorten train.seq_len, or leave more keys at auto, with "
        "--parallel.plan=auto"
    )


def _too_much(job: TrainingJob, place: Target, plan: Plan) -> str:
    """Why the plan does not fit, and what would. What the planner chose does fit."""
    if place.hardware is None or job.parallel.plan == "auto":
        return ""
    try:
        name = f"{place.hardware.name}, without what the allocator and the process take,"
        check_fits(job, plan, place.devices(), name)
    except PlanError as error:
        return str(error)
    return ""


def time_to_train(prediction: Prediction, gpus: int, tokens: float) -> dict[str, float]:
    """Of so many tokens, without what checkpoints, evaluation and failures take."""
    seconds = tokens / (prediction.tokens_per_s_per_gpu * gpus)
    return {
        "tokens": tokens,
        "days": seconds / DAY_S,
        "gpu_days": gpus * seconds / DAY_S,
        "gpu_hours": gpus * seconds / HOUR_S,
    }


def as_json(asked: PlanReport) -> dict[str, Any]:
    """Plain data: plan, reasons, advice, predicted; if the planner chose, the candidates in order."""
    document: dict[str, Any] = {
        "plan": plan_to_dict(asked.plan),
        "reasons": list(asked.reasons),
        "advice": list(asked.advice),
        "predicted": _predicted(asked),
    }
    if asked.choice:
        document["candidates"] = list(_candidates(asked, asked.choice))
    return document


def _predicted(asked: PlanReport) -> dict[str, Any]:
    """Memory in GiB; what needs a kind of GPU is null without."""
    prediction, memory = asked.prediction, asked.memory
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
        "exposed_by_lane_s": timeline and dict(timeline.exposed_by_lane),
        "tokens_per_s_per_gpu": prediction and prediction.tokens_per_s_per_gpu,
        "mfu": prediction and prediction.mfu,
        "mfu_causal": prediction and prediction.mfu_causal,
        "fits": None if prediction is None else not asked.too_much,
    }


def _candidates(asked: PlanReport, choice: SearchResult) -> Iterator[dict[str, Any]]:
    """Those that fit, the best first; then those that do not, the smallest first."""
    available_gib = asked.place.machines().available_bytes / GIB
    for candidate in (*choice.ranked, *choice.does_not_fit):
        timeline = candidate.timeline
        row = {
            "choices": dict(candidate.choices),
            "fits": timeline is not None,
            "needed_gib": candidate.needed_bytes / GIB,
            "step_time_s": timeline and timeline.step_s,
            "tokens_per_s_per_gpu": timeline and token_rate(asked.job, candidate),
            "exposed_share": timeline and timeline.exposed_share,
        }
        yield (
            row
            if timeline
            else row | {"reason": f"needs {needed_words(candidate)} of {available_gib:.1f} GiB"}
        )


def token_rate(job: TrainingJob, candidate: Candidate) -> float:
    """Tokens per second of each GPU."""
    return candidate.rate() * job.seq_len / candidate.plan.mesh.world_size


def needed_words(candidate: Candidate) -> str:
    """Of a plan that was seen to be too large before all was counted, at least."""
    return f"{'' if candidate.memory else 'at least '}{candidate.needed_bytes / GIB:.1f}"


def distinct(
    candidates: Sequence[Candidate], besides: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Candidate]:
    """Candidates, the first of those that differ only in how far ahead they gather."""
    seen = {_without_prefetch(choices) for choices in besides}
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
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "activation_checkpoint": "checkpointing",
    "activation_checkpoint_blocks": "blocks",
    "reshard_after_forward": "reshard",
    "prefetch": "prefetch",
    "micro_batch_size": "micro batch",
}


def as_text(asked: PlanReport, tokens: float | None = None) -> str:
    """All of it in paragraphs. `tokens`: to say how long training on so many takes."""
    strategy = asked.job.parallel.strategy
    said = [describe_strategy(strategy, asked.plan.mesh)] if strategy else []
    said += [f"advice: {sentence}" for sentence in asked.advice]
    parts = ["\n".join([plan_to_table(asked.plan), *said])]
    if asked.reasons:
        parts.append("\n".join(["why:", *(f"- {sentence}" for sentence in asked.reasons)]))
    parts.append(memory_table(asked.memory))
    if asked.prediction is not None:
        parts += [_figures(asked, asked.prediction, tokens), _verdict(asked, asked.prediction)]
    if asked.choice:
        parts += _others(asked.job, asked.choice, asked.place.machines())
    return "\n\n".join(parts)


def _figures(asked: PlanReport, prediction: Prediction, tokens: float | None) -> str:
    timeline, gpus, place = prediction.timeline, asked.plan.mesh.world_size, asked.place
    name = place.hardware.name if place.hardware else ""
    rows = [
        ("step", seconds(timeline.step_s)),
        ("tokens/s per GPU", f"{prediction.tokens_per_s_per_gpu:,.0f}"),
        ("tokens/s", f"{prediction.tokens_per_s_per_gpu * gpus:,.0f}"),
        ("MFU, full attention", _percent(prediction.mfu)),
        ("MFU, causal attention", _percent(prediction.mfu_causal)),
        ("computing", seconds(timeline.compute_s)),
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
    return format_table(("predicted", f"on {gpus} {name}, {place.gpus_per_node} GPU{plural} a node"), rows)


def _verdict(asked: PlanReport, prediction: Prediction) -> str:
    if asked.too_much:
        return f"does not fit: {asked.too_much}"
    machines = asked.place.machines()
    return (
        f"fits {machines.hardware.name}: {prediction.reserved_bytes / GIB:.1f} of "
        f"{machines.available_bytes / GIB:.1f} GiB, with what the allocator and the process take"
    )


def _others(job: TrainingJob, choice: SearchResult, machines: Cluster) -> Iterator[str]:
    """Tables of the runners-up and of the smallest plans that do not fit."""
    head = [*CHOICES.values(), "GiB", "step", "tokens/s per GPU", "exposed"]
    behind = list(islice(distinct(choice.ranked[1:], [choice.best.choices]), RUNNERS_UP))
    if behind:
        yield "runners-up:\n" + format_table(head, [_row(job, candidate) for candidate in behind])
    large = list(islice(distinct(choice.does_not_fit), TOO_LARGE))
    if large:
        rows = [_row(job, candidate) for candidate in large]
        yield (
            f"nearest that do not fit, of {len(choice.does_not_fit)}, into "
            f"{machines.available_bytes / GIB:.1f} GiB:\n" + format_table(head[: len(CHOICES) + 1], rows)
        )


def _row(job: TrainingJob, candidate: Candidate) -> Sequence[str]:
    cells = [str(candidate.choices[key]).lower() for key in CHOICES]
    timeline = candidate.timeline
    if timeline is None:
        return [*cells, needed_words(candidate)]
    times = (
        seconds(timeline.step_s),
        f"{token_rate(job, candidate):,.0f}",
        f"{timeline.exposed_share:.1%}",
    )
    return [*cells, needed_words(candidate), *times]


def seconds(time_s: float) -> str:
    """In seconds, or milliseconds where it is short."""
    return f"{time_s:,.2f} s" if time_s >= 10 else f"{time_s:.3f} s" if time_s >= 1 else in_ms(time_s)


def _percent(share: float | None) -> str:
    return "unknown: no peak to compare with" if share is None else f"{share:.1%}"
