"""The reasons for the chosen plan (`why:`), with figures that a reader can check."""

from collections.abc import Iterator
from math import log
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import regathered
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.hardware import Machines
from meshwright.parallel.planner.search import EQUAL, Candidate, SearchResult
from meshwright.parallel.planner.search_space import CHOICES, Choices
from meshwright.parallel.planner.timeline import OFFLOAD

MOST_COMPARED = 3  # alternatives listed per key
# choices that follow from another one: plans that are compared by it may differ in these too, and in the
# number of blocks, which follows from every choice
FOLLOWING = {
    "tp": ("dp_shard", "dp_replicate"),
    "cp": ("cp_exchange", "dp_shard", "dp_replicate", "micro_batch_size"),
    "dp_shard": ("dp_replicate",),
}


def give_reasons(choice: SearchResult, machines: Machines, times: StepTimes) -> list[str]:
    """Return one sentence on memory, some on communication, and one per key with alternatives, which states
    the cost of the nearest other values. `times` are those of the best plan."""
    best = choice.best
    return [*_memory(choice, machines), *_communication(best, times), *_alternatives(choice, machines)]


def _memory(choice: SearchResult, machines: Machines) -> Iterator[str]:
    tried = len(choice.ranked) + len(choice.does_not_fit) + len(choice.pruned)
    yield (
        f"{tried} plans tried: {len(choice.does_not_fit)} too large for the memory, {len(choice.pruned)} "
        f"slower even if nothing waits, or less simple in a tie, {len(choice.ranked)} predicted; this "
        f"plan needs {_of_available(choice.best, machines)}, including allocator overhead"
    )
    if max(candidate.rate() for candidate in choice.ranked) > choice.best.rate():
        yield f"plans within {EQUAL:.0%} of the fastest count as equal; this is the simplest of them"


