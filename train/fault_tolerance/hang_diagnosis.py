"""Why a job is stuck: one message, made out of what every rank said about itself."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# as they follow in one step
SECTION_ORDER = ("set-up", "first step", "step", "evaluation", "checkpoint", "ended")
# of groups in a message, of ranges in a group, and of groups and numbers of collectives, so that
# 1,000 ranks fit on a screen
MOST_PLACES, MOST_RANGES, MOST_COUNTS = 8, 12, 4
# how a section and its step are written; of others "X at step N"
_WHEN = {name: name for name in ("set-up", "data", "ended")} | {
    "step": "step {}",
    "first step": "first step ({})",
}


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


# the headline, and the ranks it blames: none where none stands out
_Verdict = tuple[str, Sequence[RankReport]]


def _judge(table: Sequence[RankReport]) -> _Verdict:
    """Who keeps the others waiting: the silent ranks, those that have left the loop, those that are in no
    collective; else who is behind, or elsewhere. The first rule that fits is the strongest."""
    if silent := [report for report in table if report.silent_s]:
        return _judge_silent(silent), silent
    ended = [report for report in table if report.section == "ended"]
    if 0 < len(ended) < len(table):
        who = _ranks(ended, "has", "have")
        return f"{who} ended, while the others go on: they disagree on the last step", ended
    busy = [report for report in table if not report.waits_in]
    if 0 < len(busy) < len(table):
        return _judge_busy(busy, [report for report in table if report.waits_in]), busy
    return _judge_all_busy(table) if busy else _judge_all_waiting(table)


def _judge_silent(silent: Sequence[RankReport]) -> str:
    never = [report for report in silent if math.isinf(report.silent_s)]
    gone = [report for report in silent if math.isfinite(report.silent_s)]
    said = [f"{_ranks(never)} never gave a heartbeat"] if never else []
    if gone:
        about = f"about {min(report.silent_s for report in gone):.0f} s"
        about, what = (f"{about} or more", "processes") if len(gone) > 1 else (about, "process")
        no_answer = f"{_ranks(gone, 'gives', 'give')} no answer, and no heartbeat for {about}"
        said.insert(0, f"{no_answer}: {what} stopped or killed, or machine gone")
    return "; ".join(said)


def _judge_busy(busy: Sequence[RankReport], waiting: Sequence[RankReport]) -> str:
    first, orders, when = busy[0], [_order(report) for report in waiting], ""
    if not min(orders) <= _order(first) <= max(orders):
        when = f" {'behind' if _order(first) < min(orders) else 'ahead'}, in {_when(first)},"
    place = first.place or first.inside or "no frame of its main thread"
    more = "" if len(_by(busy, lambda report: report.place)) == 1 else " and elsewhere"
    others = f"{_ranks(waiting, 'waits', 'wait')} in {_call(waiting[0])}"
    return f"{_ranks(busy, 'is', 'are')}{when} at {place}{more}, while {others}"


def _judge_all_waiting(table: Sequence[RankReport]) -> _Verdict:
    """All ranks wait in collectives: in different ones, or in one that does not end."""
    groups = sorted(_by(table, _call), key=lambda group: (-len(group), group[0].rank))
    if len(groups) > 1:
        said = [f"{g[0].waits_in} called from {g[0].place} by {_ranks(g)}" for g in groups[:MOST_PLACES]]
        odd = groups[-1] if len(groups[-1]) < len(groups[0]) else []
        return f"a desynchronised collective: {', '.join(said)}", odd
    call = _call(table[0])
    if late := _late(table):
        where = f"{_ranks(late)} in {_when(late[0])}, the others further on"
        return f"a desynchronised collective: all wait in {call}, but {where}", late
    if len(table) == 1:
        return f"{_ranks(table)} waits in {call}", []
    return f"all {len(table)} ranks wait in the same {call}, which does not end: look at the network", []


def _judge_all_busy(table: Sequence[RankReport]) -> _Verdict:
    """No rank waits in a collective that its host could show (on GPUs the host runs ahead): the odd ones are
    named."""
    if len(table) == 1:
        return f"{_ranks(table)} is at {table[0].place or table[0].inside}", table
    if late := _late(table):
        where = f"in {_when(late[0])} at {late[0].place}"
        return f"{_ranks(late, 'is', 'are')} behind the others, {where}", late
    groups = _by(table, lambda report: report.place)
    if len(groups) == 1:
        return f"all {len(table)} ranks are at {table[0].place}, none is behind", []
    odd = min(groups, key=lambda group: (len(group), group[0].rank))
    if 2 * len(odd) >= len(table):
        return "the ranks are at different places, and none stands out", []
    return f"{_ranks(odd, 'is', 'are')} elsewhere than the others, at {odd[0].place}", odd


def _by(table: Iterable[RankReport], key: Callable[[RankReport], Any]) -> list[list[RankReport]]:
    """Ranks of which the key is the same, together."""
    groups = dict[Any, list[RankReport]]()
    for report in table:
        groups.setdefault(key(report), []).append(report)
    return list(groups.values())


def _late(table: Sequence[RankReport]) -> list[RankReport]:
    """The ranks that are behind the others, or none."""
    late = min(_by(table, _order), key=lambda group: _order(group[0]))
    return late if len(late) < len(table) else []


def _situation(report: RankReport) -> tuple[object, ...]:
    """What ranks that share a line have in common; a silence only about."""
    silence = report.silent_s > 0, round(min(report.silent_s, 1e9) / 10)  # round() takes no infinity
    return report.section, report.step, report.place, report.waits_in, *silence


def _describe(group: Sequence[RankReport]) -> str:
    """One line: ranks, when, where."""
    first, who = group[0], _ranks(group)
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


def _uneven_collectives(table: Sequence[RankReport]) -> list[str]:
    """Lines for the process groups whose members have begun different numbers of collectives."""
    begun = dict[str, dict[int, list[RankReport]]]()
    for report in table:
        for name, number in report.collectives:
            begun.setdefault(name, {}).setdefault(number, []).append(report)
    uneven = [(name, sorted(numbers.items())) for name, numbers in begun.items() if len(numbers) > 1]
    return [
        f"collectives begun in {name}: "
        + "; ".join(f"{n:,} by {_ranks(g)}" for n, g in numbers[:MOST_COUNTS])
        for name, numbers in uneven[:MOST_COUNTS]
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
    return _WHEN.get(report.section, f"{report.section} at step {{}}").format(report.step)


def _call(report: RankReport) -> str:
    return f"{report.waits_in} ({report.place})"


def _ranks(reports: Sequence[RankReport], one: str = "", more: str = "") -> str:
    """The ranks, with the verb for one or for more of them."""
    verb = more if len(reports) > 1 else one
    noun = "ranks" if len(reports) > 1 else "rank"
    return f"{noun} {as_ranges(report.rank for report in reports)} {verb}".rstrip()
