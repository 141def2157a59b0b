"""A profiled step of one rank as what computed, what was in flight, and what was waited for; alike for CPU
and GPU.

Times are whole nanoseconds of the trace's own clock. Sets of times are arrays of starts and ends, sorted and
separate, so that what is added up is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]  # start, end
Spans = npt.NDArray[np.int64]  # a row for each: start, end


def spans_of(timed: Iterable[Any], start: str = "start_ns", end: str = "end_ns") -> Spans:
    """From one time of each to another, in their order."""
    return as_spans([(getattr(each, start), getattr(each, end)) for each in timed])


def as_spans(intervals: Sequence[Interval]) -> Spans:
    return np.array(intervals, np.int64).reshape(-1, 2)


def union(spans: Spans) -> Spans:
    """The times that are in any of them; in any order, they may overlap."""
    spans = spans[spans[:, 0] < spans[:, 1]]
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    apart = spans[1:, 0] > ends[:-1]
    starts = np.concatenate([spans[:1, 0], spans[1:, 0][apart]])
    return np.column_stack([starts, np.concatenate([ends[:-1][apart], ends[-1:]])])


def intersect(first: Spans, second: Spans) -> Spans:
    """The times that are in both; each is sorted and separate."""
    return _pieces(first, second, inside=True)


def subtract(first: Spans, second: Spans) -> Spans:
    """The times of the first that are not in the second; each is sorted and separate."""
    return _pieces(first, second, inside=False)


def _pieces(first: Spans, second: Spans, inside: bool) -> Spans:
    """Those of the first that lie in the second, or do not. Of the first's that touch each stays its own."""
    edges = np.unique(np.concatenate([first, second]))
    pieces = np.column_stack([edges[:-1], edges[1:]])
    return pieces[_covers(first, edges[:-1]) & (_covers(second, edges[:-1]) == inside)]


def _covers(spans: Spans, times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each time is in one of them: more have begun than are over."""
    return np.searchsorted(spans[:, 0], times, "right") > np.searchsorted(spans[:, 1], times, "right")


def clip(spans: Spans, start: int, end: int) -> Spans:
    """The parts within a window."""
    parts = np.clip(spans, start, end)
    return parts[parts[:, 0] < parts[:, 1]]


def total(spans: Spans) -> int:
    """Their length."""
    return int((spans[:, 1] - spans[:, 0]).sum())


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
    host: Spans = field(default_factory=lambda: as_spans([]))
    launching: Spans = field(default_factory=lambda: as_spans([]))

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @cached_property
    def computing(self) -> Spans:
        """When something computed."""
        return union(clip(spans_of(self.works), self.start_ns, self.end_ns))

    @cached_property
    def in_flight(self) -> Spans:
        """When a collective was in flight, or being launched."""
        spans = np.concatenate([spans_of(self.transfers), self.launching])
        return union(clip(spans, self.start_ns, self.end_ns))

    @cached_property
    def exposed(self) -> Spans:
        """When a collective was in flight and nothing computed."""
        return subtract(self.in_flight, self.computing)

    @property
    def quiet(self) -> Spans:
        """When nothing computed nor was in flight."""
        whole = as_spans([(self.start_ns, self.end_ns)])
        return subtract(subtract(whole, self.computing), self.in_flight)


def is_gather(transfer: Transfer) -> bool:
    """Whether it brings a unit's parameters."""
    return transfer.lane == "all_gather" and bool(transfer.unit)
