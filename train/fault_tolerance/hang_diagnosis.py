"""Hang diagnosis: where each rank is, by the stack of its main thread, and one message from all reports."""

import math
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
import torch.distributed as dist

from meshwright.train.distributed.ranks import as_ranges

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
MOST_PLACES = 8  # groups of ranks in a message, so that 1,000 ranks fit on a screen
# the files in which a rank waits for others to join
_JOINING = ("distributed/process_group.py", "distributed/rendezvous.py")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The position of a thread.

    Args:
        place: its innermost frame in our code, such as "train/step.py:70 train_step"
        waits_in: the collective it waits in, such as "all_reduce"; "" otherwise
        inside: its innermost frame, if that is not in our code
    """

    place: str = ""
    waits_in: str = ""
    inside: str = ""

    @property
    def at(self) -> str:
        if self.waits_in:
            return f"in {self.waits_in} called from {self.place}"
        inside = f" (in {self.inside})" if self.inside and self.place else ""
        return f"at {self.place or self.inside or 'an unknown place'}{inside}"


@dataclass(frozen=True)
class RankReport(Where):
    """The state of one rank, and where its main thread is.

    Args:
        section: set-up, data, first step, step, evaluation or checkpoint; ended after the training loop
        in_section_s: seconds since it entered section and step
        silent_s: seconds since its last heartbeat; 0 if it answered, inf if it never sent one
        source: what its source of data has failed with, as a clause; "" if nothing fails
    """

    rank: int
    section: str
    step: int = 0
    in_section_s: float = 0.0
    silent_s: float = 0.0
    source: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Its position in the run: of two ranks the one with the lower order is behind."""
        return self.step, SECTION_ORDER[self.section]

    @property
    def when(self) -> str:
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
    """Return the message: a verdict, a table with a line for each group of ranks, the suspects first and then
    by step, and the exceeded timeout."""
    table = sorted(reports, key=lambda report: report.rank)
    verdict, suspects = _judge(table)
    situations = dict[Any, list[RankReport]]()
    for report in table:
        situations.setdefault(_situation(report), []).append(report)
    groups = sorted(
        situations.values(), key=lambda group: (group[0] not in suspects, group[0].order, len(group))
    )
    lines = [f"STUCK: {verdict}", *map(_describe, groups[:MOST_PLACES])]
    if rest := groups[MOST_PLACES:]:
        lines.append(f"{_ranks([report for group in rest for report in group])}: at {len(rest)} other places")
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
    return "\n  ".join([*lines, str(fired or "a section of another rank exceeded its timeout")])


def _judge(table: Sequence[RankReport]) -> tuple[str, Sequence[RankReport]]:
    """Return the verdict and the suspects: those of the first rule, the strongest, that applies to some ranks
    and not to all, or to any if they are silent."""
    behind, at_place = min(report.order for report in table), Counter(map(_place, table))
    in_collectives = all(report.waits_in for report in table)
    rules: tuple[tuple[Callable[[RankReport], object], str], ...] = (
        (lambda report: report.silent_s, "no answer (process stopped or killed, or host down)"),
        (lambda report: report.section == "ended", "ended, but the others go on: they disagree on the end"),
        (lambda report: not report.waits_in, "in no collective, while the others wait"),
        (lambda report: report.order == behind, "behind the others"),
        (lambda report: 2 * at_place[_place(report)] <= len(table), "not where most ranks are"),
    )
    desynchronized = in_collectives and len(at_place) > 1
    for applies, problem in rules:
        odd = [report for report in table if applies(report)]
        if odd and (len(odd) < len(table) or odd[0].silent_s):
            return f"{_ranks(odd)}: {'desynchronized collectives, ' * desynchronized}{problem}", odd
    if len(at_place) > 1:
        return "desynchronized collectives" if in_collectives else "the ranks are at different places", []
    where = "in the same collective, which does not complete: check the network"
    return f"all ranks are {where if in_collectives else 'at the same place'}", []


def _place(report: RankReport) -> tuple[str, str]:
    return report.place, report.waits_in


def _situation(report: RankReport) -> tuple[object, ...]:
    """Return what the ranks on one line have in common; a silence is rounded."""
    return (
        report.section,
        report.step,
        _place(report),
        bool(report.source),
        math.ceil(min(report.silent_s, 1e9) / 10),
    )


