"""Units that are slower than their peers, and ranks that the others wait for."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.parallel.plan.schema import AXES, MeshPlan
from meshwright.tools.trace.events import family_of
from meshwright.tools.trace.steps import ProfiledStep, Transfer, clip, intersect, spans_of, total, union

MIN_PEERS = 3  # units of one shape; with fewer, a slow one cannot be identified
# A slow unit exceeds the median of its peers by this factor and by this multiple of their spread. The spread
# is the median absolute deviation times 1.4826, which is the standard deviation of a normal distribution.
SLOW_FACTOR, SLOW_SPREADS, NORMAL = 1.25, 4.0, 1.4826


@dataclass(frozen=True)
class SlowUnit:
    """A unit's time in a phase, in the profiled step in which it was fastest (occasional slowness does not
    count), with the median and spread of its peers on the same rank."""

    rank: int
    unit: str
    phase: str
    ns: int
    equals_ns: int
    spread_ns: int
    equals: int


@dataclass(frozen=True)
class Straggler:
    """How a rank arrives at the collectives.

    Args:
        last_share: share of the collectives at which it arrived last
        others_waited_ns: mean wait of the other ranks for it, where it was last; per step, the median of all
        waited_ns: its wait for the rank that was last; per step, the median of all
    """

    rank: int
    collectives: int
    last_share: float
    others_waited_ns: int
    waited_ns: int


def find_slow_units(steps: Sequence[ProfiledStep]) -> list[SlowUnit]:
    """Return the slow units of one rank's steps, the largest excess over the peers first."""
    times = defaultdict[tuple[str, str], dict[str, list[int]]](dict)
    for step in steps:
        for (unit, phase), ns in _own_work(step).items():
            times[family_of(unit), phase].setdefault(unit, []).append(ns)
    slow = [row for (_, phase), units in times.items() for row in _slow_of(steps[0].rank, phase, units)]
    return sorted(slow, key=lambda row: row.equals_ns - row.ns)


def _own_work(step: ProfiledStep) -> dict[tuple[str, str], int]:
    """Return time by unit and phase, summed over micro batches, without exposed communication of tensor and
    context parallelism."""
    within = union(spans_of(t for t in step.transfers if t.lane in ("tp", "cp")))
    exposed = intersect(step.exposed, within)
    times = defaultdict[tuple[str, str], int](int)
    for run in step.runs:
        times[run.unit, run.phase] += (
            run.end_ns - run.start_ns - total(clip(exposed, run.start_ns, run.end_ns))
        )
    return times


def _slow_of(rank: int, phase: str, units: Mapping[str, Sequence[int]]) -> list[SlowUnit]:
    if len(units) < MIN_PEERS:
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
    clocks: Mapping[int, tuple[int, str]],
    on_device: bool,
    mesh: MeshPlan | None,
) -> tuple[list[Straggler], str]:
    """Return a row per rank, the one most waited for first, and a description of the clock.

    Args:
        clocks: base in ns and host of each rank's clock
        on_device: a rank arrives at a collective when its kernel starts; otherwise when it launches the
            collective
        mesh: determines the ranks of each collective; None: all ranks are in all of them
    """
    sent = {rank: dict(_numbered(steps)) for rank, steps in ranks.items()}
    shifts, clock = _shifts(clocks, sent)
    meetings = defaultdict[Key, dict[tuple[int, ...], dict[int, int]]](lambda: defaultdict(dict))
    for rank, transfers in sent.items():
        for key, t in transfers.items():
            arrived_ns = shifts[rank] + (t.start_ns if on_device else t.issued_ns)
            meetings[key][_group(rank, key[1], mesh)][rank] = arrived_ns
    by_step = defaultdict[int, list[dict[int, int]]](list)
    for (number, *_), groups in meetings.items():
        most = max(map(len, groups.values()))
        by_step[number] += [arrivals for arrivals in groups.values() if 1 < len(arrivals) == most]
    rows = [row for rank in ranks if (row := _straggler(rank, list(by_step.values())))]
    return sorted(rows, key=lambda row: -row.others_waited_ns), clock


Key = tuple[int, str, str, str, str, int, int]  # step, axis, lane, unit, phase, micro batch, index


def _group(rank: int, axis: str, mesh: MeshPlan | None) -> tuple[int, ...]:
    """Return a key of the ranks that meet in a collective on this axis: their positions on the others."""
    if mesh is None or axis not in AXES:
        return ()
    places = {
        "dp_replicate": rank // (mesh.shards * mesh.tp),
        "dp_shard": rank // (mesh.cp * mesh.tp) % mesh.dp_shard,
        "cp": rank // mesh.tp % mesh.cp,
        "tp": rank % mesh.tp,
    }
    meeting = ("dp_shard", "cp") if axis == "dp_shard" else (axis,)  # FSDP shards over both
    return tuple(place for name, place in places.items() if name not in meeting)


def _numbered(steps: Iterable[ProfiledStep]) -> Iterator[tuple[Key, Transfer]]:
    seen = Counter[tuple[int, str, str, str, str, int]]()
    for step in steps:
        for t in sorted(step.transfers, key=lambda t: t.issued_ns):
            if t.lane != "offload":
                same = step.number, t.axis, t.lane, t.unit, t.phase, t.micro_batch
                yield (*same, seen[same]), t
                seen[same] += 1


def _shifts(
    clocks: Mapping[int, tuple[int, str]], sent: Mapping[int, Mapping[Key, Transfer]]
) -> tuple[dict[int, int], str]:
    """Return the offsets that bring all ranks' times to one clock, and a description of it. If the traces do
    not all name the same host (torch 2.11 names none), the ends of collectives are aligned, because they are
    nearly simultaneous on all ranks."""
    first = min(clocks)
    first_ns, first_host = clocks[first]
    if first_host and all(host == first_host for _, host in clocks.values()):
        shifts = {rank: base_ns - first_ns for rank, (base_ns, _) in clocks.items()}
        return shifts, "one host's clock"
    ends = {key: t.end_ns for key, t in sent[first].items()}
    shifts = {
        rank: round(median([ends[key] - t.end_ns for key, t in transfers.items() if key in ends] or [0]))
        for rank, transfers in sent.items()
    }
    return shifts, "several clocks, aligned on the ends of the collectives"


def _straggler(rank: int, by_step: Sequence[Sequence[Mapping[int, int]]]) -> Straggler | None:
    """Return the row of a rank; None if it meets no other rank. `by_step`: by step and collective, when
    each rank arrived."""
    shared = [[times for times in arrivals if rank in times] for arrivals in by_step]
    count, last, others_waited, waited = sum(map(len, shared)), 0, list[float](), list[int]()
    for arrivals in shared:
        where_last = [t for t in arrivals if t[rank] == max(t.values()) > min(t.values())]
        last += len(where_last)
        others_waited.append(sum((len(t) * t[rank] - sum(t.values())) / (len(t) - 1) for t in where_last))
        waited.append(sum(max(t.values()) - t[rank] for t in arrivals))
    if not count:
        return None
    return Straggler(rank, count, last / count, round(median(others_waited)), round(median(waited)))
