"""A profiled step of one rank as what computed, what was in flight, and what was waited for; alike for CPU
and GPU.

Times are whole nanoseconds of the trace's own clock. Sets of times are sorted, separate intervals, so that
what is added up is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Interval = tuple[int, int]  # start, end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that are in any of them; in any order, they may overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that are in both; each is sorted and separate."""
    both, i, j = list[Interval](), 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times of the first that are not in the second; each is sorted and separate."""
    left, j = list[Interval](), 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > start:
                left.append((start, second[k][0]))
            start = second[k][1]
            k += 1
        if start < end:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """The parts within a window."""
    return [(max(a, start), min(b, end)) for a, b in intervals if min(b, end) > max(a, start)]


def total(intervals: Iterable[Interval]) -> int:
    """Their length."""
    return sum(end - start for start, end in intervals)


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Something that computed. `work`, `unit` and `phase` as in parallel.planner.timeline.Event."""

    start_ns: int
    end_ns: int
    work: str
    unit: str
    phase: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective in flight from `start_ns` to `end_ns`.

    Args:
        lane: tp, all_gather, reduce_scatter, all_reduce or offload
        axis: of the mesh, "" where the trace does not tell
        issued_ns: when the CPU launched it
        blocking: the thread that launched it stood until it was over
        bytes: of its larger side, 0 where the trace does not tell
        during: the unit whose turn it was on the CPU when it was launched, "" before all
    """

    lane: str
    axis: str
    unit: str
    phase: str
    micro_batch: int
    issued_ns: int
    start_ns: int
    end_ns: int
    blocking: bool
    bytes: int
    during: str


@dataclass(frozen=True, slots=True)
class UnitDeadline:
    """Computing stood before a unit's gathered parameters from `needed_ns` on, and went on at `served_ns`."""

    unit: str
    phase: str
    micro_batch: int
    needed_ns: int
    served_ns: int


@dataclass(frozen=True, slots=True)
class UnitRun:
    """A unit's own forward or backward."""

    unit: str
    phase: str
    micro_batch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class ProfiledStep:
    """One step of one rank.

    Args:
        works, transfers, runs, needs: in the order of their starts
        host: when nothing computed nor was in flight because the next thing had not been launched
        launching: on a CPU: when the operators that launch collectives ran; gloo copies in them
    """

    number: int
    rank: int
    start_ns: int
    end_ns: int
    works: Sequence[ComputeSpan]
    transfers: Sequence[Transfer]
    runs: Sequence[UnitRun]
    needs: Sequence[UnitDeadline]
    host: Sequence[Interval]
    launching: Sequence[Interval] = ()

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @cached_property
    def computing(self) -> list[Interval]:
        """When something computed."""
        return union(clip(((work.start_ns, work.end_ns) for work in self.works), self.start_ns, self.end_ns))

    @cached_property
    def in_flight(self) -> list[Interval]:
        """When a collective was in flight, or being launched."""
        spans = [*((t.start_ns, t.end_ns) for t in self.transfers), *self.launching]
        return union(clip(spans, self.start_ns, self.end_ns))

    @cached_property
    def exposed(self) -> list[Interval]:
        """When a collective was in flight and nothing computed."""
        return subtract(self.in_flight, self.computing)


def is_gather(transfer: Transfer) -> bool:
    """Whether it brings a unit's parameters."""
    return transfer.lane == "all_gather" and bool(transfer.unit)
