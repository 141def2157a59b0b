"""Units that take longer than their equals, and ranks that the others wait for."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from meshwright.parallel.plan.schema import AXES, MeshPlan
from meshwright.tools.trace.steps import ProfiledStep, Transfer, clip, intersect, spans_of, total, union

EQUALS = 3  # units of one shape at least, or there is no telling which of them is slow
# By how much a unit must exceed the median of its equals: a factor, and a multiple of their spread. The
# spread is the median absolute deviation times 1.4826, the standard deviation where they are normally
# distributed.
SLOW_FACTOR, SLOW_SPREADS, NORMAL = 1.25, 4.0, 1.4826


@dataclass(frozen=True)
class SlowUnit:
    """A unit's own work in a phase, in the profiled step in which it was fastest (what slows it now and then
    is not its own), against that of its equals on the same rank: their median and spread."""

    rank: int
    unit: str
    phase: str
    ns: int
    equals_ns: int
    spread_ns: int
    equals: int


@dataclass(frozen=True)
class Straggler:
    """How a rank comes to the collectives.

    Args:
        last_share: of the collectives, those that it came to last
        others_waited_ns: the mean of the other ranks' waits for it, where it was last; of a step, the median
            of all
        waited_ns: what it waited for whoever was last; of a step, the median of all
    """

    rank: int
    collectives: int
    last_share: float
    others_waited_ns: int
    waited_ns: int


@dataclass(frozen=True)
class TraceClock:
    """Of a rank's trace: what its times count from, and on which host."""

    base_ns: int
    host: str


def find_slow_units(steps: Sequence[ProfiledStep]) -> list[SlowUnit]:
    """Of one rank's steps, the worst first."""
    times = defaultdict[tuple[str, str], dict[str, list[int]]](dict)
    for step in steps:
        for (unit, phase), ns in _own_work(step).items():
            times[_family(unit), phase].setdefault(unit, []).append(ns)
    slow = [found for (_, phase), units in times.items() for found in _slow_of(steps[0].rank, phase, units)]
    return sorted(slow, key=lambda found: found.equals_ns - found.ns)


def _family(unit: str) -> str:
    """Blocks are equals if their names differ in numbers only."""
    return re.sub(r"\d+", "*", unit)


def _own_work(step: ProfiledStep) -> dict[tuple[str, str], int]:
    """By unit and phase, without what it stood for tensor-parallel collectives; all micro batches
    together."""
    stood = intersect(step.exposed, union(spans_of(t for t in step.transfers if t.lane == "tp")))
    times = defaultdict[tuple[str, str], int](int)
    for run in step.runs:
        times[run.unit, run.phase] += run.end_ns - run.start_ns - total(clip(stood, run.start_ns, run.end_ns))
    return times


def _slow_of(rank: int, phase: str, units: Mapping[str, Sequence[int]]) -> list[SlowUnit]:
    if len(units) < EQUALS:
        return []
    own = {unit: min(times) for unit, times in units.items()}
    slow = []
    for unit, ns in own.items():
        others = [time for other, time in own.items() if other != unit]
        middle = median(others)
        spread = NORMAL * median(abs(time - middle) for time in others)
        if ns > SLOW_FACTOR * middle and ns > middle + SLOW_SPREADS * spread:
            slow.append(SlowUnit(rank, unit, phase, ns, round(middle), round(spread), len(others)))
    return slow


def find_stragglers(
    ranks: Mapping[int, Sequence[ProfiledStep]],
    clocks: Mapping[int, TraceClock],
    on_device: bool,
    mesh: MeshPlan | None,
) -> tuple[list[Straggler], str]:
    """Every rank, the one most waited for first; and which clock. `on_device`: a collective's kernel starts
    when the rank has come to it; else it comes when it launches it. `mesh`: who meets whom in a collective;
    None: all meet all."""
    sent = {rank: dict(_numbered(steps)) for rank, steps in ranks.items()}
    shifts, clock = _shifts(clocks, sent)
    meetings = defaultdict[Key, dict[tuple[int, ...], dict[int, int]]](lambda: defaultdict(dict))
    for rank, transfers in sent.items():
        for key, t in transfers.items():
            came_ns = shifts[rank] + (t.start_ns if on_device else t.issued_ns)
            meetings[key][_group(rank, key[1], mesh)][rank] = came_ns
    by_step = defaultdict[int, list[dict[int, int]]](list)
    for (number, *_), groups in meetings.items():
        most = max(map(len, groups.values()))
        by_step[number] += [came for came in groups.values() if 1 < len(came) == most]
    rows = [row for rank in ranks if (row := _straggler(rank, list(by_step.values())))]
    return sorted(rows, key=lambda row: -row.others_waited_ns), clock


Key = tuple[int, str, str, str, str, int, int]  # step, axis, lane, unit, phase, micro batch, which of these


def _group(rank: int, axis: str, mesh: MeshPlan | None) -> tuple[int, ...]:
    """What is the same for all ranks that meet in a collective on this axis: their places on the others."""
    if mesh is None or axis not in AXES:
        return ()
    places = {
        "dp_replicate": rank // (mesh.dp_shard * mesh.tp),
        "dp_shard": rank // mesh.tp % mesh.dp_shard,
        "tp": rank % mesh.tp,
    }
    return tuple(place for name, place in places.items() if name != axis)


def _numbered(steps: Iterable[ProfiledStep]) -> Iterable[tuple[Key, Transfer]]:
    for step in steps:
        seen = defaultdict[tuple[str, str, str, str, int], int](int)
        for t in sorted(step.transfers, key=lambda t: t.issued_ns):
            if t.lane != "offload":
                same = t.axis, t.lane, t.unit, t.phase, t.micro_batch
                yield (step.number, *same, seen[same]), t
                seen[same] += 1


def _shifts(
    clocks: Mapping[int, TraceClock], sent: Mapping[int, Mapping[Key, Transfer]]
) -> tuple[dict[int, int], str]:
    """What to add to each rank's times so that they are on one clock. A collective ends everywhere at nearly
    one time."""
    hosts = {clock.host for clock in clocks.values()}
    first = min(clocks)
    if len(hosts) == 1 and hosts != {""}:
        shifts = {rank: clock.base_ns - clocks[first].base_ns for rank, clock in clocks.items()}
        return shifts, "one host's clock"
    shifts = {}
    for rank, mine in sent.items():
        apart = [sent[first][key].end_ns - t.end_ns for key, t in mine.items() if key in sent[first]]
        shifts[rank] = round(median(apart)) if apart else 0
    return shifts, "clocks of several hosts, aligned on the ends of the collectives"


def _straggler(rank: int, by_step: Sequence[Sequence[Mapping[int, int]]]) -> Straggler | None:
    """By step, when each rank came to each collective; None where this one meets nobody."""
    met = [[times for times in came if rank in times] for came in by_step]
    count = sum(map(len, met))
    if not count:
        return None
    last, others_waited, waited = 0, list[float](), list[int]()
    for came in met:
        mine = [times for times in came if times[rank] == max(times.values()) > min(times.values())]
        last += len(mine)
        others_waited.append(
            sum(mean(times[rank] - time for other, time in times.items() if other != rank) for times in mine)
        )
        waited.append(sum(max(times.values()) - times[rank] for times in came))
    return Straggler(rank, count, last / count, round(median(others_waited)), round(median(waited)))
