"""Advice on a profiled step: a few lines, by their share of the step, the largest first."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.prefetch import WORTH, Prefetch

MAX_LINES = 5
STRAGGLER_FACTOR = 1.25  # a straggler is last this many times as often as by chance
LARGE_SHARE = 0.1  # of the step: the least that is worth a line; half of it for a straggler
LESS_EXPOSED = {  # by the mesh axis of most exposed communication
    "cp": "a smaller parallel.cp, or the other parallel.cp_exchange, reduces it",
    "tp": "a smaller parallel.tp reduces it",
    "dp_shard": "more compute per byte hides it: use a larger micro batch, HSDP (parallel.dp_replicate), or "
    "parallel.reduce_dtype=bfloat16",
}
BLOCKED = (
    "each launch blocks until the collective ends (as gloo does on a CPU), so no prefetch depth hides any of "
    "it; only fewer bytes help"
)
ASYNC_TP = "set parallel.async_tp=true, if it is off, to overlap it with the matrix products; "


@dataclass(frozen=True)
class Advice:
    """One line of advice, and about how many nanoseconds of a step it concerns."""

    ns: int
    text: str


def advise(analysis: ProfileAnalysis) -> list[Advice]:
    """Return at most MAX_LINES lines of advice, the largest share of the step first."""
    rules = (_slow_units, _prefetch, _stragglers, _link, _host)
    candidates = [advice for rule in rules for advice in rule(analysis)]
    return sorted(candidates, key=lambda advice: -advice.ns)[:MAX_LINES]


def ms(ns: float) -> str:
    """Format nanoseconds as "412 ms", "12.3 ms" or "0.12 ms"."""
    value = ns / 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"


def _slow_units(analysis: ProfileAnalysis) -> Iterator[Advice]:
    for slow in analysis.slow_units:
        if slow.ns - slow.equals_ns > WORTH * analysis.step.length_ns:
            peers = f"the median of its {slow.equals} peers is {ms(slow.equals_ns)}"
            yield Advice(
                slow.ns - slow.equals_ns,
                f"{slow.unit} {slow.phase} takes {ms(slow.ns)} on rank {slow.rank}, {peers} (spread "
                f"{ms(slow.spread_ns)}): compare its operators in the trace with those of a peer",
            )


def _prefetch(analysis: ProfileAnalysis) -> Iterator[Advice]:
    """One line per phase, for all micro batches together, with the all-gathers of the longest waits."""
    phases = defaultdict[str, list[Prefetch]](list)
    for prefetch in analysis.prefetch:
        phases[prefetch.phase].append(prefetch)
    for phase, parts in phases.items():
        saving_ns = sum(part.saving_ns for part in parts)
        if saving_ns <= WORTH * analysis.step.length_ns:
            continue
        late = sorted(
            (gather for part in parts for gather in part.gathers if gather.late and not gather.first),
            key=lambda gather: -gather.waited_ns,
        )
        names = ", ".join(dict.fromkeys(gather.unit for gather in late[:3]))
        depth, used = max(part.best for part in parts), parts[0].used
        saves, key = f"saves about {ms(saving_ns)} per step", f"parallel.{phase}_prefetch={depth}"
        text = (
            f"find what launches {phase} all-gathers late, most of all {names}: {saves} with {key}, as it is"
        )
        if depth != used:
            text = (
                f"set {key}: {saves}; it is {used} now, and {phase} all-gathers are late, most of all {names}"
            )
        yield Advice(saving_ns, text)


def _stragglers(analysis: ProfileAnalysis) -> Iterator[Advice]:
    for rank in analysis.stragglers[:1]:
        often = rank.last_share * len(analysis.stragglers) > STRAGGLER_FACTOR
        if often and rank.others_waited_ns > LARGE_SHARE / 2 * analysis.step.length_ns:
            yield Advice(
                rank.others_waited_ns,
                f"rank {rank.rank} arrives last at {rank.last_share:.0%} of the collectives, and the others "
                f"wait {ms(rank.others_waited_ns)} per step for it: compare its machine and its data with "
                "theirs",
            )


def _link(analysis: ProfileAnalysis) -> Iterator[Advice]:
    """Exposed communication that no prefetch depth hides and that is not waiting for another rank."""
    waited_ns = sum(rank.waited_ns for rank in analysis.stragglers if rank.rank == analysis.rank)
    saved_ns = sum(prefetch.saving_ns for prefetch in analysis.prefetch)
    exposed_ns = analysis.spent_ns["exposed"] - saved_ns - waited_ns
    if exposed_ns < LARGE_SHARE * analysis.step.length_ns or not analysis.communication:
        return
    rows = sorted(analysis.communication, key=lambda row: row.hidden_ns - row.ns)
    parts = ", ".join(
        f"{row.lane} {ms(row.ns - row.hidden_ns)}" for row in rows[:3] if row.ns > row.hidden_ns
    )
    lanes = f" (in flight while nothing computes, including waits for other ranks: {parts})" if parts else ""
    axis = rows[0].axis
    advice = LESS_EXPOSED.get(axis, "more compute per byte hides it: use a larger micro batch")
    if axis not in ("cp", "tp") and any(prefetch.blocking for prefetch in analysis.prefetch):
        advice = BLOCKED
    if axis == "tp" and analysis.device_type != "cpu":
        advice = ASYNC_TP + advice
    yield Advice(exposed_ns, f"{ms(exposed_ns)} of communication per step stay exposed{lanes}: {advice}")


def _host(analysis: ProfileAnalysis) -> Iterator[Advice]:
    host_ns, cause = analysis.spent_ns["host"], "Python runs between the operators"
    if analysis.device_type != "cpu":
        cause = "the GPU is idle because the CPU has not launched the next kernel"
    if host_ns >= LARGE_SHARE * analysis.step.length_ns:
        yield Advice(
            host_ns,
            f"{ms(host_ns)} per step are host-bound: {cause}; use a larger micro batch, and "
            "parallel.compile.enabled=true if it is off, for fewer and longer kernels",
        )
