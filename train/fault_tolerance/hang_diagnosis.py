"""Hang diagnosis: one message made from the reports of all ranks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# in the order of one step
SECTION_ORDER = ("set-up", "first step", "step", "evaluation", "checkpoint", "ended")
# limits of a message, so that 1,000 ranks fit on a screen: groups of ranks, ranges in a group, and
# process groups and numbers of collectives
MOST_PLACES, MOST_RANGES, MOST_COUNTS = 8, 12, 4
# the files in which a rank waits for others to join
_JOINING = ("distributed/process_group.py", "distributed/rendezvous.py")
# the text for a section and its step; "X at step N" for the other sections
_WHEN = {name: name for name in ("set-up", "data", "ended")} | {
    "step": "step {}",
    "first step": "first step ({})",
}


@dataclass(frozen=True)
class RankReport:
    """The state of one rank.

    Args:
        rank: its rank
        section: set-up, data, first step, step, evaluation or checkpoint; ended after the training loop
        step: the step of that section
        in_section_s: seconds since it entered section and step
        silent_s: seconds since its last heartbeat; 0 if it answered, inf if it never sent one
        place: its main thread's innermost frame in our code, such as "train/step.py:70 train_step"
        waits_in: the collective its main thread waits in, such as "all_reduce"; "" otherwise
        inside: its main thread's innermost frame, if that is not in our code
        path: its main thread's frames in our code, outermost first
        collectives: the number of collectives it has started, for each of its process groups by name
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
    """The rank whose section exceeded its timeout, with the elapsed seconds, the config key and its value."""

    rank: int
    world_size: int
    section: str
    step: int
    seconds: float
    key: str
    timeout_s: float


def diagnose(reports: Sequence[RankReport], fired: TimedOut) -> str:
    """Return the message: the suspected ranks and why, where every rank is, and the exceeded timeout."""
    table = sorted(reports, key=lambda report: report.rank)
    headline, suspects = _judge(table)
    blamed = {report.rank for report in suspects}
    groups = sorted(
        _by(table, _situation), key=lambda group: (group[0].rank not in blamed, len(group), group[0].rank)
    )
    lines = [f"STUCK: {headline}", *(f"  {_describe(group)}" for group in groups[:MOST_PLACES])]
    if rest := groups[MOST_PLACES:]:
        lines.append(f"  {_ranks([r for group in rest for r in group])}: at {len(rest)} other places")
    lines += [f"  {line}" for line in _uneven_collectives(table)]
    first = groups[0][0]
    if first.rank in blamed and len(first.path) > 1:
        lines.append(f"  call path of rank {first.rank}: {' > '.join(first.path)}")
    return "\n".join([*lines, f"  {_timeout_line(fired)}"])


def diagnose_alone(report: RankReport, world_size: int, fired: TimedOut | None, why_alone: str) -> str:
    """Return the message of a rank that cannot reach the others; `why_alone` is a clause with the reason.

    `fired` is None if the timeout was exceeded on another rank.
    """
    lines = [
        f"STUCK: rank {report.rank} of {world_size} has no reports of the other ranks: {why_alone}",
        f"  {_describe([report])}",
    ]
    if report.waits_in == "init_process_group" or any(file in report.place for file in _JOINING):
        lines.append(
            f"  it waits for all {world_size} processes to join: check that every node has started, and that"
            " it can reach MASTER_ADDR at MASTER_PORT"
        )
    elif len(report.path) > 1:
        lines.append(f"  call path: {' > '.join(report.path)}")
    return "\n".join(
        [*lines, f"  {_timeout_line(fired)}" if fired else "  a section of another rank exceeded its timeout"]
    )


