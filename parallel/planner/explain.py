"""The reasons for the chosen plan (`why:`), with figures that a reader can check."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import MeshPlan, regathered
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.devices import Devices
from meshwright.parallel.planner.search import EQUAL, Candidate, SearchResult
from meshwright.parallel.planner.search_space import CHOICES
from meshwright.parallel.planner.timeline import OFFLOAD

MILLI = 1e3
MOST_COMPARED = 3  # alternatives listed per key


def give_reasons(choice: SearchResult, machines: Devices, times: StepTimes) -> list[str]:
    """Return one sentence on memory, one on communication, and one per key with alternatives, which states
    the cost of the nearest other values. `times` are those of the best plan."""
    best = choice.best
    return [
        _memory(choice, machines),
        *_tie(choice),
        *_communication(best, times),
        *_host_memory(best, times),
        *_accumulation(choice, machines),
        *_alternatives(choice, machines),
    ]


def _tie(choice: SearchResult) -> Iterator[str]:
    """A note if the chosen plan is not the fastest one."""
    fastest = max(candidate.rate() for candidate in choice.ranked)
    if fastest > choice.best.rate():
        yield f"plans within {EQUAL:.0%} of the fastest count as equal; this is the simplest of them"


def _memory(choice: SearchResult, machines: Devices) -> str:
    tried = len(choice.ranked) + len(choice.does_not_fit) + len(choice.pruned)
    return (
        f"{tried} plans tried, {len(choice.does_not_fit)} too large for the memory and {len(choice.pruned)} "
        f"slower whatever they need; this plan needs {needed_gib(choice.best)} GiB of "
        f"{machines.available_bytes / GIB:.1f} GiB, including allocator overhead"
    )


def _communication(best: Candidate, times: StepTimes) -> Iterator[str]:
    """Compare the collectives of the middle unit with its compute."""
    assert best.timeline is not None
    unit = best.plan.units[len(best.plan.units) // 2]
    parts, modules = times.units[unit.name], [times.modules[name] for name in unit.modules]
    forward, backward = (sum(m.of(phase).compute_s for m in modules) for phase in ("forward", "backward"))
    exposed_s = best.timeline.exposed_s - best.timeline.exposed_by_lane.get(OFFLOAD, 0.0)
    exposed = exposed_s / best.timeline.step_s
    if best.plan.mesh.shards > 1:
        backward_comm_s = parts.regather_s * regathered(unit) + parts.scatter_s
        verdict = (
            "compute can hide all of it"
            if max(parts.gather_s / forward, backward_comm_s / backward) <= 1
            else "compute cannot hide all of it"
        )
        in_backward = "all-gather and reduce-scatter take" if regathered(unit) else "the reduce-scatter takes"
        verdict = verdict if times.overlaps else "compute stops during collectives"
        yield (
            f"{_shards(best.plan.mesh)}: in the forward of {unit.name} the all-gather takes "
            f"{parts.gather_s * MILLI:.1f} ms and compute {forward * MILLI:.1f} ms; in its backward "
            f"{in_backward} {backward_comm_s * MILLI:.1f} ms and compute {backward * MILLI:.1f} ms: {verdict}"
        )
    sent = {"tp": 0.0, "cp": 0.0}
    for module, phase in itertools.product(modules, ("forward", "backward")):
        for axis, seconds in module.of(phase).exposed_s.items():
            sent[axis] += seconds
    in_words = {
        "tp": "tensor-parallel collectives take",
        "cp": f"the exchange of {EXCHANGED[best.plan.context.exchange]} around attention takes",
    }
    for axis, seconds in sent.items():
        if (degree := getattr(best.plan.mesh, axis)) > 1:
            yield (
                f"{axis}={degree}: {in_words[axis]} {seconds * MILLI:.1f} ms of the "
                f"{(forward + backward + sum(sent.values())) * MILLI:.1f} ms of {unit.name}, all exposed"
            )
    if best.plan.mesh.world_size > 1:
        yield f"{exposed:.1%} of the step is exposed communication"


EXCHANGED = {"heads": "heads", "gather": "keys and values"}


def _shards(mesh: MeshPlan) -> str:
    return f"dp_shard={mesh.dp_shard}" + (f" x cp={mesh.cp}" if mesh.cp > 1 else "")


def _host_memory(best: Candidate, times: StepTimes) -> Iterator[str]:
    """Compare the copies of offloaded activations with the compute of their block."""
    if not any(times.offload_s.values()):
        return
    assert best.timeline is not None
    name, copy_s = next(iter(times.offload_s.items()))
    forward, backward = (times.modules[name].of(phase).compute_s for phase in ("forward", "backward"))
    share = best.timeline.exposed_by_lane.get(OFFLOAD, 0.0) / best.timeline.step_s
    yield (
        f"offload: a copy of the activations of {name} takes {copy_s * MILLI:.1f} ms each way, its forward "
        f"{forward * MILLI:.1f} ms and its backward {backward * MILLI:.1f} ms; "
        f"{best.host.activations / GIB:.1f} GiB are in host memory, and {share:.1%} of the step waits for "
        "copies"
    )


@dataclass(frozen=True)
class _Way:
    """A way to accumulate that saves communication for memory: a value of a key, in words; what it keeps from
    one micro batch to the next, and as which kind of memory."""

    value: Any
    words: str
    kept: str
    kind: str


ACCUMULATION = {
    "reduce_gradients": _Way("last_micro_batch", "reduced once", "whole gradients", "grads"),
    "reshard_after_backward": _Way(False, "kept gathered", "gathered parameters", "unsharded"),
}


def _accumulation(choice: SearchResult, machines: Devices) -> Iterator[str]:
    """Compare the ways to accumulate gradients: the step, and the memory that is free for what they keep."""
    for key, way in ACCUMULATION.items():
        for other in _alternatives_for(choice, key):
            chosen = _format_value(choice.best.choices[key])
            yield f"{key}={chosen}: {_compare_accumulation(choice.best, other, key, machines, way)}"


def _compare_accumulation(best: Candidate, other: Candidate, key: str, machines: Devices, way: _Way) -> str:
    """Return what the best plan saves by its value of `key`, or what the other value would."""
    assert best.timeline is not None
    available = machines.available_bytes
    if other.timeline is None and other.needed_bytes > available:
        value = _format_value(other.choices[key])
        return f"{value} does not fit ({needed_gib(other)} GiB of {available / GIB:.1f} GiB)"
    if other.timeline is None:
        return f"{way.words} it could be at most {max(0.0, other.rate() / best.rate() - 1):.1%} faster"
    saves = best.choices[key] == way.value
    with_it, without = (best, other) if saves else (other, best)
    assert with_it.memory is not None
    assert with_it.timeline is not None
    assert without.timeline is not None
    kept = getattr(with_it.memory.memory, way.kind)
    free = available - with_it.needed_bytes + kept
    step_s = f"{with_it.timeline.step_s:.3g} s instead of {without.timeline.step_s:.3g}"
    memory = f"{kept / GIB:.1f} GiB of the {free / GIB:.1f} that are free"
    if saves:
        return f"{way.words} a step takes {step_s}; {way.kept} take {memory}"
    return f"{way.words} it would take {step_s}; {way.kept} would take {memory}"


def _alternatives(choice: SearchResult, machines: Devices) -> Iterator[str]:
    for key in CHOICES:
        if key == "dp_replicate" or key in ACCUMULATION:  # it follows from the other degrees
            continue
        if key == "cp_exchange" and choice.best.plan.mesh.cp == 1:
            continue
        costs = [_compare(other, key, choice.best, machines) for other in _alternatives_for(choice, key)]
        if costs:
            fewest = (
                "fewer do not fit; "
                if key == "activation_checkpoint_blocks" and _has_mixed_blocks(choice.best)
                else ""
            )
            yield f"{key}={_format_value(choice.best.choices[key])}: {fewest}" + "; ".join(costs)


def _alternatives_for(choice: SearchResult, key: str) -> list[Candidate]:
    """Return the best plan for each of at most MOST_COMPARED other values of `key`, those nearest to the
    chosen one first. All other choices are those of the best plan, except those that depend on `key`: the
    degrees on each other, the number of blocks on every key. Plans that fit take precedence."""
    free = {
        "tp": {"tp", "dp_shard", "dp_replicate"},
        "cp": {"cp", "cp_exchange", "dp_shard", "dp_replicate", "micro_batch_size"},
        "dp_shard": {"dp_shard", "dp_replicate"},
    }.get(key, {key})
    free = free if key == "activation_checkpoint_blocks" else free | {"activation_checkpoint_blocks"}
    best_of_value: dict[Any, Candidate] = {}
    for candidate in (*choice.ranked, *choice.pruned, *choice.does_not_fit):
        if all(candidate.choices[k] == v for k, v in choice.best.choices.items() if k not in free):
            best_of_value.setdefault(candidate.choices[key], candidate)
    others = [candidate for value, candidate in best_of_value.items() if value != choice.best.choices[key]]
    return sorted(others, key=lambda other: _distance(other.choices[key], choice.best.choices[key]))[
        :MOST_COMPARED
    ]


def _distance(value: Any, chosen: Any) -> float:
    """The distance of a value from the chosen one: the ratio's logarithm for degrees and sizes, else 0."""
    return abs(log(value / chosen)) if isinstance(value, int) and value and chosen else 0.0


