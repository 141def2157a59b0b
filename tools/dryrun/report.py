"""The report of `tools.dryrun`, as text and JSON: the counted step beside the plan's prediction."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.serialize import plan_to_dict, plan_to_table
from meshwright.tools.cli import format_table
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.launches import (
    LIBRARIES,
    AxisCollective,
    KernelLaunch,
    LaunchedGraph,
    read_recorded_step,
)
from meshwright.tools.dryrun.log import Call
from meshwright.tools.dryrun.program import MEMORY_FILE, steady_step, steady_waits, stream_numbers
from meshwright.tools.plan.report import PlanReport
from meshwright.tools.simulate import total_by_axis, totals_table

FIRST = 24  # kernels shown without --all
H100_GIB = 79.19
NO_TIMES = (
    "The kernels compute nothing and take no time: there are no times and no values here. Memory beside the "
    "allocator (context, NCCL, cuDNN's workspace) is not counted."
)


@dataclass(frozen=True)
class KernelCount:
    """The launches of a kernel in a step.

    Args:
        bytes: read and written in a step, each tensor of a call once; None if not known for each launch
        share: of all known bytes
        registers, spills: of a thread, spills in bytes; None for libraries whose kernels the fake replaces
    """

    name: str
    library: str
    calls: int
    bytes: int | None
    share: float | None
    registers: int | None
    spills: int | None


@dataclass(frozen=True)
class StreamUse:
    """What a step puts on a stream: numbers of kernels, copies and collectives by op. Stream 0 computes."""

    stream: int
    kernels: int
    copies: int
    collectives: Mapping[str, int]


@dataclass(frozen=True)
class StreamWait:
    """How often in a step a stream waits for another."""

    stream: int
    awaited: int
    count: int


@dataclass(frozen=True)
class CopyCount:
    """The copies of one kind in a step: DtoD within the GPU, HtoD and DtoH from and to the host."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class DryRun:
    """The counted step.

    Args:
        launches: by library
        host_waits, device_allocations: by kind of call
        unknown_launches: launches whose bytes are not known
    """

    launches: Mapping[str, int]
    host_waits: Mapping[str, int]
    device_allocations: Mapping[str, int]
    streams: tuple[StreamUse, ...]
    stream_waits: tuple[StreamWait, ...]
    copies: tuple[CopyCount, ...]
    collectives: tuple[AxisCollective, ...]
    kernels: tuple[KernelCount, ...]
    unknown_launches: int
    graphs: tuple[LaunchedGraph, ...]
    peak_bytes: int
    reserved_bytes: int


def read_dry_run(scratch: Path) -> DryRun:
    """Return the counts of the last step and the kernels of the recorded one."""
    calls = log.read_log(scratch)
    step, recorded = steady_step(calls), read_recorded_step(scratch)
    waits = steady_waits(calls)
    numbers = stream_numbers(step, waits)
    memory = json.loads((scratch / MEMORY_FILE).read_text())
    return DryRun(
        launches={
            library: count
            for kind, library in LIBRARIES.items()
            if (count := sum(call.kind == kind for call in step))
        },
        host_waits=Counter(call.kind for call in log.host_waits(step)),
        device_allocations=Counter(call.kind for call in log.allocations(step)),
        streams=tuple(_streams(step, numbers)),
        stream_waits=tuple(
            StreamWait(numbers[waiting], numbers[awaited], count)
            for (waiting, awaited), count in sorted(waits.items())
        ),
        copies=tuple(_copies(step)),
        collectives=tuple(replace(c, stream=numbers[c.stream]) for c in recorded.collectives),
        kernels=tuple(count_kernels(recorded.launches)),
        unknown_launches=sum(launch.bytes is None for launch in recorded.launches),
        graphs=recorded.graphs,
        peak_bytes=memory["allocated"],
        reserved_bytes=memory["reserved"],
    )


def count_kernels(launches: Sequence[KernelLaunch]) -> list[KernelCount]:
    """Return a row per kernel, the most bytes first; last those whose bytes are not known."""
    by_name = defaultdict[tuple[str, str], list[KernelLaunch]](list)
    for launch in launches:
        by_name[launch.library, launch.name].append(launch)
    total = sum(launch.bytes or 0 for launch in launches)
    rows = []
    for (library, name), calls in by_name.items():
        size = sum(call.bytes or 0 for call in calls)
        known = all(call.bytes is not None for call in calls)
        registers, spills = (
            max((value for value in values if value is not None), default=None)
            for values in ([call.registers for call in calls], [call.spills for call in calls])
        )
        row = KernelCount(name, library, len(calls), size, size / total if total else 0.0, registers, spills)
        rows.append(row if known else replace(row, bytes=None, share=None))
    return sorted(rows, key=lambda row: (-1 if row.bytes is None else row.bytes, row.calls), reverse=True)


def _streams(step: Sequence[Call], numbers: Mapping[int, int]) -> list[StreamUse]:
    by_stream = defaultdict[int, list[Call]](list)
    for call in step:
        if call.kind in log.ON_STREAMS:
            by_stream[numbers[call.stream]].append(call)
    return [
        StreamUse(
            stream,
            log.count_launches(calls),
            sum(call.kind in ("memcpy", "memset") for call in calls),
            dict(Counter(collective.op for collective in log.collectives(calls))),
        )
        for stream, calls in sorted(by_stream.items())
    ]


def _copies(step: Sequence[Call]) -> list[CopyCount]:
    sizes = defaultdict[str, list[int]](list)
    for call in step:
        if call.kind == "memcpy":
            sizes[call.words[0]].append(int(call.words[1]))
    return [CopyCount(kind, len(each), sum(each)) for kind, each in sorted(sizes.items())]


