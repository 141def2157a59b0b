"""Hang diagnosis: one message made from the reports of all ranks."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# in the order of one step; data is part of set-up
SECTION_ORDER = {
    "set-up": 0,
    "data": 0,
    "first step": 1,
    "step": 2,
    "evaluation": 3,
    "checkpoint": 4,
    "ended": 5,
}
# limits of a message, so that 1,000 ranks fit on a screen: groups of ranks, ranges in a group, and
# process groups and numbers of collectives
MOST_PLACES, MOST_RANGES, MOST_COUNTS = 8, 12, 4
# the files in which a rank waits for others to join
_JOINING = ("distributed/process_group.py", "distributed/rendezvous.py")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The position of a thread.

    Args:
        place: its innermost frame in our code, such as "train/step.py:70 train_step"
        waits_in: the collective it waits in, such as "all_reduce"; "" otherwise
        inside: its innermost frame, if that is not in our code
        path: its frames in our code, outermost first
    """

    place: str = ""
    waits_in: str = ""
    inside: str = ""
    path: tuple[str, ...] = ()

    @property
    def at(self) -> str:
        """The position as text."""
        if self.waits_in:
            return f"in {self.waits_in} called from {self.place}"
        inside = f" (in {self.inside})" if self.inside and self.place else ""
        return f"at {self.place or self.inside or 'an unknown place'}{inside}"


