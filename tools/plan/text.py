"""What `tools.plan` says of one run, for people: plan, reasons, memory, figures, runners-up."""

from collections.abc import Iterator, Sequence
from itertools import islice

from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.serialize import plan_to_table
from meshwright.parallel.planner.plot.timeline import ROWS, in_ms
from meshwright.parallel.planner.search import Candidate, Choice, Machines
from meshwright.tools.command import format_table
from meshwright.tools.plan.answer import (
    Answer,
    distinct,
    needed_words,
    strategy_words,
    time_to_train,
    token_rate,
)
from meshwright.train.config import Config
from meshwright.train.planning.predict import Prediction

RUNNERS_UP = 5
TOO_LARGE = 3
CHOICES = {
    "tp": "tp",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "activation_checkpoint": "checkpointing",
    "checkpointed_blocks": "blocks",
    "reshard_after_forward": "reshard",
    "prefetch": "prefetch",
    "micro_batch_size": "micro batch",
}


def as_text(asked: Answer, tokens: float | None = None) -> str:
    """All of it in paragraphs. `tokens`: to say how long training on so many takes."""
    said = [*filter(None, [strategy_words(asked)]), *(f"advice: {sentence}" for sentence in asked.advice)]
    parts = ["\n".join([plan_to_table(asked.plan), *said])]
    if asked.reasons:
        parts.append("\n".join(["why:", *(f"- {sentence}" for sentence in asked.reasons)]))
    parts.append(memory_table(asked.memory))
    if asked.prediction is not None:
        parts += [_figures(asked, asked.prediction, tokens), _verdict(asked, asked.prediction)]
    if asked.choice:
        parts += _others(asked.config, asked.choice, asked.place.machines())
    return "\n\n".join(parts)


def memory_table(memory: StepMemory) -> str:
    """The most of each kind, and each at the moment when all together are most."""
    digits = 2 if memory.peak_bytes >= GIB else 4
    at_peak = memory.at_peak.gib()
    rows = [
        (kind, f"{gib:8.{digits}f}", f"{at_peak[kind]:8.{digits}f}")
        for kind, gib in memory.memory.gib().items()
    ]
    total = ("total", "", f"{memory.peak_bytes / GIB:8.{digits}f}")
    return format_table(("memory", "most GiB", "GiB at the peak"), [*rows, total])


def _figures(asked: Answer, prediction: Prediction, tokens: float | None) -> str:
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


def _verdict(asked: Answer, prediction: Prediction) -> str:
    if asked.too_much:
        return f"does not fit: {asked.too_much}"
    machines = asked.place.machines()
    return (
        f"fits {machines.hardware.name}: {prediction.reserved_bytes / GIB:.1f} of "
        f"{machines.available_bytes / GIB:.1f} GiB, "
        "with what the allocator and the process take"
    )


def _others(config: Config, choice: Choice, machines: Machines) -> Iterator[str]:
    """Tables of the runners-up and of the smallest plans that do not fit."""
    head = [*CHOICES.values(), "GiB", "step", "tokens/s per GPU", "exposed"]
    behind = list(islice(distinct(choice.fitting[1:], [choice.best.choices]), RUNNERS_UP))
    if behind:
        yield "runners-up:\n" + format_table(head, [_row(config, candidate) for candidate in behind])
    large = list(islice(distinct(choice.too_large), TOO_LARGE))
    if large:
        rows = [_row(config, candidate) for candidate in large]
        yield (
            f"nearest that do not fit, of {len(choice.too_large)}, into {machines.available_bytes / GIB:.1f} "
            f"GiB:\n" + format_table(head[: len(CHOICES) + 1], rows)
        )


def _row(config: Config, candidate: Candidate) -> Sequence[str]:
    cells = [str(candidate.choices[key]).lower() for key in CHOICES]
    timeline = candidate.timeline
    if timeline is None:
        return [*cells, needed_words(candidate)]
    times = (
        seconds(timeline.step_s),
        f"{token_rate(config, candidate):,.0f}",
        f"{timeline.exposed_share:.1%}",
    )
    return [*cells, needed_words(candidate), *times]


def seconds(time_s: float) -> str:
    """In seconds, or milliseconds where it is short."""
    return f"{time_s:,.2f} s" if time_s >= 10 else f"{time_s:.3f} s" if time_s >= 1 else in_ms(time_s)


def _percent(share: float | None) -> str:
    return "unknown: no peak to compare with" if share is None else f"{share:.1%}"