def _communication(best: Candidate, times: StepTimes) -> Iterator[str]:
    """Compare the collectives of the middle unit, and the copies of an offloaded block, with compute."""
    assert best.timeline is not None
    mesh, unit = best.plan.mesh, best.plan.units[len(best.plan.units) // 2]
    fsdp = times.units[unit.name]
    phases = {
        phase: [times.modules[name].of(phase) for name in unit.modules] for phase in ("forward", "backward")
    }
    forward, backward = (_ms(sum(part.compute_s for part in parts)) for parts in phases.values())
    if mesh.shards > 1:
        in_backward_s = fsdp.regather_s * regathered(unit) + fsdp.scatter_s
        yield (
            f"dp_shard={mesh.dp_shard}{f' x cp={mesh.cp}' * (mesh.cp > 1)}: FSDP's collectives of "
            f"{unit.name} take {_ms(fsdp.gather_s)} in its forward, which computes {forward}, and "
            f"{_ms(in_backward_s)} in its backward, which computes {backward}"
            + ("" if times.overlaps else "; compute stops during collectives")
        )
    for axis in ("tp", "cp"):
        if (degree := getattr(mesh, axis)) > 1:
            sent_s = sum(part.exposed_s.get(axis, 0.0) for parts in phases.values() for part in parts)
            in_total_s = sum(part.device_s for parts in phases.values() for part in parts)
            yield (
                f"{axis}={degree}: its collectives take {_ms(sent_s)} of the {_ms(in_total_s)} of "
                f"{unit.name}, all exposed"
            )
    if times.exchange_s:
        optimizer = best.timeline.optimizer_s / best.timeline.step_s
        yield (
            f"muon: {optimizer:.1%} of the step is the optimizer; its exchanges are exposed for "
            f"{_ms(times.exchange_s)} of {_ms(best.timeline.optimizer_s)}"
        )
    waited_s = best.timeline.exposed_by_lane.get(OFFLOAD, 0.0)
    if mesh.world_size > 1:
        exposed = (best.timeline.exposed_s - waited_s) / best.timeline.step_s
        yield f"{exposed:.1%} of the step is exposed communication"
    if any(times.offload_s.values()):
        name, copy_s = next(iter(times.offload_s.items()))
        forward, backward = (_ms(times.modules[name].of(phase).compute_s) for phase in phases)
        yield (
            f"offload: a copy of the activations of {name} takes {_ms(copy_s)} each way, its forward "
            f"computes {forward} and its backward {backward}; {best.host.activations / GIB:.1f} GiB are in "
            f"host memory, and {waited_s / best.timeline.step_s:.1%} of the step waits for copies"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _alternatives(choice: SearchResult, machines: Machines) -> Iterator[str]:
    """Yield for each key its value and the cost of others; dp_replicate follows from the other degrees."""
    left_out = {"dp_replicate"} | ({"cp_exchange"} if choice.best.plan.mesh.cp == 1 else set())
    for key in CHOICES:
        others = [] if key in left_out else _alternatives_for(choice, key)
        costs = [_compare(other, key, choice, machines) for other in others]
        if costs and key == "activation_checkpoint_blocks" and _has_mixed_blocks(choice.best, choice.blocks):
            costs = ["fewer do not fit", *costs]
        if costs:
            yield f"{key}={_format_value(choice.best.choices[key])}: " + "; ".join(costs)


def _alternatives_for(choice: SearchResult, key: str) -> list[Candidate]:
    """Return the best plan for each of at most MOST_COMPARED other values of `key`, those nearest to the
    chosen one first. All other choices are those of the best plan, but for those that follow from `key`.
    Plans that fit take precedence."""
    free = {key, "activation_checkpoint_blocks", *FOLLOWING.get(key, ())}
    best, best_of_value = choice.best.choices, dict[Any, Candidate]()
    for candidate in (*choice.ranked, *choice.pruned, *choice.does_not_fit):
        if all(candidate.choices[k] == best[k] for k in CHOICES if k not in free):
            best_of_value.setdefault(candidate.choices[key], candidate)
    others = [candidate for value, candidate in best_of_value.items() if value != best[key]]
    return sorted(others, key=lambda other: _distance(other.choices[key], best[key]))[:MOST_COMPARED]


def _distance(value: Any, chosen: Any) -> float:
    """The distance of a value from the chosen one: the ratio's logarithm for degrees and sizes, else 0."""
    return abs(log(value / chosen)) if isinstance(value, int) and value and chosen else 0.0


def _compare(other: Candidate, key: str, choice: SearchResult, machines: Machines) -> str:
    """Return the cost of the plan `other` with another value of `key`, as "8 is 4.2% slower and ..."."""
    value = _format_value(other.choices[key])
    if key == "activation_checkpoint" and _has_mixed_blocks(other, choice.blocks):
        value += f" for {other.choices.activation_checkpoint_blocks} of {choice.blocks} blocks"
    ratio = other.rate() / choice.best.rate() - 1
    if other.timeline is None and not machines.fits(other.needed_bytes, other.host):
        return f"{value} does not fit ({_of_available(other, machines)})"
    if other.timeline is None:
        bound = f"at least {-ratio:.1%} slower" if ratio <= 0 else f"at most {ratio:.1%} faster"
        return f"{value} is {bound}"
    speed = (
        "is as fast" if abs(ratio) < 0.0005 else f"is {abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'}"
    )
    return f"{value} {speed} and needs {needed_gib(other)} GiB"


def _has_mixed_blocks(candidate: Candidate, blocks: int) -> bool:
    """Whether only some of the model's blocks use activation checkpointing."""
    return 0 < candidate.choices.activation_checkpoint_blocks < blocks


def _of_available(candidate: Candidate, machines: Machines) -> str:
    return f"{needed_gib(candidate)} GiB of {machines.available_bytes / GIB:.1f} GiB"


def needed_gib(candidate: Candidate) -> str:
    """Format the memory of a plan in GiB, with "at least" if only a lower bound is known."""
    return f"{'' if candidate.memory else 'at least '}{candidate.needed_bytes / GIB:.1f}"


def _format_value(value: Any) -> str:
    return str(value).lower()


def describe_choices(choices: Choices) -> str:
    """Return a plan's choices as key=value, without sections."""
    return " ".join(f"{key}={_format_value(choices[key])}" for key in CHOICES)