def as_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges, such as 0-2, 5; of many ranges the first ones and the number of ranks."""
    ranges = list[list[int]]()
    for rank in (ordered := sorted(set(ranks))):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    texts = ["-".join(map(str, ends)) for ends in ranges]
    if len(texts) > MOST_RANGES:
        return f"{', '.join(texts[:MOST_RANGES])}, ... ({len(ordered)} in all)"
    return ", ".join(texts)


# the headline, and the suspected ranks, possibly none
_Verdict = tuple[str, Sequence[RankReport]]


def _judge(table: Sequence[RankReport]) -> _Verdict:
    """Return the ranks that block the others: silent ranks, ranks that left the training loop, or ranks in no
    collective; otherwise ranks that are behind or elsewhere. The first rule that matches is the strongest."""
    if silent := [report for report in table if report.silent_s]:
        return _judge_silent(silent), silent
    ended = [report for report in table if report.section == "ended"]
    if 0 < len(ended) < len(table):
        subject = _ranks(ended, "has", "have")
        return f"{subject} ended, but the others continue: the ranks disagree on the last step", ended
    busy = [report for report in table if not report.waits_in]
    if 0 < len(busy) < len(table):
        return _judge_busy(busy, [report for report in table if report.waits_in]), busy
    return _judge_all_busy(table) if busy else _judge_all_waiting(table)


def _judge_silent(silent: Sequence[RankReport]) -> str:
    never = [report for report in silent if math.isinf(report.silent_s)]
    lost = [report for report in silent if math.isfinite(report.silent_s)]
    parts = [f"{_ranks(never)} never sent a heartbeat"] if never else []
    if lost:
        seconds = f"about {min(report.silent_s for report in lost):.0f} s"
        seconds, noun = (f"{seconds} or more", "processes") if len(lost) > 1 else (seconds, "process")
        no_answer = f"{_ranks(lost, 'does', 'do')} not answer and sent no heartbeat for {seconds}"
        parts.insert(0, f"{no_answer}: {noun} stopped or killed, or host down")
    return "; ".join(parts)


def _judge_busy(busy: Sequence[RankReport], waiting: Sequence[RankReport]) -> str:
    first, orders, when = busy[0], [_order(report) for report in waiting], ""
    if not min(orders) <= _order(first) <= max(orders):
        when = f" {'behind' if _order(first) < min(orders) else 'ahead'}, in {_when(first)},"
    place = first.place or first.inside or "an unknown place (no frame of its main thread)"
    more = "" if len(_by(busy, lambda report: report.place)) == 1 else " and elsewhere"
    others = f"{_ranks(waiting, 'waits', 'wait')} in {_call(waiting[0])}"
    return f"{_ranks(busy, 'is', 'are')}{when} at {place}{more}, while {others}"


def _judge_all_waiting(table: Sequence[RankReport]) -> _Verdict:
    """All ranks wait in collectives: in different ones, or in one that does not complete."""
    groups = sorted(_by(table, _call), key=lambda group: (-len(group), group[0].rank))
    if len(groups) > 1:
        calls = [f"{g[0].waits_in} called from {g[0].place} by {_ranks(g)}" for g in groups[:MOST_PLACES]]
        odd = groups[-1] if len(groups[-1]) < len(groups[0]) else []
        return f"desynchronized collectives: {', '.join(calls)}", odd
    call = _call(table[0])
    if late := _late(table):
        where = f"{_ranks(late, 'is', 'are')} in {_when(late[0])} and the others are ahead"
        return f"desynchronized collectives: all ranks wait in {call}, but {where}", late
    if len(table) == 1:
        return f"{_ranks(table)} waits in {call}", []
    return f"all {len(table)} ranks wait in the same {call}, which does not complete: check the network", []


def _judge_all_busy(table: Sequence[RankReport]) -> _Verdict:
    """No rank waits in a collective that its host shows (with GPUs it runs ahead): name ranks that differ."""
    if len(table) == 1:
        return f"{_ranks(table)} is at {table[0].place or table[0].inside}", table
    if late := _late(table):
        where = f"in {_when(late[0])} at {late[0].place}"
        return f"{_ranks(late, 'is', 'are')} behind the others, {where}", late
    groups = _by(table, lambda report: report.place)
    if len(groups) == 1:
        return f"all {len(table)} ranks are at {table[0].place}, and none is behind", []
    odd = min(groups, key=lambda group: (len(group), group[0].rank))
    if 2 * len(odd) >= len(table):
        return "the ranks are at different places, and none stands out", []
    return f"{_ranks(odd, 'is', 'are')} at {odd[0].place}, unlike the others", odd


def _by(table: Iterable[RankReport], key: Callable[[RankReport], Any]) -> list[list[RankReport]]:
    """Group ranks with the same key."""
    groups = dict[Any, list[RankReport]]()
    for report in table:
        groups.setdefault(key(report), []).append(report)
    return list(groups.values())


def _late(table: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks that are behind the others, or none."""
    late = min(_by(table, _order), key=lambda group: _order(group[0]))
    return late if len(late) < len(table) else []


def _situation(report: RankReport) -> tuple[object, ...]:
    """Return what the ranks on one line have in common; a silence is rounded."""
    silence = report.silent_s > 0, round(min(report.silent_s, 1e9) / 10)  # round() takes no infinity
    return report.section, report.step, report.place, report.waits_in, *silence


def _describe(group: Sequence[RankReport]) -> str:
    """Return one line: ranks, section, place."""
    first, subject = group[0], _ranks(group)
    if math.isinf(first.silent_s):
        return f"{subject}: never sent a heartbeat"
    if first.silent_s:
        return f"{subject}: {_when(first)}, last heartbeat about {first.silent_s:.0f} s ago"
    if first.section == "ended":
        return f"{subject}: ended after step {first.step}"
    since = f"{_when(first)} for {first.in_section_s:.0f} s"
    if first.waits_in:
        return f"{subject}: {since}, in {first.waits_in} called from {first.place}"
    inside = f" (in {first.inside})" if first.inside and first.place else ""
    return f"{subject}: {since}, at {first.place or first.inside}{inside}"


def _uneven_collectives(table: Sequence[RankReport]) -> list[str]:
    """Return a line for each process group whose members have started different numbers of collectives."""
    started = dict[str, dict[int, list[RankReport]]]()
    for report in table:
        for name, number in report.collectives:
            started.setdefault(name, {}).setdefault(number, []).append(report)
    uneven = [(name, sorted(numbers.items())) for name, numbers in started.items() if len(numbers) > 1]
    return [
        f"collectives started in {name}: "
        + "; ".join(f"{n:,} by {_ranks(g)}" for n, g in numbers[:MOST_COUNTS])
        for name, numbers in uneven[:MOST_COUNTS]
    ]


def _timeout_line(fired: TimedOut) -> str:
    section = _when(RankReport(fired.rank, fired.section, fired.step))
    return (
        f"{section} has taken {fired.seconds:.0f} s on rank {fired.rank} of {fired.world_size}, more than "
        f"run.timeouts.{fired.key}={fired.timeout_s:g}: raise the timeout if the run is only slow"
    )


def _order(report: RankReport) -> tuple[int, int]:
    section = "set-up" if report.section == "data" else report.section  # data is part of set-up
    return report.step, SECTION_ORDER.index(section)


def _when(report: RankReport) -> str:
    return _WHEN.get(report.section, f"{report.section} at step {{}}").format(report.step)


def _call(report: RankReport) -> str:
    return f"{report.waits_in} ({report.place})"


def _ranks(reports: Sequence[RankReport], singular: str = "", plural: str = "") -> str:
    """Return the ranks, with the verb for one or for several."""
    verb = plural if len(reports) > 1 else singular
    noun = "ranks" if len(reports) > 1 else "rank"
    return f"{noun} {as_ranges(report.rank for report in reports)} {verb}".rstrip()
