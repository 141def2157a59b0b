"""The report of `tools.dryrun`, as text and JSON: the counted step beside the plan's prediction."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.serialize import plan_to_dict
from meshwright.tools.cli import format_table
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.launches import LIBRARIES, KernelLaunch, read_recorded_step
from meshwright.tools.dryrun.log import MEMORY_FILE, WAITS_FILE, Call, steady_step, stream_numbers
from meshwright.tools.plan.report import PlanReport
from meshwright.tools.simulate import total_by_axis, totals_table
from meshwright.train.training import describe_plan

FIRST = 24  # kernels shown without --all
H100_GIB = 79.19
NO_TIMES = (
    "The kernels compute nothing and take no time: there are no times and no values here. Memory beside the "
    "allocator (context, NCCL, cuDNN's workspace) is not counted."
)
Row = dict[str, Any]


def read_dry_run(scratch: Path) -> Row:
    """Return the counts of the last step and the kernels of the recorded one, as in the JSON document. Stream
    0 computes; `bytes` are None where not known for each launch."""
    calls = log.read_log(scratch)
    step, recorded = steady_step(calls), read_recorded_step(scratch)
    numbers = stream_numbers(step)
    memory = json.loads((scratch / MEMORY_FILE).read_text())
    kinds = Counter(call.kind for call in step)
    launches = {library: kinds[kind] for kind, library in LIBRARIES.items() if kinds[kind]}
    host_waits = Counter(call.kind for call in log.host_waits(step))
    allocations = Counter(call.kind for call in log.allocations(step))
    return {
        "launches": sum(launches.values()),
        "launches_by_library": launches,
        "host_waits": sum(host_waits.values()),
        "host_waits_by_kind": dict(host_waits),
        "host_waits_at": dict(Counter(json.loads((scratch / WAITS_FILE).read_text()))),
        "device_allocations": sum(allocations.values()),
        "device_allocations_by_kind": dict(allocations),
        "copies": _copies(step),
        "collectives": [asdict(replace(c, stream=numbers[c.stream])) for c in recorded.collectives],
        "totals": total_by_axis(recorded.collectives),
        "kernels": count_kernels(recorded.launches),
        "launches_of_unknown_bytes": sum(launch.bytes is None for launch in recorded.launches),
        "graphs": [asdict(graph) for graph in recorded.graphs],
        "peak_memory_gib": memory["allocated"] / GIB,
        "reserved_memory_gib": memory["reserved"] / GIB,
    }


def count_kernels(launches: Sequence[KernelLaunch]) -> list[Row]:
    """Return a row per kernel, the most bytes first; last those whose bytes are not known. `share`: of all
    known bytes; `registers` and `spills`: of a thread, spills in bytes, None for libraries whose kernels the
    fake replaces."""
    by_name = defaultdict[tuple[str, str], list[KernelLaunch]](list)
    for launch in launches:
        by_name[launch.name, launch.library].append(launch)
    total = sum(launch.bytes or 0 for launch in launches) or 1
    rows = list[Row]()
    for (name, library), calls in by_name.items():
        size = sum(call.bytes or 0 for call in calls)
        known = all(call.bytes is not None for call in calls)
        row = {"name": name, "library": library, "calls": len(calls), "bytes": size if known else None}
        row["share"] = size / total if known else None
        for figure in ("registers", "spills"):
            values = (getattr(call, figure) for call in calls)
            row[figure] = max((value for value in values if value is not None), default=None)
        rows.append(row)
    return sorted(
        rows, key=lambda row: (-1 if row["bytes"] is None else row["bytes"], row["calls"]), reverse=True
    )


def _copies(step: Sequence[Call]) -> list[Row]:
    """Return a row per kind of copy: DtoD within the GPU, HtoD and DtoH from and to the host."""
    sizes = defaultdict[str, list[int]](list)
    for call in step:
        if call.kind == "memcpy":
            sizes[call.words[0]].append(int(call.words[1]))
    return [{"kind": kind, "count": len(each), "bytes": sum(each)} for kind, each in sorted(sizes.items())]


def make_notes(run: Row, report: PlanReport) -> list[str]:
    """Return the sentences that limit or explain the figures."""
    notes = [NO_TIMES]
    launches, reserved_gib = sum(row["calls"] for row in run["kernels"]), run["reserved_memory_gib"]
    if unknown := run["launches_of_unknown_bytes"]:
        notes.append(
            f"Bytes are known of {launches - unknown} of {launches} launches. Unknown: kernels that read or "
            "write by index, the smaller kernels of an operator, and kernels outside operators."
        )
    if reserved_gib > H100_GIB:
        notes.append(
            f"This plan does not fit: the allocator reserves {reserved_gib:.1f} GiB, and an H100 has "
            f"{H100_GIB} GiB."
        )
    if report.fit_error:
        notes.append(f"By the prediction: {report.fit_error}")
    return notes


def make_document(run: Row, report: PlanReport) -> Row:
    """Return the JSON document: the counts, the prediction, the plan and the notes."""
    assert report.prediction is not None, "a dry run is planned for H100s"
    predicted = {
        "peak_memory_gib": report.memory.peak_bytes / GIB,
        "reserved_memory_gib": report.prediction.allocator_bytes / GIB,
    }
    return run | {
        "predicted": predicted,
        "plan": plan_to_dict(report.plan),
        "reasons": list(report.reasons),
        "notes": make_notes(run, report),
    }


def as_text(run: Row, report: PlanReport, first: int | None) -> str:
    """Return the JSON document as text, with the first `first` kernels (None: all)."""
    plan, document = report.plan, make_document(run, report)
    parts = [
        f"rank 0 of {plan.mesh.world_size} on a fake H100, one optimizer step after the first two",
        describe_plan(report.job, plan),
        *(["\n".join(["why:", *(f"- {sentence}" for sentence in report.reasons)])] if report.reasons else []),
        format_table(("in a step", "", ""), _count_rows(run)),
        format_table(("memory, GiB", "dry run", "predicted", "difference"), _memory_rows(document)),
        totals_table(run["totals"]),
        _kernel_table(run["kernels"], first),
    ]
    return "\n\n".join([*parts, "\n".join(f"note: {note}" for note in document["notes"])])


def _count_rows(run: Row) -> list[tuple[str, str, str]]:
    counted = (
        ("kernel launches", "launches", "launches_by_library"),
        ("host waits", "host_waits", "host_waits_by_kind"),
        ("device allocations", "device_allocations", "device_allocations_by_kind"),
    )
    rows = [
        (name, str(run[key]), ", ".join(f"{kind} {count}" for kind, count in run[kinds].items()))
        for name, key, kinds in counted
    ]
    rows += [("host waits at", str(count), place) for place, count in run["host_waits_at"].items()]
    return rows + [
        (f"copies {copy['kind']}", str(copy["count"]), f"{copy['bytes'] / GIB:.3f} GiB")
        for copy in run["copies"]
    ]


def _memory_rows(document: Row) -> list[tuple[str, ...]]:
    names = {"allocated, peak": "peak_memory_gib", "reserved": "reserved_memory_gib"}
    pairs = [(name, document[key], document["predicted"][key]) for name, key in names.items()]
    return [
        (name, f"{counted:.2f}", f"{predicted:.2f}", f"{predicted / counted - 1:+.1%}")
        for name, counted, predicted in pairs
    ]


def _kernel_table(kernels: Sequence[Row], first: int | None) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        (
            cell(row["share"], "6.1%"),
            cell(row["bytes"] and row["bytes"] / 1e9, "8.3f"),
            str(row["calls"]),
            cell(row["registers"], ""),
            cell(row["spills"], ""),
            f"{row['library']}: {row['name']}",
        )
        for row in kernels[:first]
    ]
    total = sum(row["bytes"] or 0 for row in kernels)
    rows.append(("", f"{total / 1e9:8.3f}", str(sum(row["calls"] for row in kernels)), "", "", "all"))
    table = format_table(("share", "GB", "calls", "registers", "spills B", "kernel"), rows)
    left_out = len(kernels) - len(rows) + 1
    return table + (f"\n... {left_out} more kernels (--all shows them)" if left_out else "")
