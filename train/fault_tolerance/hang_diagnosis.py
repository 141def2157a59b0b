"""Why a job is stuck: one message, made out of what every rank said about itself."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# as they follow in one step
SECTION_ORDER = ("set-up", "first step", "step", "evaluation", "checkpoint", "ended")
# of groups in a message and of ranges in a group, so that 1,000 ranks fit on a screen
MOST_PLACES, MOST_RANGES = 8, 12


@dataclass(frozen=True)
class RankReport:
    """What one rank was doing.

    Args:
        rank: its rank
        section: what it was in: set-up, data, first step, step, evaluation, checkpoint; ended once it left
            the loop
        step: the step of that
        in_section_s: seconds since it entered section and step
        silent_s: seconds since its last heartbeat; 0 if it answered, inf if there never was one
        place: its main thread's innermost frame in our own code, such as "train/step.py:70 train_step"
        waits_in: the collective its main thread waits in, such as "all_reduce"; "" if it is elsewhere
        inside: its main thread's innermost frame, where that is not our code
        path: places in our code that led there, outermost first
        collectives: for each of its process groups, by name, how many collectives it has begun
    """

    rank: int
    section: str
    step: int = 0
    in_section_s: float = 0.0
    silent_s: float = 0.0
    place: str = ""
    waits_in: str = ""
    inside: str = ""
    path: tuple[str, ...] = ()
    collectives: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class TimedOut:
    """The rank whose section outlasted its time-out, and the number that says so."""

    rank: int
    world_size: int
    section: str
    step: int
    seconds: float
    key: str
    timeout_s: float


def diagnose(reports: Sequence[RankReport], fired: TimedOut) -> str:
    """The message, of a few lines: who is to blame and why, where everybody is, which time-out it was."""
    headline, suspects = _judge(reports)
    groups = sorted(
        _groups(reports), key=lambda group: (group[0].rank not in suspects, len(group), group[0].rank)
    )
    lines = [f"STUCK: {headline}", *(f"  {_describe(group)}" for group in groups[:MOST_PLACES])]
    if rest := groups[MOST_PLACES:]:
        lines.append(f"  {_ranks(r.rank for group in rest for r in group)}: at {len(rest)} other places")
    lines += [f"  {line}" for line in _uneven_collectives(reports)]
    first = groups[0][0]
    if first.rank in suspects and len(first.path) > 1:
        lines.append(f"  how rank {first.rank} came there: {' > '.join(first.path)}")
    return "\n".join([*lines, f"  {_outlasted(fired)}"])


def diagnose_alone(report: RankReport, world_size: int, fired: TimedOut | None, why_alone: str) -> str:
    """The message of a rank that cannot ask the others, for a reason that is a clause: the store does not
    answer.

    `fired` is None where another rank's time-out ran out.
    """
    lines = [
        f"STUCK: rank {report.rank} of {world_size} can only speak for itself: {why_alone}",
        f"  {_describe([report])}",
    ]
    if report.waits_in == "init_process_group":
        lines.append(
            f"  it waits for all {world_size} processes to join: is every node started, and can it reach"
            " MASTER_ADDR at MASTER_PORT?"
        )
    elif len(report.path) > 1:
        lines.append(f"  how it came there: {' > '.join(report.path)}")
    return "\n".join(
        [*lines, f"  {_outlasted(fired)}" if fired else "  another rank's section has outlasted its time-out"]
    )


def as_ranges(ranks: Iterable[int]) -> str:
    """Ranks as ranges, such as 0-2, 5; of many ranges the first ones and the number of ranks."""
    ordered = sorted(set(ranks))
    starts = [rank for i, rank in enumerate(ordered) if i == 0 or ordered[i - 1] != rank - 1]
    ends = [rank for i, rank in enumerate(ordered) if i == len(ordered) - 1 or ordered[i + 1] != rank + 1]
    ranges = [
        f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)
    ]
    if len(ranges) > MOST_RANGES:
        return f"{', '.join(ranges[:MOST_RANGES])}, ... ({len(ordered)} in all)"
    return ", ".join(ranges)


def _judge(reports: Sequence[RankReport]) -> tuple[str, set[int]]:
    """Headline and the ranks it blames (none: no rank stands out). The first rule that fits is the
    strongest."""
    if silent := [report for report in reports if report.silent_s > 0]:
        return _judge_silent(silent), _numbers(silent)
    ended = [report for report in reports if report.section == "ended"]
    if ended and len(ended) < len(reports):
        have = "have" if len(ended) > 1 else "has"
        return (
            f"{_ranks(_numbers(ended))} {have} ended, while the others go on: they disagree on the last step",
            _numbers(ended),
        )
    waiting = [report for report in reports if report.waits_in]
    busy = [report for report in reports if not report.waits_in]
    if waiting and busy:
        return _judge_busy(busy, waiting), _numbers(busy)
    return _judge_waiting(waiting) if waiting else _judge_all_busy(busy)


def _judge_silent(silent: Sequence[RankReport]) -> str:
    never = [report for report in silent if math.isinf(report.silent_s)]
    gone = [report for report in silent if not math.isinf(report.silent_s)]
    said = []
    if gone:
        give, or_more, processes = (
            ("give", " or more", "processes") if len(gone) > 1 else ("gives", "", "process")
        )
        silent_s = min(report.silent_s for report in gone)
        said.append(
            f"{_ranks(_numbers(gone))} {give} no answer, and no heartbeat for about {silent_s:.0f} "
            f"s{or_more}: {processes} stopped or killed, or machine gone"
        )
    if never:
        said.append(f"{_ranks(_numbers(never))} never gave a heartbeat")
    return "; ".join(said)


def _judge_busy(busy: Sequence[RankReport], waiting: Sequence[RankReport]) -> str:
    first, others = (
        busy[0],
        f"{_ranks(_numbers(waiting))} {'wait' if len(waiting) > 1 else 'waits'} in {waiting[0].waits_in}",
    )
    when = ""
    if _order(first) < min(map(_order, waiting)):
        when = f" behind, in {_when(first)}"
    elif _order(first) > max(map(_order, waiting)):
        when = f" ahead, in {_when(first)}"
    more = "" if len({report.place for report in busy}) == 1 else " and elsewhere"
    are = "are" if len(busy) > 1 else "is"
    place = first.place or first.inside or "no frame of its main thread"
    return (
        f"{_ranks(_numbers(busy))} {are}{when}{',' if when else ''} at {place}{more}, while {others} "
        f"({waiting[0].place})"
    )


def _judge_waiting(waiting: Sequence[RankReport]) -> tuple[str, set[int]]:
    """All ranks wait in collectives: in different ones, or in one that does not end."""
    calls: dict[tuple[str, str], list[int]] = {}
    for report in waiting:
        calls.setdefault((report.waits_in, report.place), []).append(report.rank)
    if len(calls) > 1:
        ordered = sorted(calls.items(), key=lambda item: (-len(item[1]), item[1]))
        said = [
            f"{name} called from {place} by {_ranks(ranks)}" for (name, place), ranks in ordered[:MOST_PLACES]
        ]
        fewest = ordered[-1][1]
        return f"a desynchronised collective: {', '.join(said)}", set(fewest) if len(fewest) < len(
            ordered[0][1]
        ) else set()
    name, place = next(iter(calls))
    steps = {_order(report) for report in waiting}
    if len(steps) > 1:
        late = [report for report in waiting if _order(report) == min(steps)]
        behind = f"{_ranks(_numbers(late))} in {_when(late[0])}, the others further on"
        return f"a desynchronised collective: all wait in {name} ({place}), but {behind}", _numbers(late)
    if len(waiting) == 1:
        return f"rank {waiting[0].rank} waits in {name} ({place})", set()
    return (
        f"all {len(waiting)} ranks wait in the same {name} ({place}), which does not end: look at the "
        "network",
        set(),
    )


def _judge_all_busy(busy: Sequence[RankReport]) -> tuple[str, set[int]]:
    """No rank waits in a collective that its host could show (on GPUs the host runs ahead): the odd ones are
    named."""
    if len(busy) == 1:
        return f"rank {busy[0].rank} is at {busy[0].place or busy[0].inside}", {busy[0].rank}
    steps = {_order(report) for report in busy}
    if len(steps) > 1:
        late = [report for report in busy if _order(report) == min(steps)]
        are = "are" if len(late) > 1 else "is"
        return (
            f"{_ranks(_numbers(late))} {are} behind the others, in {_when(late[0])} at {late[0].place}",
            _numbers(late),
        )
    places: dict[str, list[int]] = {}
    for report in busy:
        places.setdefault(report.place, []).append(report.rank)
    if len(places) == 1:
        return f"all {len(busy)} ranks are at {busy[0].place}, none is behind", set()
    place, ranks = min(places.items(), key=lambda item: (len(item[1]), item[1]))
    if 2 * len(ranks) >= len(busy):
        return "the ranks are at different places, and none stands out", set()
    return f"{_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} elsewhere than the others, at {place}", set(
        ranks
    )


def _groups(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Ranks that say the same, together."""
    groups: dict[tuple[object, ...], list[RankReport]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        silence = (
            round(report.silent_s / 10)
            if report.silent_s and not math.isinf(report.silent_s)
            else report.silent_s
        )
        key = (report.section, report.step, report.place, report.waits_in, bool(report.silent_s), silence)
        groups.setdefault(key, []).append(report)
    return list(groups.values())


def _describe(group: Sequence[RankReport]) -> str:
    """One line: ranks, when, where."""
    first, who = group[0], _ranks(report.rank for report in group)
    if math.isinf(first.silent_s):
        return f"{who}: never gave a heartbeat"
    if first.silent_s:
        return f"{who}: {_when(first)}, last heartbeat about {first.silent_s:.0f} s ago"
    if first.section == "ended":
        return f"{who}: ended after step {first.step}"
    since = f"{_when(first)} for {first.in_section_s:.0f} s"
    if first.waits_in:
        return f"{who}: {since}, in {first.waits_in} called from {first.place}"
    inside = f" (in {first.inside})" if first.inside and first.place else ""
    return f"{who}: {since}, at {first.place or first.inside}{inside}"


def _uneven_collectives(reports: Sequence[RankReport]) -> list[str]:
    """Lines for the process groups whose members have begun different numbers of collectives."""
    begun: dict[str, dict[int, list[int]]] = {}
    for report in reports:
        for name, number in report.collectives:
            begun.setdefault(name, {}).setdefault(number, []).append(report.rank)
    uneven = [(name, numbers) for name, numbers in begun.items() if len(numbers) > 1]
    return [
        f"collectives begun in {name}: "
        + "; ".join(f"{n:,} by {_ranks(ranks)}" for n, ranks in sorted(numbers.items())[:4])
        for name, numbers in uneven[:4]
    ]


def _outlasted(fired: TimedOut) -> str:
    which = _when(RankReport(fired.rank, fired.section, fired.step))
    return (
        f"{which} has taken {fired.seconds:.0f} s on rank {fired.rank} of {fired.world_size}, more than "
        f"run.timeouts.{fired.key}={fired.timeout_s:g}: raise that if it is only slow"
    )


def _order(report: RankReport) -> tuple[int, int]:
    section = "set-up" if report.section == "data" else report.section  # which comes amid it
    return report.step, SECTION_ORDER.index(section)


def _when(report: RankReport) -> str:
    if report.section in ("set-up", "data", "ended"):
        return report.section
    if report.section == "step":
        return f"step {report.step}"
    return (
        f"{report.section} ({report.step})"
        if report.section == "first step"
        else f"{report.section} at step {report.step}"
    )


def _numbers(reports: Iterable[RankReport]) -> set[int]:
    return {report.rank for report in reports}


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(set(ranks))
    return f"{'ranks' if len(ordered) > 1 else 'rank'} {as_ranges(ordered)}"
