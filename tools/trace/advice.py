"""Advice on a profiled step: a few lines, largest saving first."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.prefetch import EARLY_UNITS, WORTH, Prefetch

MAX_LINES = 5
STRAGGLER_FACTOR = 1.25  # a straggler is last this many times as often as by chance
LARGE_SHARE = 0.1  # of the step: the least that is worth a line; half of it for a straggler


@dataclass(frozen=True)
class Advice:
    """One line of advice, and about how many nanoseconds of a step it concerns."""

    ns: int
    text: str


def advise(analysis: ProfileAnalysis) -> list[Advice]:
    """Return at most MAX_LINES lines of advice, largest saving first."""
    candidates = [
        *_slow_units(analysis),
        *_prefetch(analysis),
        *_stragglers(analysis),
        *_link(analysis),
        *_host(analysis),
        *_early(analysis),
    ]
    return sorted(candidates, key=lambda advice: -advice.ns)[:MAX_LINES]


def ms(ns: float) -> str:
    """Format nanoseconds as "412 ms", "12.3 ms" or "0.12 ms"."""
    value = ns / 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"


def _slow_units(analysis: ProfileAnalysis) -> Iterator[Advice]:
    for slow in analysis.slow_units:
        if slow.ns - slow.equals_ns > WORTH * analysis.step.length_ns:
            peers = f"the median of its {slow.equals} peers is {ms(slow.equals_ns)}"
            text = (
                f"{slow.unit} {slow.phase} takes {ms(slow.ns)} on rank {slow.rank}, {peers} (spread "
                f"{ms(slow.spread_ns)}): compare its operators in the trace with those of a peer"
            )
            yield Advice(slow.ns - slow.equals_ns, text)


def _prefetch(analysis: ProfileAnalysis) -> Iterator[Advice]:
    """One line per phase, for all micro batches together."""
    phases = defaultdict[str, list[Prefetch]](list)
    for prefetch in analysis.prefetch:
        phases[prefetch.phase].append(prefetch)
    for phase, parts in phases.items():
        saving_ns = sum(part.saving_ns for part in parts)
        if saving_ns > WORTH * analysis.step.length_ns:
            yield Advice(saving_ns, _prefetch_text(phase, parts, saving_ns))


def _prefetch_text(phase: str, parts: list[Prefetch], saving_ns: int) -> str:
    depth, used = max(part.best for part in parts), parts[0].used
    late = sorted(
        (g for part in parts for g in part.gathers if g.late and not g.first),
        key=lambda gather: -gather.waited_ns,
    )
    names = ", ".join(dict.fromkeys(gather.unit for gather in late[:3]))
    launched_late = {
        gather.unit: gather.ahead
        for gather in late
        if gather.ahead is not None and gather.ahead < min(used, depth)
    }
    advice = f"set parallel.{phase}_prefetch={depth}: saves about {ms(saving_ns)} per step"
    if launched_late and depth <= used:
        units = ", ".join(
            f"{unit} ({ahead} units ahead, the others {used})"
            for unit, ahead in list(launched_late.items())[:3]
        )
        return f"{advice}; launched late in the {phase}: {units}"
    return f"{advice}; it is {used} now, and {phase} all-gathers are late, most of all {names}"


def _stragglers(analysis: ProfileAnalysis) -> Iterator[Advice]:
    for rank in analysis.stragglers[:1]:
        if (
            rank.last_share * len(analysis.stragglers) > STRAGGLER_FACTOR
            and rank.others_waited_ns > LARGE_SHARE / 2 * analysis.step.length_ns
        ):
            yield Advice(
                rank.others_waited_ns,
                f"rank {rank.rank} arrives last at {rank.last_share:.0%} of the collectives, and the others "
                f"wait {ms(rank.others_waited_ns)} per step for it: compare its machine and its data with "
                "theirs",
            )


def _link(analysis: ProfileAnalysis) -> Iterator[Advice]:
    """Exposed communication that no prefetch depth hides and that is not waiting for another rank."""
    waited_ns = sum(rank.waited_ns for rank in analysis.stragglers if rank.rank == analysis.rank)
    exposed_ns = (
        analysis.shares.ns["exposed"] - sum(prefetch.saving_ns for prefetch in analysis.prefetch) - waited_ns
    )
    if exposed_ns < LARGE_SHARE * analysis.step.length_ns or not analysis.communication:
        return
    rows = sorted(analysis.communication, key=lambda row: row.hidden_ns - row.ns)
    parts = [f"{row.lane} {ms(row.ns - row.hidden_ns)}" for row in rows[:3] if row.ns > row.hidden_ns]
    lanes = (
        f" (in flight while nothing computes, including waits for other ranks: {', '.join(parts)})"
        if parts
        else ""
    )
    yield Advice(
        exposed_ns,
        f"{ms(exposed_ns)} of communication per step stay exposed{lanes}: "
        f"{_link_advice(analysis, rows[0].axis)}",
    )


def _link_advice(analysis: ProfileAnalysis, axis: str) -> str:
    """Advice for communication that is mostly on this mesh axis."""
    if axis == "cp":
        return "a smaller parallel.cp, or the other parallel.cp_exchange, reduces it"
    if axis == "tp":
        async_tp = (
            ""
            if analysis.device_type == "cpu"
            else "set parallel.async_tp=true, if it is off, to overlap it with the matrix products; "
        )
        return f"{async_tp}a smaller parallel.tp reduces it"
    if any(prefetch.blocking for prefetch in analysis.prefetch):
        return (
            "each launch blocks until the collective ends (as gloo does on a CPU), so no prefetch depth "
            "hides any of it; only fewer bytes help"
        )
    if axis == "dp_shard":
        return (
            "more compute per byte hides it: use a larger micro batch, HSDP (parallel.dp_replicate), or "
            "parallel.reduce_dtype=bfloat16"
        )
    return "more compute per byte hides it: use a larger micro batch"


def _host(analysis: ProfileAnalysis) -> Iterator[Advice]:
    host_ns = analysis.shares.ns["host"]
    if host_ns >= LARGE_SHARE * analysis.step.length_ns:
        cause = (
            "Python runs between the operators"
            if analysis.device_type == "cpu"
            else "the GPU is idle because the CPU has not launched the next kernel"
        )
        fix = (
            "use a larger micro batch, and parallel.compile.enabled=true if it is off, for fewer and longer "
            "kernels"
        )
        yield Advice(host_ns, f"{ms(host_ns)} per step are host-bound: {cause}; {fix}")


def _early(analysis: ProfileAnalysis) -> Iterator[Advice]:
    """Prefetching that is too deep: reducing it saves memory, not time."""
    for phase in ("forward", "backward"):
        parts = [
            part
            for part in analysis.prefetch
            if part.phase == phase and not part.blocking and part.best < part.used
        ]
        held = max((gather.held_units for part in parts for gather in part.gathers), default=0)
        if held >= EARLY_UNITS:
            depth = max(part.best for part in parts)
            reason = f"gathered parameters are held for up to {held} units before they are needed"
            yield Advice(0, f"set parallel.{phase}_prefetch={depth}: as fast, with less memory; {reason}")