@dataclass(frozen=True)
class RankReport(Where):
    """The state of one rank, and where its main thread is.

    Args:
        rank: its rank
        section: set-up, data, first step, step, evaluation or checkpoint; ended after the training loop
        step: the step of that section
        in_section_s: seconds since it entered section and step
        silent_s: seconds since its last heartbeat; 0 if it answered, inf if it never sent one
        collectives: the number of collectives it has started, for each of its process groups by name
    """

    rank: int
    section: str
    step: int = 0
    in_section_s: float = 0.0
    silent_s: float = 0.0
    collectives: tuple[tuple[str, int], ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """Its position in the run: of two ranks the one with the lower order is behind."""
        return self.step, SECTION_ORDER[self.section]

    @property
    def when(self) -> str:
        """Its section and step."""
        if self.section in ("set-up", "data"):
            return self.section
        return f"step {self.step}" if self.section == "step" else f"{self.section} at step {self.step}"


@dataclass(frozen=True)
class TimedOut:
    """The rank whose section exceeded its timeout, and the timeout: its config key and value."""

    report: RankReport
    world_size: int
    key: str
    timeout_s: float

    def __str__(self) -> str:
        late = self.report
        return (
            f"{late.when} has taken {late.in_section_s:.0f} s on rank {late.rank} of {self.world_size}, more "
            f"than run.timeouts.{self.key}={self.timeout_s:g}: raise the timeout if the run is only slow"
        )


def diagnose(reports: Iterable[RankReport], fired: TimedOut) -> str:
    """Return the message: a verdict, a line for each group of ranks with the suspects first and then by step,
    and the exceeded timeout."""
    table = sorted(reports, key=lambda report: report.rank)
    verdict, suspects = _judge(table)
    blamed = {report.rank for report in suspects}
    groups = _by(table, _situation)
    groups.sort(key=lambda group: (group[0].rank not in blamed, group[0].order, len(group)))
    lines = [f"STUCK: {verdict}", *map(_describe, groups[:MOST_PLACES])]
    if rest := groups[MOST_PLACES:]:
        lines.append(f"{_ranks([report for group in rest for report in group])}: at {len(rest)} other places")
    lines += _uneven_collectives(table)
    first = groups[0][0]
    if first.rank in blamed and len(first.path) > 1:
        lines.append(f"call path of rank {first.rank}: {' > '.join(first.path)}")
    return "\n  ".join([*lines, str(fired)])


def diagnose_alone(report: RankReport, world_size: int, fired: TimedOut | None, why_alone: str) -> str:
    """Return the message of a rank that cannot reach the others; `why_alone` is a clause with the reason.

    `fired` is None if the timeout was exceeded on another rank.
    """
    verdict = f"STUCK: rank {report.rank} of {world_size} has no reports of the other ranks: {why_alone}"
    lines = [verdict, _describe([report])]
    if report.waits_in == "init_process_group" or any(file in report.place for file in _JOINING):
        lines.append(
            f"it waits for all {world_size} processes to join: check that every node has started, and that "
            "it can reach MASTER_ADDR at MASTER_PORT"
        )
    elif len(report.path) > 1:
        lines.append(f"call path: {' > '.join(report.path)}")
    return "\n  ".join([*lines, str(fired or "a section of another rank exceeded its timeout")])


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


def _judge(table: Sequence[RankReport]) -> tuple[str, Sequence[RankReport]]:
    """Return the verdict and the suspects. The first rule that applies to some ranks and not to all is the
    strongest: ranks are silent, have left the training loop, are in no collective and so keep the others
    waiting, are behind, or are not where most ranks are."""
    if silent := [report for report in table if report.silent_s]:
        least_s, more = min(report.silent_s for report in silent), " or more" if len(silent) > 1 else ""
        beat = "never sent a heartbeat"
        if math.isfinite(least_s):
            beat = f"sent no heartbeat for about {least_s:.0f} s{more}"
        subject = _ranks(silent, "does", "do")
        return f"{subject} not answer and {beat}: process stopped or killed, or host down", silent
    behind, at_place = min(report.order for report in table), Counter(map(_place, table))
    rules: tuple[Callable[[RankReport], bool], ...] = (
        lambda report: report.section == "ended",
        lambda report: not report.waits_in,
        lambda report: report.order == behind,
        lambda report: 2 * at_place[_place(report)] <= len(table),
    )
    all_wait = all(report.waits_in for report in table)
    problem = "desynchronized collectives: " if all_wait else ""
    for rule in rules:
        odd = [report for report in table if rule(report)]
        others = [report for report in table if not rule(report)]
        if odd and others and odd[0].section == "ended":
            subject = _ranks(odd, "has", "have")
            return f"{subject} ended, but the others continue: the ranks disagree on the last step", odd
        if odd and others:
            return f"{problem}{_locate(odd, others)}, while {_locate(others)}", odd
    if len(at_place) > 1:
        problem = problem or "the ranks are at different places, and none stands out: "
        return problem + ", ".join(map(_locate, _by(table, _place)[:MOST_PLACES])), []
    tail = ", which does not complete: check the network" if all_wait else ", and none is behind"
    return f"{_locate(table)}{tail if len(table) > 1 else ''}", []


def _locate(group: Sequence[RankReport], others: Sequence[RankReport] = ()) -> str:
    """Return where ranks are, and whether they are in another section or step than all the others."""
    first, orders = group[0], [report.order for report in others or group]
    lag = "behind" if first.order < min(orders) else "ahead" if first.order > max(orders) else ""
    when = f"{lag}, in {first.when}, " if lag else ""
    more = " and elsewhere" if len(_by(group, _place)) > 1 else ""
    return f"{_ranks(group, 'is', 'are')} {when}{first.at}{more}"


def _by(table: Iterable[RankReport], key: Callable[[RankReport], Any]) -> list[list[RankReport]]:
    """Group ranks with the same key."""
    groups = dict[Any, list[RankReport]]()
    for report in table:
        groups.setdefault(key(report), []).append(report)
    return list(groups.values())


def _place(report: RankReport) -> tuple[str, str]:
    return report.place, report.waits_in


def _situation(report: RankReport) -> tuple[object, ...]:
    """Return what the ranks on one line have in common; a silence is rounded."""
    return report.section, report.step, _place(report), math.ceil(min(report.silent_s, 1e9) / 10)


def _describe(group: Sequence[RankReport]) -> str:
    """Return the line of a group: ranks, section and step, seconds, place and collective."""
    first, subject = group[0], _ranks(group)
    if math.isinf(first.silent_s):
        return f"{subject}: never sent a heartbeat"
    if first.silent_s:
        return f"{subject}: {first.when}, last heartbeat about {first.silent_s:.0f} s ago"
    if first.section == "ended":
        return f"{subject}: ended after step {first.step}"
    return f"{subject}: {first.when} for {first.in_section_s:.0f} s, {first.at}"


def _uneven_collectives(table: Sequence[RankReport]) -> list[str]:
    """Return a line for each process group whose members have started different numbers of collectives."""
    started = dict[str, dict[int, list[RankReport]]]()
    for report in table:
        for name, number in report.collectives:
            started.setdefault(name, {}).setdefault(number, []).append(report)
    uneven = [(name, sorted(numbers.items())) for name, numbers in started.items() if len(numbers) > 1]
    return [
        f"collectives started in {name}: "
        + "; ".join(f"{n:,} by {_ranks(group)}" for n, group in numbers[:MOST_COUNTS])
        for name, numbers in uneven[:MOST_COUNTS]
    ]


def _ranks(reports: Sequence[RankReport], singular: str = "", plural: str = "") -> str:
    """Return the ranks, with the verb for one or for several."""
    noun, verb = ("ranks", plural) if len(reports) > 1 else ("rank", singular)
    return f"{noun} {as_ranges(report.rank for report in reports)} {verb}".rstrip()
