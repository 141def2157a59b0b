"""When each unit's parameters were gathered and when they were needed (in time, late, far too early, and what
would mend it), and where a step's time went, in shares that sum to exactly 1; of each kind of communication,
how much was hidden."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mode

from meshwright.tools.trace.steps import (
    ProfiledStep,
    Transfer,
    UnitDeadline,
    UnitRun,
    clip,
    intersect,
    is_gather,
    spans_of,
    total,
    union,
)

LATE_SHARE, LATE_NS = 0.001, 20_000  # of the step, and at least: a shorter wait is none
# other units that pass between a gather's end and its need: with a depth of 1 it ends within the one before
EARLY_UNITS = 2
LINK_LIMIT = "no depth helps: the link is the limit"
WORTH = 0.005  # of the step: what another depth must save to be named


@dataclass(frozen=True)
class Gather:
    """One unit's all-gather in one phase of one micro batch.

    Args:
        times_ns: when it was "issued", "started" and "finished", and when it was "needed"
        ahead: how many units before its own it was launched; None where the trace does not tell
        waited_ns: how long computing stood before it
        held_units: how many other units passed between its end and its need
        first: of its phase
        blocking: whoever launched it stood until it was over
        depth: the least prefetch depth with which it would have ended in time; None if none does, or if it
            was in time
    """

    unit: str
    phase: str
    times_ns: Mapping[str, int]
    waited_ns: int
    ahead: int | None
    held_units: int
    late: bool
    first: bool
    blocking: bool
    depth: int | None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.late and self.blocking:
            return f"stood {self.waited_ns / 1e6:.2f} ms: its launch waits for its end"
        if self.late and self.first:
            return f"waited {self.waited_ns / 1e6:.2f} ms: the first, nothing computes before it"
        if self.late:
            mend = f"depth {self.depth} mends it" if self.depth is not None else LINK_LIMIT
            return f"late by {self.waited_ns / 1e6:.2f} ms ({mend})"
        return (
            f"far too early: held for {self.held_units} units"
            if self.held_units >= EARLY_UNITS
            else "in time"
        )


@dataclass(frozen=True)
class UnitCost:
    """What a unit takes in a phase: its all-gather and its reduce-scatter on the link, its computing. 0 where
    it has none."""

    gather_ns: int
    compute_ns: int
    scatter_ns: int


@dataclass(frozen=True)
class Prefetch:
    """A phase of one micro batch: what was waited, and what each depth from 0 on would bring.

    Args:
        used: the depth that most units were gathered with
        waited_ns: in the step as measured, with the waits that no depth hides
        waits_ns: by depth, as computed from the measured durations
        best: the least depth that brings (nearly) all that any does
        blocking: launches stood until their gathers were over, so that no depth hides any
    """

    phase: str
    micro_batch: int
    used: int
    waited_ns: int
    waits_ns: tuple[int, ...]
    best: int
    blocking: bool
    gathers: tuple[Gather, ...]

    @property
    def saving_ns(self) -> int:
        """What the best depth would save."""
        return 0 if self.blocking else max(self.waited_ns - self.waits_ns[self.best], 0)


def judge_prefetch(step: ProfiledStep) -> list[Prefetch]:
    """Each phase in which anything was gathered."""
    needs = sorted(step.needs, key=lambda need: need.needed_ns)
    judged = (_judge_phase(step, key) for key in dict.fromkeys((n.phase, n.micro_batch) for n in needs))
    return [prefetch for prefetch in judged if prefetch is not None]


def _judge_phase(step: ProfiledStep, here: tuple[str, int]) -> Prefetch | None:
    # the first run of each unit is what it is gathered for
    first_runs = {run.unit: run for run in reversed(step.runs) if (run.phase, run.micro_batch) == here}
    runs = sorted(first_runs.values(), key=lambda run: run.start_ns)
    needs = {need.unit: need for need in reversed(step.needs) if (need.phase, need.micro_batch) == here}
    sent = {t.unit: t for t in reversed(step.transfers) if is_gather(t) and (t.phase, t.micro_batch) == here}
    if not (gathered := [run.unit for run in runs if run.unit in needs and run.unit in sent]):
        return None
    costs = _costs(step, runs, sent, here)
    waits = [waits_with_depth(costs, depth) for depth in range(len(runs) + 1)]
    late_ns = max(LATE_NS, round(LATE_SHARE * step.length_ns))
    order = {run.unit: i for i, run in enumerate(runs)}
    gathers = [
        _judge(step, runs, needs[unit], sent[unit], [w[order[unit]] for w in waits], late_ns)
        for unit in gathered
    ]
    totals = tuple(sum(each) for each in waits)
    blocking = sum(sent[unit].blocking for unit in gathered) > 0.9 * len(gathered)
    best = next(
        depth for depth, waited in enumerate(totals) if waited <= min(totals) + WORTH * step.length_ns / 2
    )
    # nothing comes before the first
    ahead = [gather.ahead for gather in gathers[1:] if gather.ahead is not None]
    used = mode(ahead) if ahead else 0
    waited_ns = sum(gather.waited_ns for gather in gathers)
    return Prefetch(*here, used, waited_ns, totals, best, blocking, tuple(gathers))


def _costs(
    step: ProfiledStep, runs: Sequence[UnitRun], sent: dict[str, Transfer], here: tuple[str, int]
) -> list[UnitCost]:
    """From unit to unit: what passes between their starts without what computing stood for communication."""
    scatters = defaultdict[str, int](int)
    for t in step.transfers:
        if t.lane == "reduce_scatter" and (t.phase, t.micro_batch) == here:
            scatters[t.unit] += t.end_ns - t.start_ns
    starts = [*(run.start_ns for run in runs), max(run.end_ns for run in runs)]
    costs = []
    for run, (start_ns, next_ns) in zip(runs, pairwise(starts), strict=True):
        gather = sent.get(run.unit)
        gather_ns = gather.end_ns - gather.start_ns if gather else 0
        compute_ns = next_ns - start_ns - standing(step, start_ns, next_ns)
        costs.append(UnitCost(gather_ns, compute_ns, scatters[run.unit]))
    return costs


def waits_with_depth(costs: Sequence[UnitCost], depth: int) -> list[int]:
    """How long each unit would wait for its all-gather if each started those of the next `depth` units when
    it starts itself. The link runs one collective at a time, in the order of launching; a unit reduces behind
    its backward."""
    now_ns, link_ns, ends, waits = 0, 0, dict[int, int](), []
    for i, cost in enumerate(costs):
        for j in range(i, min(i + depth + 1, len(costs))):
            if j not in ends:
                if j > i:
                    now_ns = max(now_ns, ends[i])  # the next ones are launched once this one is there
                link_ns = ends[j] = (
                    max(link_ns, now_ns) + costs[j].gather_ns if costs[j].gather_ns else now_ns
                )
            if j == i:
                waits.append(max(ends[i] - now_ns, 0))
                now_ns = max(now_ns, ends[i])
        now_ns += cost.compute_ns
        if cost.scatter_ns:
            link_ns = max(link_ns, now_ns) + cost.scatter_ns
    return waits


def _judge(
    step: ProfiledStep,
    runs: Sequence[UnitRun],
    need: UnitDeadline,
    sent: Transfer,
    waits: Sequence[int],
    late_ns: int,
) -> Gather:
    waited_ns = max(min(sent.end_ns, need.served_ns) - need.needed_ns, 0)
    if sent.blocking:
        waited_ns = standing(step, sent.start_ns, sent.end_ns)
    late = waited_ns > late_ns
    order = [run.unit for run in runs]
    ahead = order.index(need.unit) - order.index(sent.during) if sent.during in order else None
    held = sum(sent.end_ns <= run.start_ns and run.end_ns <= need.needed_ns for run in runs)
    depth = next((d for d, wait in enumerate(waits) if wait <= late_ns), None) if late else None
    times_ns = {"issued": sent.issued_ns, "started": sent.start_ns, "finished": sent.end_ns}
    times_ns["needed"] = need.needed_ns
    first = order[0] == need.unit
    return Gather(need.unit, need.phase, times_ns, waited_ns, ahead, held, late, first, sent.blocking, depth)


KINDS = {  # of time -> in words
    "compute": "computing, nothing in flight",
    "overlapped": "computing, with communication under it",
    "exposed": "exposed communication: nothing computes",
    "host": "host-bound: nothing launched yet",
    "idle": "idle otherwise",
}


@dataclass(frozen=True)
class Shares:
    """Nanoseconds of each of KINDS, which sum to the step's length."""

    length_ns: int
    ns: dict[str, int]

    def of_step(self) -> dict[str, float]:
        """As shares, the last one what is left: added up in this order they are exactly 1."""
        *first, last = self.ns
        shares = {kind: self.ns[kind] / self.length_ns for kind in first}
        return shares | {last: 1.0 - sum(shares.values())}


