"""Where a step's time went, in shares that sum to exactly 1; and of each kind of communication, how much was
hidden."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.tools.trace.spans import clip, intersect, total, union
from meshwright.tools.trace.steps import Step

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


def split_step(step: Step) -> Shares:
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


def sum_communication(step: Step) -> list[Communication]:
    """By lane and axis, longest first. What two at once send counts for each."""
    found = defaultdict[tuple[str, str], list[tuple[int, int, int]]](list)
    for t in step.transfers:
        found[t.lane, t.axis].append((t.start_ns, t.end_ns, t.bytes))
    rows = []
    for (lane, axis), sent in found.items():
        spans = union(clip(((start_ns, end_ns) for start_ns, end_ns, _ in sent), step.start_ns, step.end_ns))
        hidden_ns = total(intersect(spans, step.computing))
        rows.append(
            Communication(lane, axis, len(sent), total(spans), hidden_ns, sum(size for _, _, size in sent))
        )
    return sorted(rows, key=lambda row: -row.ns)


def median_step(steps: Sequence[Step]) -> Step:
    """The one of median length, the longer of the two in the middle."""
    return sorted(steps, key=lambda step: step.length_ns)[len(steps) // 2]


def standing(step: Step, start_ns: int, end_ns: int) -> int:
    """For how long of a window nothing computed while something was in flight."""
    return total(clip(_near(step.exposed, start_ns, end_ns), start_ns, end_ns))


def _near(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> Sequence[tuple[int, int]]:
    """Those that may reach into a window, found by halving."""
    return spans[max(bisect_right(spans, (start_ns, start_ns)) - 1, 0) : bisect_left(spans, (end_ns, end_ns))]
