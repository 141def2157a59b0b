"""The timeline of a simulated step on one GPU: events in lanes, exposed waits, and its Chrome trace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

COMPUTE, OFFLOAD, HOST = "compute", "offload", "host"
EXPOSED, HOST_BOUND = "exposed", "host_bound"
LINKS = {  # lane of communication -> label, in display order
    "tp": "tensor parallel",
    "cp": "context parallel",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    OFFLOAD: "host memory",
}
LANES = {
    HOST: "host",
    COMPUTE: "compute",
    HOST_BOUND: "host-bound: computing waits",
    EXPOSED: "exposed: computing waits",
    **LINKS,
}
# of the collectives of FSDP2
AXIS_OF_LANE = {"all_gather": "dp_shard", "reduce_scatter": "dp_shard", "all_reduce": "dp_replicate"}
# for Chrome's trace viewer; Perfetto picks colors by name
TRACE_COLORS = {EXPOSED: "terrible", HOST_BOUND: "terrible", "tp": "bad", "cp": "bad"}


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One bar of one lane. Seconds count from the start of the step.

    Args:
        lane: host, compute, tp, cp, all_gather, reduce_scatter, all_reduce, offload; all_to_all (of the
            optimizer, as far as it is exposed); or exposed, host_bound: the compute stream waits for a
            collective or copy, its own or of another stream, or for the host
        work: in compute forward, backward, copy_out, copy_in, sum (of whole gradients) or optimizer; in
            exposed the awaited lane; in offload send or fetch; in host_bound host; elsewhere the lane
        unit: the FSDP unit of the event; "" for the optimizer
        module: the module; "" for an event of the entire unit
        phase: forward, backward, optimizer
        micro_batch: number of the micro batch
        start_s, end_s: start and end
    """

    lane: str
    work: str
    unit: str
    module: str
    phase: str
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class MicroBatchTimeline:
    """One micro batch, or the optimizer step.

    Args:
        start_s: start within the step
        seconds: duration
        events: in the order of their starts, with times from the start of the micro batch and micro_batch 0;
            identical micro batches share one tuple
    """

    start_s: float
    seconds: float
    events: tuple[TimelineEvent, ...]


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Args:
        rounds: micro batches, then the optimizer step
        step_s: the sum of `compute_s`, `exposed_s` and `host_s`
        compute_s: time in which the compute stream works, including copies, the optimizer and the slowdown by
            collectives
        exposed_s: time in which it waits for a collective or a copy to or from host memory: the events of
            lane exposed
        exposed_by_lane: `exposed_s` by awaited lane, without zeros; while an awaited task itself waits (for
            the link or in a queue), the task in flight counts
        host_s: time in which the compute stream waits for the host to launch something
    """

    rounds: tuple[MicroBatchTimeline, ...]
    step_s: float
    compute_s: float
    exposed_s: float
    exposed_by_lane: Mapping[str, float]
    host_s: float = 0.0

    @cached_property
    def events(self) -> tuple[TimelineEvent, ...]:
        """All events of the step."""
        return tuple(
            replace(e, micro_batch=number, start_s=e.start_s + part.start_s, end_s=e.end_s + part.start_s)
            for number, part in enumerate(self.rounds)
            for e in part.events
        )

    @property
    def exposed_share(self) -> float:
        """The share of the step that is exposed."""
        return self.exposed_s / self.step_s if self.step_s else 0.0

    @property
    def optimizer_s(self) -> float:
        """The seconds of the optimizer step: the gradient norm, the update, and what they wait for."""
        return self.rounds[-1].seconds

    @property
    def host_share(self) -> float:
        """The share of the step that is host-bound."""
        return self.host_s / self.step_s if self.step_s else 0.0


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """Return the step in the trace event format of https://ui.perfetto.dev and chrome://tracing: one process
    named `title`, one thread per lane, complete events ("X") with times in microseconds.

    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    used = [lane for lane in LANES if any(event.lane == lane for event in timeline.events)]
    threads = {lane: number for number, lane in enumerate(used, start=1)}

    def entry(kind: str, thread: int, name: str, args: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return {"ph": kind, "pid": 1, "tid": thread, "name": name, **rest, "args": args}

    trace = [entry("M", 0, "process_name", {"name": title})]
    for lane, number in threads.items():
        trace.append(entry("M", number, "thread_name", {"name": LANES[lane]}))
        trace.append(entry("M", number, "thread_sort_index", {"sort_index": number}))
    for event in timeline.events:
        args = {name: getattr(event, name) for name in ("unit", "module", "phase", "micro_batch")}
        times = {"ts": event.start_s * 1e6, "dur": event.seconds * 1e6}
        bar = entry("X", threads[event.lane], describe(event), args, cat=event.lane, **times)
        trace.append(bar | ({"cname": TRACE_COLORS[event.lane]} if event.lane in TRACE_COLORS else {}))
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def describe(event: TimelineEvent) -> str:
    """Return a short label of the event."""
    work = event.work.replace("_", " ")
    where = event.module or event.unit
    return f"wait: {work} {where}" if event.lane in (EXPOSED, HOST_BOUND) else f"{work} {where}".rstrip()