def _compare(other: Candidate, key: str, best: Candidate, machines: Devices) -> str:
    """Return the cost of the plan `other` with another value of `key`, as "8 is 4.2% slower and ..."."""
    value = _format_value(other.choices[key])
    if key == "activation_checkpoint" and _has_mixed_blocks(other):
        value += f" for {other.choices['activation_checkpoint_blocks']} blocks"
    if other.timeline is None and machines.fits(other.needed_bytes, other.host):
        return f"{value} is at least {1 - other.rate() / best.rate():.1%} slower"
    if other.timeline is None:
        return f"{value} does not fit ({needed_gib(other)} GiB of {machines.available_bytes / GIB:.1f} GiB)"
    ratio = other.rate() / best.rate() - 1
    speed = (
        "is as fast" if abs(ratio) < 0.0005 else f"is {abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'}"
    )
    return f"{value} {speed} and needs {needed_gib(other)} GiB"


def _has_mixed_blocks(candidate: Candidate) -> bool:
    """Whether only some of the blocks use activation checkpointing."""
    return len({unit.activation_checkpoint for unit in candidate.plan.units[1:-1]}) > 1


def needed_gib(candidate: Candidate) -> str:
    """Format the memory of a plan in GiB, with "at least" if only a lower bound is known."""
    return f"{'' if candidate.memory else 'at least '}{candidate.needed_bytes / GIB:.1f}"


def _format_value(value: Any) -> str:
    return str(value).lower()
