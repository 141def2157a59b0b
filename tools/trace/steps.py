"""A profiled step of one rank: compute, communication and waits, in the same form for CPU and GPU.

Times are integer nanoseconds of the trace's clock. Sets of times are arrays of starts and ends, sorted and
disjoint, so that sums are exact.
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
    """Return the times from one attribute of each item to another, in the order of the items."""
    return as_spans([(getattr(each, start), getattr(each, end)) for each in timed])


def as_spans(intervals: Sequence[Interval]) -> Spans:
    """Convert (start, end) pairs to an array of shape [n, 2]."""
    return np.array(intervals, np.int64).reshape(-1, 2)


def union(spans: Spans) -> Spans:
    """Merge spans in any order, which may overlap, into sorted, disjoint ones."""
    spans = spans[spans[:, 0] < spans[:, 1]]
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    gaps = spans[1:, 0] > ends[:-1]
    starts = np.concatenate([spans[:1, 0], spans[1:, 0][gaps]])
    return np.column_stack([starts, np.concatenate([ends[:-1][gaps], ends[-1:]])])


def intersect(first: Spans, second: Spans) -> Spans:
    """Return the times in both; both are sorted and disjoint."""
    return _pieces(first, second, inside=True)


def subtract(first: Spans, second: Spans) -> Spans:
    """Return the times of `first` that are not in `second`; both are sorted and disjoint."""
    return _pieces(first, second, inside=False)


def _pieces(first: Spans, second: Spans, inside: bool) -> Spans:
    """Return the pieces of `first` inside or outside `second`. Adjacent spans of `first` stay separate."""
    edges = np.unique(np.concatenate([first, second]))
    pieces = np.column_stack([edges[:-1], edges[1:]])
    return pieces[_covers(first, edges[:-1]) & (_covers(second, edges[:-1]) == inside)]


def _covers(spans: Spans, times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each time is in a span: more spans have started than ended."""
    return np.searchsorted(spans[:, 0], times, "right") > np.searchsorted(spans[:, 1], times, "right")


def clip(spans: Spans, start: int, end: int) -> Spans:
    """Return the parts within a window."""
    parts = np.clip(spans, start, end)
    return parts[parts[:, 0] < parts[:, 1]]


def total(spans: Spans) -> int:
    """Return the total length."""
    return int((spans[:, 1] - spans[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """A span of compute. `work`, `unit` and `phase` as in parallel.planner.timeline.TimelineEvent."""

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
        axis: mesh axis; "" if not known
        issued_ns: when the CPU launched it
        blocking: whether the launch blocked its thread until the collective ended
        bytes: of its larger side; 0 if not known
        during: the unit whose turn it was on the CPU at the launch; "" before the first
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
    """Compute waited for a unit's gathered parameters from `needed_ns` to `served_ns`."""

    unit: str
    phase: str
    micro_batch: int
    needed_ns: int
    served_ns: int


@dataclass(frozen=True, slots=True)
class UnitRun:
    """The forward or backward of a unit."""

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
        host: host-bound time: no compute and no communication because the next kernel or operator was not
            launched yet
        launching: on a CPU, when operators that launch collectives ran; gloo copies data in them
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
        """Duration of the step."""
        return self.end_ns - self.start_ns

    @cached_property
    def computing(self) -> Spans:
        """When anything computed."""
        return union(clip(spans_of(self.works), self.start_ns, self.end_ns))

    @cached_property
    def in_flight(self) -> Spans:
        """When a collective was in flight or being launched."""
        spans = np.concatenate([spans_of(self.transfers), self.launching])
        return union(clip(spans, self.start_ns, self.end_ns))

    @cached_property
    def exposed(self) -> Spans:
        """When a collective was in flight and nothing computed."""
        return subtract(self.in_flight, self.computing)

    @property
    def quiet(self) -> Spans:
        """When nothing computed and no collective was in flight."""
        full = as_spans([(self.start_ns, self.end_ns)])
        return subtract(subtract(full, self.computing), self.in_flight)


def is_gather(transfer: Transfer) -> bool:
    """Whether the transfer is the all-gather of a unit's parameters."""
    return transfer.lane == "all_gather" and bool(transfer.unit)
