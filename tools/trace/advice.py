"""What to do about a profiled step: a few lines, the one that would save most first."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.tools.trace.analysis import ProfileAnalysis
from meshwright.tools.trace.prefetch import EARLY_UNITS, WORTH, Prefetch

MOST = 5
ODD = 1.25  # times as often last as by chance: a straggler, else ranks are late in turn
LARGE_SHARE = 0.1  # of the step: what is at least as large is named


@dataclass(frozen=True)
class Advice:
    """One line, and about how much of a step it is about."""

    ns: int
    text: str


def advise(found: ProfileAnalysis) -> list[Advice]:
    """At most MOST."""
    every = [
        *_slow_units(found),
        *_prefetch(found),
        *_stragglers(found),
        *_link(found),
        *_host(found),
        *_early(found),
    ]
    return sorted(every, key=lambda advice: -advice.ns)[:MOST]


def ms(ns: float) -> str:
    """As "412 ms", "12.3 ms" or "0.12 ms"."""
    value = ns / 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"


def _slow_units(found: ProfileAnalysis) -> Iterator[Advice]:
    for slow in found.slow_units:
        if slow.ns - slow.equals_ns > WORTH * found.step.length_ns:
            equals = f"its {slow.equals} equals {ms(slow.equals_ns)} (median; spread {ms(slow.spread_ns)})"
            text = (
                f"{slow.unit} {slow.phase} takes {ms(slow.ns)} on rank {slow.rank}, {equals}: what does it "
                "that they do not?"
            )
            yield Advice(slow.ns - slow.equals_ns, text)


def _prefetch(found: ProfileAnalysis) -> Iterator[Advice]:
    """By phase, all micro batches together."""
    phases = defaultdict[str, list[Prefetch]](list)
    for prefetch in found.prefetch:
        phases[prefetch.phase].append(prefetch)
    for phase, parts in phases.items():
        saving_ns = sum(part.saving_ns for part in parts)
        if saving_ns > WORTH * found.step.length_ns:
            yield Advice(saving_ns, _prefetch_text(phase, parts, saving_ns))


def _prefetch_text(phase: str, parts: list[Prefetch], saving_ns: int) -> str:
    depth, used = max(part.best for part in parts), parts[0].used
    late = sorted(
        (g for part in parts for g in part.gathers if g.late and not g.first),
        key=lambda gather: -gather.waited_ns,
    )
    names = ", ".join(dict.fromkeys(gather.unit for gather in late[:3]))
    odd = {
        gather.unit: gather.ahead
        for gather in late
        if gather.ahead is not None and gather.ahead < min(used, depth)
    }
    start = f"set parallel.{phase}_prefetch={depth}: saves about {ms(saving_ns)} a step"
    if odd and depth <= used:
        who = ", ".join(
            f"{unit} ({ahead} units ahead, the others {used})" for unit, ahead in list(odd.items())[:3]
        )
        return f"{start}; launched late in the {phase}: {who}"
    return f"{start}; now {used}, and all-gathers of the {phase} come late, most of all {names}"


def _stragglers(found: ProfileAnalysis) -> Iterator[Advice]:
    for rank in found.stragglers[:1]:
        if (
            rank.last_share * len(found.stragglers) > ODD
            and rank.others_waited_ns > LARGE_SHARE / 2 * found.step.length_ns
        ):
            yield Advice(
                rank.others_waited_ns,
                f"rank {rank.rank} comes last to {rank.last_share:.0%} of the collectives, and the others "
                f"wait {ms(rank.others_waited_ns)} a step for it: compare its machine and its data with "
                "theirs",
            )


def _link(found: ProfileAnalysis) -> Iterator[Advice]:
    """What no depth hides, and is no waiting for another rank."""
    waited_ns = sum(rank.waited_ns for rank in found.stragglers if rank.rank == found.rank)
    exposed_ns = (
        found.shares.ns["exposed"] - sum(prefetch.saving_ns for prefetch in found.prefetch) - waited_ns
    )
    if exposed_ns < LARGE_SHARE * found.step.length_ns or not found.communication:
        return
    rows = sorted(found.communication, key=lambda row: row.hidden_ns - row.ns)
    parts = [f"{row.lane} {ms(row.ns - row.hidden_ns)}" for row in rows[:3] if row.ns > row.hidden_ns]
    each = (
        f" (in flight while nothing computes, waits for other ranks included: {', '.join(parts)})"
        if parts
        else ""
    )
    yield Advice(
        exposed_ns, f"{ms(exposed_ns)} of communication stay exposed{each}: {_mend_link(found, rows[0].axis)}"
    )


def _mend_link(found: ProfileAnalysis, axis: str) -> str:
    """For communication that is most of all on this axis."""
    if axis == "tp":
        beside = (
            ""
            if found.device_type == "cpu"
            else "parallel.async_tp=true, if it is off, runs it beside the products; "
        )
        return f"{beside}a smaller parallel.tp makes less of it"
    if any(prefetch.blocking for prefetch in found.prefetch):
        return (
            "each launch waits for its end (gloo on a CPU does), so no prefetch depth hides any of it; "
            "fewer bytes do"
        )
    if axis == "dp_shard":
        return (
            "more computing per byte hides it: a larger micro batch, HSDP (parallel.dp_replicate), "
            "parallel.reduce_dtype=bfloat16"
        )
    return "more computing per byte hides it: a larger micro batch"


def _host(found: ProfileAnalysis) -> Iterator[Advice]:
    host_ns = found.shares.ns["host"]
    if host_ns >= LARGE_SHARE * found.step.length_ns:
        means = (
            "what runs between the operators is Python"
            if found.device_type == "cpu"
            else "the GPU stands because the CPU has not launched the next kernel"
        )
        mend = (
            "a larger micro batch, and parallel.compile.enabled=true if it is off, make fewer and longer "
            "kernels"
        )
        yield Advice(host_ns, f"{ms(host_ns)} are host-bound: {means}; {mend}")


def _early(found: ProfileAnalysis) -> Iterator[Advice]:
    """Saves memory, no time."""
    for phase in ("forward", "backward"):
        parts = [
            part
            for part in found.prefetch
            if part.phase == phase and not part.blocking and part.best < part.used
        ]
        held = max((gather.held_units for part in parts for gather in part.gathers), default=0)
        if held >= EARLY_UNITS:
            depth = max(part.best for part in parts)
            waits = f"gathered parameters wait while up to {held} units pass"
            yield Advice(0, f"set parallel.{phase}_prefetch={depth}: as fast, with less memory; {waits}")