def make_notes(run: DryRun, report: PlanReport) -> list[str]:
    """Return the sentences that limit or explain the figures."""
    notes = [NO_TIMES]
    launches = sum(row.calls for row in run.kernels)
    if run.unknown_launches:
        notes.append(
            f"Bytes are known of {launches - run.unknown_launches} of {launches} launches. Unknown: kernels "
            "that read or write by index, the smaller kernels of an operator, and kernels outside operators."
        )
    if run.reserved_bytes > H100_GIB * GIB:
        notes.append(
            f"This plan does not fit: the allocator reserves {run.reserved_bytes / GIB:.1f} GiB, and an H100 "
            f"has {H100_GIB} GiB."
        )
    if report.fit_error:
        notes.append(f"By the prediction: {report.fit_error}")
    return notes


def as_json(run: DryRun, report: PlanReport) -> dict[str, Any]:
    """Return the report as plain data, memory in GiB."""
    return {
        "launches": sum(run.launches.values()),
        "launches_by_library": dict(run.launches),
        "host_waits": sum(run.host_waits.values()),
        "device_allocations": sum(run.device_allocations.values()),
        "streams": [asdict(use) for use in run.streams],
        "stream_waits": [asdict(wait) for wait in run.stream_waits],
        "copies": [asdict(copy) for copy in run.copies],
        "collectives": [asdict(collective) for collective in run.collectives],
        "totals": total_by_axis(run.collectives),
        "kernels": [asdict(kernel) for kernel in run.kernels],
        "launches_of_unknown_bytes": run.unknown_launches,
        "graphs": [asdict(graph) for graph in run.graphs],
        "peak_memory_gib": run.peak_bytes / GIB,
        "reserved_memory_gib": run.reserved_bytes / GIB,
        "predicted": {
            "peak_memory_gib": report.memory.peak_bytes / GIB,
            "reserved_memory_gib": predicted_reserved(report) / GIB,
        },
        "plan": plan_to_dict(report.plan),
        "reasons": list(report.reasons),
        "notes": make_notes(run, report),
    }


def predicted_reserved(report: PlanReport) -> int:
    """Return the predicted bytes that the allocator reserves."""
    assert report.prediction is not None, "a dry run is planned for H100s"
    return report.prediction.allocator_bytes


def as_text(run: DryRun, report: PlanReport, first: int | None) -> str:
    """Return the report as text with the first `first` kernels (None: all)."""
    plan = report.plan
    parts = [
        f"rank 0 of {plan.mesh.world_size} on a fake H100, one optimizer step after the first two",
        plan_to_table(plan),
        *(["\n".join(["why:", *(f"- {sentence}" for sentence in report.reasons)])] if report.reasons else []),
        format_table(("in a step", "", ""), _count_rows(run)),
        format_table(("memory, GiB", "dry run", "predicted", "difference"), _memory_rows(run, report)),
        _stream_table(run),
        totals_table(total_by_axis(run.collectives)),
        _kernel_table(run.kernels, first),
    ]
    return "\n\n".join([*parts, "\n".join(f"note: {note}" for note in make_notes(run, report))])


def _count_rows(run: DryRun) -> list[tuple[str, str, str]]:
    counted = [
        ("kernel launches", run.launches),
        ("host waits", run.host_waits),
        ("device allocations", run.device_allocations),
    ]
    rows = [
        (name, str(sum(counts.values())), ", ".join(f"{kind} {count}" for kind, count in counts.items()))
        for name, counts in counted
    ]
    return rows + [
        (f"copies {copy.kind}", str(copy.count), f"{copy.bytes / GIB:.3f} GiB") for copy in run.copies
    ]


def _memory_rows(run: DryRun, report: PlanReport) -> list[tuple[str, ...]]:
    pairs = [
        ("allocated, peak", run.peak_bytes, report.memory.peak_bytes),
        ("reserved", run.reserved_bytes, predicted_reserved(report)),
    ]
    return [
        (name, f"{counted / GIB:.2f}", f"{predicted / GIB:.2f}", f"{predicted / counted - 1:+.1%}")
        for name, counted, predicted in pairs
    ]


def _stream_table(run: DryRun) -> str:
    waits = defaultdict[int, list[str]](list)
    for wait in run.stream_waits:
        waits[wait.stream].append(f"{wait.count} for {wait.awaited}")
    rows = [
        (
            f"{use.stream}",
            str(use.kernels),
            str(use.copies),
            ", ".join(f"{op} {count}" for op, count in use.collectives.items()),
            ", ".join(waits[use.stream]),
        )
        for use in run.streams
    ]
    return format_table(("stream", "kernels", "copies", "collectives", "waits"), rows)


def _kernel_table(kernels: Sequence[KernelCount], first: int | None) -> str:
    rows = [
        (
            "-" if row.share is None else f"{row.share:6.1%}",
            "-" if row.bytes is None else f"{row.bytes / 1e9:8.3f}",
            str(row.calls),
            "-" if row.registers is None else str(row.registers),
            "-" if row.spills is None else str(row.spills),
            f"{row.library}: {row.name}",
        )
        for row in kernels[:first]
    ]
    total = sum(row.bytes or 0 for row in kernels)
    rows.append(("", f"{total / 1e9:8.3f}", str(sum(row.calls for row in kernels)), "", "", "all"))
    table = format_table(("share", "GB", "calls", "registers", "spills B", "kernel"), rows)
    left_out = len(kernels) - len(rows) + 1
    return table + (f"\n... {left_out} more kernels (--all shows them)" if left_out else "")
