"""Format the analysis of a profile: as text and tables, summary first, and as one JSON document in seconds
from the start of the step and shares of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.parallel.planner.timeline_plot import ROWS
from meshwright.tools.cli import format_table
from meshwright.tools.trace.advice import advise, ms
from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.prefetch import KINDS, Gather, Prefetch, split_step

MOST_GATHERS = 16  # rows of the table; all are in the JSON document


def describe(analysis: ProfileAnalysis) -> Iterator[str]:
    """Yield the blocks of the text, except the kernels and the plan."""
    yield "\n".join(_first_lines(analysis))
    yield "\n".join(["What to do", *_advice(analysis)])
    yield "\n".join(["Where the time went", format_table(("share", "", ""), _share_rows(analysis))])
    if analysis.communication:
        yield "\n".join(["Communication of the step", _communication(analysis)])
    yield from _prefetch(analysis)
    if analysis.stragglers:
        yield "\n".join([f"Ranks at the collectives ({analysis.clock})", _stragglers(analysis)])


def percents(shares: Mapping[str, float]) -> dict[str, float]:
    """Convert shares to percent with one decimal, rounded so that they sum to 100.0."""
    tenths = {kind: int(share * 1000) for kind, share in shares.items()}
    by_rest = sorted(shares, key=lambda kind: tenths[kind] - shares[kind] * 1000)
    for kind in by_rest[: 1000 - sum(tenths.values())]:
        tenths[kind] += 1
    return {kind: count / 10 for kind, count in tenths.items()}


def _first_lines(analysis: ProfileAnalysis) -> Iterator[str]:
    part = percents(analysis.shares.of_step())
    hidden = f" ({part['overlapped']:.1f}% with hidden communication)" if part["overlapped"] else ""
    summary = [
        f"{part['compute'] + part['overlapped']:.1f}% computing{hidden}",
        f"{part['exposed']:.1f}% exposed communication",
        f"{part['host']:.1f}% host-bound",
        f"{part['idle']:.1f}% idle",
    ]
    yield f"step {analysis.step.number}: {ms(analysis.step.length_ns)}: {', '.join(summary)}"
    others = [
        f"step {step.number} {ms(step.length_ns)}" for step in analysis.steps if step is not analysis.step
    ]
    others_text = f"; other steps: {', '.join(others)}" if others else ""
    world = analysis.facts.get("world_size")
    device = analysis.facts.get("device_name", analysis.device_type)
    yield f"rank {analysis.rank}{f' of {world}' if world else ''}, {device}{others_text}"
    yield f"trace: {analysis.trace}"
    if analysis.left_out:
        yield f"ignored, from another run: {', '.join(analysis.left_out)}"


def _advice(analysis: ProfileAnalysis) -> Iterator[str]:
    advice = advise(analysis)
    if not advice:
        yield "  nothing stands out: no unit is slower than its peers, and no avoidable wait is long"
    for number, line in enumerate(advice, start=1):
        yield f"  {number}. {line.text}"


def _share_rows(analysis: ProfileAnalysis) -> list[tuple[str, str, str]]:
    part = percents(analysis.shares.of_step())
    return [
        (f"{part[kind]:.1f}%", ms(analysis.shares.ns[kind]), description)
        for kind, description in KINDS.items()
    ]


def _communication(analysis: ProfileAnalysis) -> str:
    rows = [
        (
            ROWS.get(c.lane, c.lane),
            c.axis or "-",
            str(c.count),
            ms(c.ns),
            f"{c.hidden_ns / c.ns:.0%}" if c.ns else "-",
            ms(c.ns - c.hidden_ns),
        )
        for c in analysis.communication
    ]
    return format_table(("collective", "axis", "times", "in flight", "hidden", "exposed"), rows)


def _prefetch(analysis: ProfileAnalysis) -> Iterator[str]:
    """Yield the all-gathers of the last micro batch, and the wait for each depth."""
    if not analysis.prefetch:
        return
    last = max(prefetch.micro_batch for prefetch in analysis.prefetch)
    shown = [prefetch for prefetch in analysis.prefetch if prefetch.micro_batch == last]
    gathers = [gather for prefetch in shown for gather in prefetch.gathers]
    head = ("unit", "phase", "issued", "started", "finished", "needed", "waited", "ahead", "verdict")
    rows = [_gather_row(gather, analysis.step.start_ns) for gather in _worst(gathers)]
    selection = (
        f" (the {len(rows)} longest waits of {len(gathers)}; all with --json)"
        if len(rows) < len(gathers)
        else ""
    )
    title = f"All-gathers, ms from the start of the step{selection}; ahead: launched this many units early"
    yield "\n".join([title, format_table(head, rows), *map(_depths, shown)])


def _worst(gathers: Sequence[Gather]) -> list[Gather]:
    """Return the all-gathers that waited longest, in their original order."""
    kept = sorted(gathers, key=lambda gather: -gather.waited_ns)[:MOST_GATHERS]
    return [gather for gather in gathers if gather in kept]


def _gather_row(gather: Gather, start_ns: int) -> tuple[str, ...]:
    times = (f"{(ns - start_ns) / 1e6:.2f}" for ns in gather.times_ns.values())
    ahead = "-" if gather.ahead is None else str(gather.ahead)
    return gather.unit, gather.phase, *times, f"{gather.waited_ns / 1e6:.2f}", ahead, gather.verdict


def _depths(prefetch: Prefetch) -> str:
    """Summarize a phase on one line."""
    waited = f"{prefetch.phase}: waited {ms(prefetch.waited_ns)} for all-gathers"
    if prefetch.blocking:
        return f"{waited}; each launch blocks until its end, so no depth hides any"
    tried = ", ".join(f"{depth}: {ms(ns)}" for depth, ns in enumerate(prefetch.waits_ns[:5]))
    key = f"parallel.{prefetch.phase}_prefetch={prefetch.best}"
    return (
        f"{waited} with depth {prefetch.used}; estimated wait by depth: {tried}. Smallest depth as good as "
        f"any: {key}"
    )


def _stragglers(analysis: ProfileAnalysis) -> str:
    rows = [
        (str(r.rank), f"{r.last_share:.0%}", ms(r.others_waited_ns), ms(r.waited_ns))
        for r in analysis.stragglers
    ]
    return format_table(("rank", "arrives last", "others wait for it", "waits for others"), rows)


def make_document(analysis: ProfileAnalysis) -> dict[str, Any]:
    """Return the JSON document, except the kernels and the plan."""
    start_ns = analysis.step.start_ns
    return {
        "trace": str(analysis.trace),
        "device_type": analysis.device_type,
        "run": dict(analysis.facts),
        "rank": analysis.rank,
        "ranks": list(analysis.ranks),
        "step": analysis.step.number,
        "step_s": analysis.step.length_ns / 1e9,
        "shares": analysis.shares.of_step(),
        "seconds": {kind: ns / 1e9 for kind, ns in analysis.shares.ns.items()},
        "steps": [
            {"step": step.number, "step_s": step.length_ns / 1e9, "shares": split_step(step).of_step()}
            for step in analysis.steps
        ],
        "advice": [_in_seconds(line) for line in advise(analysis)],
        "communication": [
            _in_seconds(c, lane="collective") | {"bytes": c.bytes or None} for c in analysis.communication
        ],
        "prefetch": [_prefetch_document(each, start_ns) for each in analysis.prefetch],
        "slow_units": [_in_seconds(slow) for slow in analysis.slow_units],
        "stragglers": [_in_seconds(rank) for rank in analysis.stragglers],
        "clock": analysis.clock or None,
        "left_out": list(analysis.left_out),
    }


def _prefetch_document(prefetch: Prefetch, start_ns: int) -> dict[str, Any]:
    return {
        "phase": prefetch.phase,
        "micro_batch": prefetch.micro_batch,
        "used_depth": prefetch.used,
        "waited_s": prefetch.waited_ns / 1e9,
        "wait_s_by_depth": [ns / 1e9 for ns in prefetch.waits_ns],
        "best_depth": None if prefetch.blocking else prefetch.best,
        "launches_block": prefetch.blocking,
        "gathers": [_gather_document(gather, start_ns) for gather in prefetch.gathers],
    }


def _gather_document(gather: Gather, start_ns: int) -> dict[str, Any]:
    times = {name: (ns - start_ns) / 1e9 for name, ns in gather.times_ns.items()}
    return {
        "unit": gather.unit,
        **{f"{name}_s": seconds for name, seconds in times.items()},
        "waited_s": gather.waited_ns / 1e9,
        "ahead": gather.ahead,
        "held_units": gather.held_units,
        "late": gather.late,
        "depth": gather.depth,
        "verdict": gather.verdict,
    }


def _in_seconds(row: Any, **names: str) -> dict[str, Any]:
    """Return a dataclass as a dict, with fields in ns converted to seconds; `names` renames fields."""
    figures = dict[str, Any]()
    for name, value in asdict(row).items():
        in_ns = name == "ns" or name.endswith("_ns")
        name = names.get(name) or ("seconds" if name == "ns" else name[:-2] + "s" if in_ns else name)
        figures[name] = value / 1e9 if in_ns else value
    return figures
