"""Why a plan was chosen, in sentences that a person can check."""

from collections.abc import Iterator
from math import log
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import regathered
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.search import EQUAL, Candidate, Cluster, SearchResult
from meshwright.parallel.planner.search_space import CHOICES
from meshwright.parallel.planner.stream_simulator import OFFLOAD

MILLI = 1e3
MOST_COMPARED = 3  # other values of one choice


def give_reasons(choice: SearchResult, machines: Cluster, times: StepTimes) -> list[str]:
    """One sentence for memory, one for communication, and one for each choice that had an alternative: what
    the nearest other value would have cost. `times`: of the best plan."""
    best = choice.best
    return [
        _memory(choice, machines),
        *_tie(choice),
        *_communication(best, times),
        *_host_memory(best, times),
        *_alternatives(choice, machines),
    ]


def _tie(choice: SearchResult) -> Iterator[str]:
    """Where the chosen plan is not the fastest."""
    fastest = max(candidate.rate() for candidate in choice.ranked)
    if fastest > choice.best.rate():
        yield f"plans within {EQUAL:.0%} of the fastest count as equal, and this is the simplest of them"


def _memory(choice: SearchResult, machines: Cluster) -> str:
    tried = len(choice.ranked) + len(choice.does_not_fit) + len(choice.pruned)
    return (
        f"of {tried} plans that were tried {len(choice.does_not_fit)} do not fit, and {len(choice.pruned)} "
        f"would be slower even if they waited for nothing; this one needs {_gib(choice.best)} of "
        f"{machines.available_bytes / GIB:.1f} GiB, the allocator's share included"
    )


def _communication(best: Candidate, times: StepTimes) -> Iterator[str]:
    """Whether gathering and reducing a block hides behind computing one."""
    assert best.timeline is not None
    unit = best.plan.units[len(best.plan.units) // 2]
    parts, alone = times.units[unit.name], [times.modules[name] for name in unit.modules]
    forward, backward = sum(m.forward_s for m in alone), sum(m.backward_s for m in alone)
    waited = best.timeline.exposed_s - best.timeline.exposed_by_lane.get(OFFLOAD, 0.0)
    exposed = waited / best.timeline.step_s
    if best.plan.mesh.dp_shard > 1:
        sending = parts.regather_s * regathered(unit) + parts.scatter_s
        hides = (
            "can hide all of it"
            if max(parts.gather_s / forward, sending / backward) <= 1
            else "cannot hide all of it"
        )
        again = "gathered again and reduced" if regathered(unit) else "reduced"
        hides = hides if times.overlaps else "stands still meanwhile"
        yield (
            f"dp_shard={best.plan.mesh.dp_shard}: {unit.name} is gathered in {parts.gather_s * MILLI:.1f} ms "
            f"beside {forward * MILLI:.1f} ms of forward, and {again} in {sending * MILLI:.1f} ms beside "
            f"{backward * MILLI:.1f} ms of backward: computing {hides}"
        )
    if best.plan.mesh.tp > 1:
        waited = sum(m.forward_tp_s + m.backward_tp_s for m in alone)
        yield (
            f"tp={best.plan.mesh.tp}: its collectives take {waited * MILLI:.1f} ms of each {unit.name}'s "
            f"{(forward + backward + waited) * MILLI:.1f} ms, and nothing hides them"
        )
    if best.plan.mesh.world_size > 1:
        yield f"{exposed:.1%} of the step waits for communication"


def _host_memory(best: Candidate, times: StepTimes) -> Iterator[str]:
    """Whether sending activations to host memory and fetching them hides behind computing."""
    if not any(times.host_s.values()):
        return
    assert best.timeline is not None
    name, copy_s = next(iter(times.host_s.items()))
    alone = times.modules[name]
    share = best.timeline.exposed_by_lane.get(OFFLOAD, 0.0) / best.timeline.step_s
    yield (
        f"offload: what {name} keeps is copied in {copy_s * MILLI:.1f} ms each way, beside "
        f"{alone.forward_s * MILLI:.1f} ms of forward and {alone.backward_s * MILLI:.1f} ms of backward: "
        f"{best.host_bytes / GIB:.1f} GiB are in host memory, and {share:.1%} of the step waits for it"
    )


def _alternatives(choice: SearchResult, machines: Cluster) -> Iterator[str]:
    for key in CHOICES:
        if key == "dp_replicate":  # it follows from tp and dp_shard
            continue
        said = [_compare(other, key, choice.best, machines) for other in _same_but_for(choice, key)]
        if said:
            fewest = (
                "no fewer fit; " if key == "activation_checkpoint_blocks" and _is_part(choice.best) else ""
            )
            yield f"{key}={_word(choice.best.choices[key])}: {fewest}" + "; ".join(said)


def _same_but_for(choice: SearchResult, key: str) -> list[Candidate]:
    """Plans that differ from the best in one choice, and in what follows from it: the best of each value.
    Fitting ones come first, and those nearest to what was chosen. From any choice follows for how many blocks
    memory is too small."""
    free = {"tp": {"tp", "dp_shard", "dp_replicate"}, "dp_shard": {"dp_shard", "dp_replicate"}}.get(
        key, {key}
    )
    free = free if key == "activation_checkpoint_blocks" else free | {"activation_checkpoint_blocks"}
    found: dict[Any, Candidate] = {}
    for candidate in (*choice.ranked, *choice.pruned, *choice.does_not_fit):
        if all(candidate.choices[k] == v for k, v in choice.best.choices.items() if k not in free):
            found.setdefault(candidate.choices[key], candidate)
    others = [candidate for value, candidate in found.items() if value != choice.best.choices[key]]
    return sorted(others, key=lambda other: _distance(other.choices[key], choice.best.choices[key]))[
        :MOST_COMPARED
    ]


def _distance(value: Any, chosen: Any) -> float:
    """How far a choice is from the chosen one: degrees and sizes by their ratio."""
    return abs(log(value / chosen)) if isinstance(value, int) and value and chosen else 0.0


def _compare(other: Candidate, key: str, best: Candidate, machines: Cluster) -> str:
    value = _word(other.choices[key])
    if key == "activation_checkpoint" and _is_part(other):
        value += f" of {other.choices['activation_checkpoint_blocks']} blocks"
    if other.timeline is None and other.needed_bytes <= machines.available_bytes:
        return f"{value} is at least {1 - other.rate() / best.rate():.1%} slower"
    if other.timeline is None:
        return f"{value} needs {_gib(other)} of {machines.available_bytes / GIB:.1f} GiB"
    ratio = other.rate() / best.rate() - 1
    pace = (
        "is as fast" if abs(ratio) < 0.0005 else f"is {abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'}"
    )
    return f"{value} {pace} and needs {_gib(other)}"


def _is_part(candidate: Candidate) -> bool:
    """Whether some blocks are treated otherwise than others."""
    return len({unit.activation_checkpoint for unit in candidate.plan.units[1:-1]}) > 1


def _gib(candidate: Candidate) -> str:
    more = "" if candidate.memory else "at least "
    return f"{more}{candidate.needed_bytes / GIB:.1f} GiB"


def _word(value: Any) -> str:
    return str(value).lower()