@dataclass(frozen=True)
class Communication:
    """One kind of collective on one axis: seconds in flight, and in how many of them something computed."""

    lane: str
    axis: str
    count: int
    ns: int
    hidden_ns: int
    bytes: int


def split_step(step: ProfiledStep) -> Shares:
    """The step's time by what happened in it."""
    overlapped = total(intersect(step.computing, step.in_flight))
    host = total(step.host)
    compute, exposed = total(step.computing) - overlapped, total(step.exposed)
    idle = step.length_ns - compute - overlapped - exposed - host
    assert idle >= 0, "the host's part lies where nothing else does"
    return Shares(
        step.length_ns,
        {"compute": compute, "overlapped": overlapped, "exposed": exposed, "host": host, "idle": idle},
    )


def sum_communication(step: ProfiledStep) -> list[Communication]:
    """By lane and axis, longest first. What two at once send counts for each."""
    found = defaultdict[tuple[str, str], list[Transfer]](list)
    for t in step.transfers:
        found[t.lane, t.axis].append(t)
    rows = []
    for kind, sent in found.items():
        spans = union(clip(spans_of(sent), step.start_ns, step.end_ns))
        hidden_ns, size = total(intersect(spans, step.computing)), sum(t.bytes for t in sent)
        rows.append(Communication(*kind, len(sent), total(spans), hidden_ns, size))
    return sorted(rows, key=lambda row: -row.ns)


def median_step(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """The one of median length, the longer of the two in the middle."""
    return sorted(steps, key=lambda step: step.length_ns)[len(steps) // 2]


def standing(step: ProfiledStep, start_ns: int, end_ns: int) -> int:
    """For how long of a window nothing computed while something was in flight."""
    return total(clip(step.exposed, start_ns, end_ns))
