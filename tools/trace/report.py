"""Format the analysis of a profile: as text and tables, summary first, and as one JSON document in seconds
from the start of the step and shares of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.parallel.planner.timeline_plot import ROWS
from meshwright.tools.cli import format_table
from meshwright.tools.trace.advice import advise, ms
from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.kernels import KernelRow
from meshwright.tools.trace.plan_comparison import AgainstPlan
from meshwright.tools.trace.prefetch import KINDS, Gather, Prefetch, split_step, to_shares

MOST_GATHERS = 16  # rows of the table; all are in the JSON document


def describe(analysis: ProfileAnalysis, kernels: Sequence[KernelRow], plan: AgainstPlan) -> Iterator[str]:
    """Yield the blocks of the text."""
    part, spent_ns = percents(to_shares(analysis.spent_ns)), analysis.spent_ns
    yield "\n".join(_first_lines(analysis, part))
    yield "\n".join(["What to do", *_advice(analysis)])
    rows = [(f"{part[kind]:.1f}%", ms(spent_ns[kind]), text) for kind, text in KINDS.items()]
    yield "Where the time went\n" + format_table(("share", "", ""), rows)
    if analysis.communication:
        yield _communication(analysis)
    yield from _prefetch(analysis)
    if analysis.stragglers:
        yield _stragglers(analysis)
    if kernels:
        yield _kernels(kernels)
    yield _plan(plan)


def percents(shares: Mapping[str, float]) -> dict[str, float]:
    """Convert shares to percent with one decimal, rounded so that they sum to 100.0."""
    tenths = {kind: int(share * 1000) for kind, share in shares.items()}
    by_rest = sorted(shares, key=lambda kind: tenths[kind] - shares[kind] * 1000)
    for kind in by_rest[: 1000 - sum(tenths.values())]:
        tenths[kind] += 1
    return {kind: count / 10 for kind, count in tenths.items()}


def _first_lines(analysis: ProfileAnalysis, part: Mapping[str, float]) -> Iterator[str]:
    step, facts = analysis.step, analysis.facts
    hidden = f" ({part['overlapped']:.1f}% with hidden communication)" if part["overlapped"] else ""
    yield (
        f"step {step.number}: {ms(step.length_ns)}: {part['compute'] + part['overlapped']:.1f}% computing"
        f"{hidden}, {part['exposed']:.1f}% exposed communication, {part['host']:.1f}% host-bound, "
        f"{part['idle']:.1f}% idle"
    )
    others = ", ".join(f"step {o.number} {ms(o.length_ns)}" for o in analysis.steps if o is not step)
    of_world = f" of {facts['world_size']}" if facts.get("world_size") else ""
    device = facts.get("device_name", analysis.device_type)
    yield f"rank {analysis.rank}{of_world}, {device}{f'; other steps: {others}' if others else ''}"
    yield f"trace: {analysis.trace}"
    if analysis.left_out:
        yield f"ignored, from another run: {', '.join(analysis.left_out)}"


def _advice(analysis: ProfileAnalysis) -> Iterator[str]:
    advice = advise(analysis)
    if not advice:
        yield "  nothing stands out: no unit is slower than its peers, and no avoidable wait is long"
    for number, line in enumerate(advice, start=1):
        yield f"  {number}. {line.ns / analysis.step.length_ns:.1%}: {line.text}"


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
    head = ("collective", "axis", "times", "in flight", "hidden", "exposed")
    return "Communication of the step\n" + format_table(head, rows)


def _prefetch(analysis: ProfileAnalysis) -> Iterator[str]:
    """Yield the all-gathers of the last micro batch that waited longest, and the wait for each depth."""
    last = max((prefetch.micro_batch for prefetch in analysis.prefetch), default=0)
    shown = [prefetch for prefetch in analysis.prefetch if prefetch.micro_batch == last]
    gathers = [gather for prefetch in shown for gather in prefetch.gathers]
    if not gathers:
        return
    worst = sorted(gathers, key=lambda gather: -gather.waited_ns)[:MOST_GATHERS]
    rows = [_gather_row(gather, analysis.step.start_ns) for gather in gathers if gather in worst]
    selection = ""
    if len(rows) < len(gathers):
        selection = f" (the {len(rows)} longest waits of {len(gathers)}; all with --json)"
    title = f"All-gathers, ms from the start of the step{selection}; ahead: launched this many units early"
    head = ("unit", "phase", "issued", "started", "finished", "needed", "waited", "ahead", "verdict")
    yield "\n".join([title, format_table(head, rows), *map(_depths, shown)])


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
    return (
        f"{waited} with depth {prefetch.used}; estimated wait by depth: {tried}. Smallest depth as good as "
        f"any: parallel.{prefetch.phase}_prefetch={prefetch.best}"
    )


def _stragglers(analysis: ProfileAnalysis) -> str:
    rows = [
        (str(r.rank), f"{r.last_share:.0%}", ms(r.others_waited_ns), ms(r.waited_ns))
        for r in analysis.stragglers
    ]
    head = ("rank", "arrives last", "others wait for it", "waits for others")
    return f"Ranks at the collectives ({analysis.clock})\n" + format_table(head, rows)


def _kernels(kernels: Sequence[KernelRow]) -> str:
    def figure(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:,.{3 if value < 1 else 1}f} {unit}"

    rows = [
        (
            f"{row.share:.1%}",
            ms(row.seconds_per_step * 1e9),
            f"{row.calls_per_step:g}",
            figure(row.tflops, "TF/s"),
            figure(row.gb_s, "GB/s"),
            "-" if row.roof_share is None else f"{row.roof_share:.0%}",
            row.name,
        )
        for row in kernels
    ]
    head = ("share", "per step", "calls", "achieved", "achieved", "of roof", "kernel or operator")
    return "Top kernels\n" + format_table(head, rows)


def _plan(plan: AgainstPlan) -> str:
    if plan.predicted is None:
        return f"Plan against measured: not compared: {plan.why_not}"
    rows = [
        (
            row["lane"],
            ms(row["predicted_s"] * 1e9),
            ms(row["measured_s"] * 1e9),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        )
        for row in plan.lanes
    ]
    return "Plan against measured\n" + format_table(("lane", "predicted", "measured", "ratio"), rows)


def make_document(
    analysis: ProfileAnalysis, kernels: Sequence[KernelRow], plan: AgainstPlan
) -> dict[str, Any]:
    """Return the JSON document."""
    step, communication = analysis.step, analysis.communication
    return {
        "trace": str(analysis.trace),
        "device_type": analysis.device_type,
        "run": dict(analysis.facts),
        "rank": analysis.rank,
        "ranks": list(analysis.ranks),
        "step": step.number,
        "step_s": step.length_ns / 1e9,
        "shares": to_shares(analysis.spent_ns),
        "seconds": {kind: ns / 1e9 for kind, ns in analysis.spent_ns.items()},
        "steps": [
            {"step": each.number, "step_s": each.length_ns / 1e9, "shares": to_shares(split_step(each))}
            for each in analysis.steps
        ],
        "advice": [{"share": a.ns / step.length_ns} | _in_seconds(a) for a in advise(analysis)],
        "communication": [
            _in_seconds(c, lane="collective") | {"bytes": c.bytes or None} for c in communication
        ],
        "prefetch": [_prefetch_document(each, step.start_ns) for each in analysis.prefetch],
        "slow_units": [_in_seconds(slow) for slow in analysis.slow_units],
        "stragglers": [_in_seconds(rank) for rank in analysis.stragglers],
        "clock": analysis.clock or None,
        "left_out": list(analysis.left_out),
        "kernels": [asdict(row) for row in kernels],
        "plan": {"why_not": plan.why_not or None, "lanes": plan.lanes},
    }


def _prefetch_document(prefetch: Prefetch, start_ns: int) -> dict[str, Any]:
    kept = ("ahead", "held_units", "late", "depth", "verdict")
    return {
        "phase": prefetch.phase,
        "micro_batch": prefetch.micro_batch,
        "used_depth": prefetch.used,
        "waited_s": prefetch.waited_ns / 1e9,
        "wait_s_by_depth": [ns / 1e9 for ns in prefetch.waits_ns],
        "best_depth": None if prefetch.blocking else prefetch.best,
        "launches_block": prefetch.blocking,
        "gathers": [
            {"unit": gather.unit}
            | {f"{name}_s": (ns - start_ns) / 1e9 for name, ns in gather.times_ns.items()}
            | {"waited_s": gather.waited_ns / 1e9}
            | {name: getattr(gather, name) for name in kept}
            for gather in prefetch.gathers
        ],
    }


def _in_seconds(row: Any, **names: str) -> dict[str, Any]:
    """Return a dataclass as a dict, with fields in ns converted to seconds; `names` renames fields."""
    figures = dict[str, Any]()
    for name, value in asdict(row).items():
        in_ns = name == "ns" or name.endswith("_ns")
        name = names.get(name) or ("seconds" if name == "ns" else name[:-2] + "s" if in_ns else name)
        figures[name] = value / 1e9 if in_ns else value
    return figures
