"""What a profile says, as one JSON document: seconds, counted from the start of the step, and shares of
it."""

from dataclasses import asdict
from typing import Any

from meshwright.tools.trace.advice import advise
from meshwright.tools.trace.answer import Answer
from meshwright.tools.trace.gathers import Gather, Prefetch
from meshwright.tools.trace.shares import split_step


def make_document(found: Answer) -> dict[str, Any]:
    """All but the kernels and the plan."""
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
        "advice": [{"seconds": line.ns / 1e9, "text": line.text} for line in advise(found)],
        "communication": [
            {
                "collective": c.lane,
                "axis": c.axis,
                "count": c.count,
                "seconds": c.ns / 1e9,
                "hidden_s": c.hidden_ns / 1e9,
                "bytes": c.bytes or None,
            }
            for c in found.communication
        ],
        "prefetch": [_prefetch(each, found.step.start_ns) for each in found.prefetch],
        "slow_units": [_in_seconds(asdict(slow)) for slow in found.slow_units],
        "stragglers": [_in_seconds(asdict(rank)) for rank in found.stragglers],
        "clock": found.clock or None,
        "left_out": list(found.left_out),
    }


def _prefetch(prefetch: Prefetch, start_ns: int) -> dict[str, Any]:
    best = None if prefetch.blocking else prefetch.best
    return {
        "phase": prefetch.phase,
        "micro_batch": prefetch.micro_batch,
        "used_depth": prefetch.used,
        "waited_s": prefetch.waited_ns / 1e9,
        "wait_s_by_depth": [ns / 1e9 for ns in prefetch.waits_ns],
        "best_depth": best,
        "launches_block": prefetch.blocking,
        "gathers": [_gather(gather, start_ns) for gather in prefetch.gathers],
    }


def _gather(gather: Gather, start_ns: int) -> dict[str, Any]:
    times = {
        "issued_s": gather.issued_ns,
        "started_s": gather.started_ns,
        "finished_s": gather.finished_ns,
        "needed_s": gather.needed_ns,
    }
    return {
        "unit": gather.unit,
        **{name: (ns - start_ns) / 1e9 for name, ns in times.items()},
        "waited_s": gather.waited_ns / 1e9,
        "ahead": gather.ahead,
        "held_units": gather.held_units,
        "late": gather.late,
        "depth": gather.depth,
        "verdict": gather.verdict,
    }


def _in_seconds(figures: dict[str, Any]) -> dict[str, Any]:
    """Names that end in ns become seconds."""
    return {
        (name[:-2] + "s" if name.endswith("_ns") else "seconds" if name == "ns" else name): value / 1e9
        if name == "ns" or name.endswith("_ns")
        else value
        for name, value in figures.items()
    }
