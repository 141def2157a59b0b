"""Sets of times as sorted, separate intervals in whole nanoseconds, so that what is added up is exact."""

from collections.abc import Iterable, Sequence

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