def _describe(group: Sequence[RankReport]) -> str:
    """Return the line of a group: ranks, section and step, seconds, place and collective."""
    first, subject = group[0], _ranks(group)
    if math.isinf(first.silent_s):
        return f"{subject}: never sent a heartbeat"
    if first.silent_s:
        return f"{subject}: {first.when}, last heartbeat about {first.silent_s:.0f} s ago"
    if first.section == "ended":
        return f"{subject}: ended after step {first.step}"
    source = f"; its data: {first.source}" if first.source else ""
    return f"{subject}: {first.when} for {first.in_section_s:.0f} s, {first.at}{source}"


def _ranks(reports: Sequence[RankReport]) -> str:
    """Return the ranks as the subject of a line."""
    return f"rank{'s' * (len(reports) > 1)} {as_ranges(report.rank for report in reports)}"


PACKAGE = Path(__file__).parents[2]
ROOT = PACKAGE.parent
TORCH = Path(torch.__file__).parent
# A wait for a collective outside the functions of torch.distributed: in our code and in compiled graphs.
WAIT = re.compile(r"\.wait\(|\bwait_tensor\b|\b_c10d_functional\b")
# PyTorch's name; its tool torchfrtrace searches for it by --prefix
TRACE_FILE = "nccl_trace_rank_"


def main_thread_calls() -> list[FrameSummary]:
    """Return the main thread's frames, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    walked = traceback.walk_stack(frame) if frame else ()
    # not StackSummary.extract, which accesses every source file, even on a network folder that hangs
    return [
        FrameSummary(f.f_code.co_filename, line, f.f_code.co_name, lookup_line=False) for f, line in walked
    ]


def find_where(calls: Sequence[FrameSummary]) -> Where:
    """Return where a stack (innermost call first) is in our code, and in which collective, if any."""
    ours = [call for call in calls if _is_ours(call)]
    inner = calls[: calls.index(ours[0])] if ours else calls
    return Where(
        place=_show(ours[0]) if ours else "",
        waits_in=_collective(inner) or ("wait" if calls and WAIT.search(calls[0].line or "") else ""),
        inside=_show(inner[0]) if inner else "",
    )


def write_stacks(folder: Path, rank: int, world_size: int) -> None:
    """Write the stacks of this rank's threads, except the calling one, into a folder: the main thread's
    first, innermost call last. Raises OSError."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, caller = threading.main_thread().ident, threading.get_ident()
    process = f"process {os.getpid()} on {platform.node()}"
    parts = [f"rank {rank} of {world_size}, {process}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"]
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if number != caller:
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"\nthread {names.get(number, number)} (innermost call last)\n{stack}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank:05d}.txt").write_text("".join(parts), encoding="utf-8")


def keeps_flight_record() -> bool:
    """Return whether PyTorch's flight recorder keeps a record for torchfrtrace: NCCL's collectives."""
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def write_flight_record(folder: Path, rank: int) -> None:
    """Write this rank's last collectives and the state of each, in the format of PyTorch's tool torchfrtrace.

    TORCH_FR_BUFFER_SIZE (formerly TORCH_NCCL_TRACE_BUFFER_SIZE) sets how many are kept; 0 disables the
    record. Raises OSError.
    """
    from torch._C import _distributed_c10d as c10d

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{TRACE_FILE}{rank}").write_bytes(c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def _is_ours(call: FrameSummary) -> bool:
    """Return whether a call is in the package or its checkout, but not in an environment inside it."""
    path = Path(call.filename)
    in_checkout = path.is_relative_to(ROOT) and not {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_relative_to(PACKAGE) or in_checkout


def _show(call: FrameSummary) -> str:
    """Return "file:line function", with the path in the package, the checkout or the folder that contains
    torch; otherwise with the last two parts of the path."""
    path, folders = Path(call.filename), (PACKAGE, ROOT) if _is_ours(call) else (TORCH.parent,)
    inside = (path.relative_to(folder) for folder in folders if path.is_relative_to(folder))
    shown = next(inside, Path(*path.parts[-2:]))
    return f"{shown}:{call.lineno} {call.name}"


def _collective(inner: Sequence[FrameSummary]) -> str:
    """Return the function of torch.distributed that our code (or autograd) called and that still runs."""
    folder = TORCH / "distributed"
    calls = [call for call in inner if Path(call.filename).is_relative_to(folder)]
    named = [call.name for call in calls if call.filename.endswith("distributed_c10d.py")]
    if named:
        return named[-1]
    waiting = ("fsdp", "_composable", "tensor", "_functional_collectives.py", "_symmetric_memory")
    if calls and Path(calls[0].filename).relative_to(folder).parts[0] in waiting:
        return calls[0].name
    return ""
