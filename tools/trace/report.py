"""What a profile says: in words and tables, the plain words first; and as one JSON document of seconds,
counted from the start of the step, and shares of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.parallel.planner.timeline_plot import ROWS
from meshwright.tools.cli import format_table
from meshwright.tools.trace.advice import advise, ms
from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.prefetch import KINDS, Gather, Prefetch, split_step

MOST_GATHERS = 16  # rows of the table; all are in the JSON document


def describe(found: ProfileAnalysis) -> Iterator[str]:
    """The blocks of the text, without the kernels and the plan."""
    yield "\n".join(_first_lines(found))
    yield "\n".join(["What to do", *_advice(found)])
    yield "\n".join(["Where the time went", format_table(("share", "", ""), _share_rows(found))])
    if found.communication:
        yield "\n".join(["Communication of the step", _communication(found)])
    yield from _prefetch(found)
    if found.stragglers:
        yield "\n".join([f"Ranks at the collectives ({found.clock})", _stragglers(found)])


def percents(shares: Mapping[str, float]) -> dict[str, float]:
    """In percent with one digit behind the point, rounded so that they sum to 100.0."""
    tenths = {kind: int(share * 1000) for kind, share in shares.items()}
    by_rest = sorted(shares, key=lambda kind: tenths[kind] - shares[kind] * 1000)
    for kind in by_rest[: 1000 - sum(tenths.values())]:
        tenths[kind] += 1
    return {kind: count / 10 for kind, count in tenths.items()}


def _first_lines(found: ProfileAnalysis) -> Iterator[str]:
    part = percents(found.shares.of_step())
    under = f" ({part['overlapped']:.1f}% with communication under it)" if part["overlapped"] else ""
    words = [
        f"{part['compute'] + part['overlapped']:.1f}% computing{under}",
        f"{part['exposed']:.1f}% exposed communication",
        f"{part['host']:.1f}% host-bound",
        f"{part['idle']:.1f}% idle",
    ]
    yield f"step {found.step.number}: {ms(found.step.length_ns)}: {', '.join(words)}"
    others = [f"step {step.number} {ms(step.length_ns)}" for step in found.steps if step is not found.step]
    beside = f"; beside it {', '.join(others)}" if others else ""
    world = found.facts.get("world_size")
    device = found.facts.get("device_name", found.device_type)
    yield f"rank {found.rank}{f' of {world}' if world else ''}, {device}{beside}"
    yield f"trace: {found.trace}"
    if found.left_out:
        yield f"left out, of another run: {', '.join(found.left_out)}"


def _advice(found: ProfileAnalysis) -> Iterator[str]:
    advice = advise(found)
    if not advice:
        yield "  nothing stands out: no unit is slower than its equals, nothing to hide comes late"
    for number, line in enumerate(advice, start=1):
        yield f"  {number}. {line.text}"


def _share_rows(found: ProfileAnalysis) -> list[tuple[str, str, str]]:
    part = percents(found.shares.of_step())
    return [(f"{part[kind]:.1f}%", ms(found.shares.ns[kind]), words) for kind, words in KINDS.items()]


def _communication(found: ProfileAnalysis) -> str:
    rows = [
        (
            ROWS.get(c.lane, c.lane),
            c.axis or "-",
            str(c.count),
            ms(c.ns),
            f"{c.hidden_ns / c.ns:.0%}" if c.ns else "-",
            ms(c.ns - c.hidden_ns),
        )
        for c in found.communication
    ]
    return format_table(("collective", "axis", "times", "in flight", "hidden", "exposed"), rows)


def _prefetch(found: ProfileAnalysis) -> Iterator[str]:
    """The gathers of the last micro batch, and what each depth would bring."""
    if not found.prefetch:
        return
    last = max(prefetch.micro_batch for prefetch in found.prefetch)
    shown = [prefetch for prefetch in found.prefetch if prefetch.micro_batch == last]
    gathers = [gather for prefetch in shown for gather in prefetch.gathers]
    head = ("unit", "phase", "issued", "started", "finished", "needed", "waited", "ahead", "verdict")
    rows = [_gather_row(gather, found.step.start_ns) for gather in _worst(gathers)]
    left = (
        f" (the {len(rows)} that waited longest of {len(gathers)}; all with --json)"
        if len(rows) < len(gathers)
        else ""
    )
    title = f"All-gathers, ms from the start of the step{left}; ahead: units before its own"
    yield "\n".join([title, format_table(head, rows), *map(_depths, shown)])


def _worst(gathers: Sequence[Gather]) -> list[Gather]:
    """Those that waited longest, in their order."""
    kept = sorted(gathers, key=lambda gather: -gather.waited_ns)[:MOST_GATHERS]
    return [gather for gather in gathers if gather in kept]


def _gather_row(gather: Gather, start_ns: int) -> tuple[str, ...]:
    times = (f"{(ns - start_ns) / 1e6:.2f}" for ns in gather.times_ns.values())
    ahead = "-" if gather.ahead is None else str(gather.ahead)
    return gather.unit, gather.phase, *times, f"{gather.waited_ns / 1e6:.2f}", ahead, gather.verdict


def _depths(prefetch: Prefetch) -> str:
    """The summary of a phase."""
    waited = f"{prefetch.phase}: waited {ms(prefetch.waited_ns)} for all-gathers"
    if prefetch.blocking:
        return f"{waited}, each launch for its own end: no depth hides any here"
    tried = ", ".join(f"{depth}: {ms(ns)}" for depth, ns in enumerate(prefetch.waits_ns[:5]))
    key = f"parallel.{prefetch.phase}_prefetch={prefetch.best}"
    return (
        f"{waited} with depth {prefetch.used}; about so much by depth: {tried}. Least depth as good as "
        f"any: {key}"
    )


def _stragglers(found: ProfileAnalysis) -> str:
    rows = [
        (str(r.rank), f"{r.last_share:.0%}", ms(r.others_waited_ns), ms(r.waited_ns))
        for r in found.stragglers
    ]
    return format_table(("rank", "comes last", "others wait for it", "waits for others"), rows)


def make_document(found: ProfileAnalysis) -> dict[str, Any]:
    """All but the kernels and the plan."""
    start_ns = found.step.start_ns
    return {
        "trace": str(found.trace),
        "device_type": found.device_type,
        "run": dict(found.facts),
        "rank": found.rank,
        "ranks": list(found.ranks),
        "step": found.step.number,
        "step_s": found.step.length_ns / 1e9,
        "shares": found.shares.of_step(),
        "seconds": {kind: ns / 1e9 for kind, ns in found.shares.ns.items()},
        "steps": [
            {"step": step.number, "step_s": step.length_ns / 1e9, "shares": split_step(step).of_step()}
            for step in found.steps
        ],
        "advice": [_in_seconds(line) for line in advise(found)],
        "communication": [
            _in_seconds(c, lane="collective") | {"bytes": c.bytes or None} for c in found.communication
        ],
        "prefetch": [_prefetch_document(each, start_ns) for each in found.prefetch],
        "slow_units": [_in_seconds(slow) for slow in found.slow_units],
        "stragglers": [_in_seconds(rank) for rank in found.stragglers],
        "clock": found.clock or None,
        "left_out": list(found.left_out),
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
    """A dataclass with other `names`: what ends in ns becomes seconds."""
    figures = dict[str, Any]()
    for name, value in asdict(row).items():
        in_ns = name == "ns" or name.endswith("_ns")
        name = names.get(name) or ("seconds" if name == "ns" else name[:-2] + "s" if in_ns else name)
        figures[name] = value / 1e9 if in_ns else value
    return figures
