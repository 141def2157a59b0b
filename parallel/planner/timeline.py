"""A step as it passes on one GPU: events in lanes, what is waited for, and the same as a Chrome trace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

EXPOSED = "exposed"
LANES = {  # in the order in which they are shown -> what they are called there
    "compute": "compute",
    EXPOSED: "exposed: compute waits",
    "tp": "tensor parallel",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "offload": "host memory",
}
TRACE_COLORS = {EXPOSED: "terrible", "tp": "bad"}  # of Chrome's trace viewer; Perfetto chooses by name


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One bar of one lane. Seconds count from the start of the step.

    Args:
        lane: compute, tp, all_gather, reduce_scatter, all_reduce, offload; or exposed: the compute stream
            stands and waits
        work: in compute forward, backward, copy_out, copy_in or optimizer; in exposed the lane that is waited
            for; elsewhere the lane (in offload send or fetch)
        unit: whose parameters or gradients, or that of the module; "" for the optimizer
        module: what is computed; "" where it is the unit as a whole
        phase: forward, backward, optimizer
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
        return self.end_s - self.start_s


@dataclass(frozen=True)
class MicroBatchTimeline:
    """The events of one micro batch, or the optimizer's, in the order of their starts, as if it began at
    second 0 and were the first; when it begins, and how long it takes. Micro batches that pass alike share
    theirs."""

    start_s: float
    seconds: float
    events: tuple[TimelineEvent, ...]


@dataclass(frozen=True)
class Timeline:
    """A simulated step: `step_s` is `compute_s`, when the compute stream works (copies and the optimizer too,
    and as slow as they are beside collectives), and `exposed_s`, when it waits for a collective or for host
    memory, or runs a tensor-parallel collective.

    `exposed_by_lane` says how much of `exposed_s` each lane is waited for, 0 left out. If what is waited for
    itself waits, for the link or in a queue, whatever is in flight at that time counts.
    """

    rounds: tuple[MicroBatchTimeline, ...]
    step_s: float
    compute_s: float
    exposed_s: float
    exposed_by_lane: Mapping[str, float]

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
        """Of the step."""
        return self.exposed_s / self.step_s if self.step_s else 0.0


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """The step in the trace event format, which https://ui.perfetto.dev and chrome://tracing open: one
    process named `title`, a thread per lane, complete events ("X") with times in microseconds.

    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    used = [lane for lane in LANES if any(event.lane == lane for event in timeline.events)]
    threads = {lane: number for number, lane in enumerate(used, start=1)}
    about = [_about("process_name", 0, name=title)]
    for lane, number in threads.items():
        about.append(_about("thread_name", number, name=LANES[lane]))
        about.append(_about("thread_sort_index", number, sort_index=number))
    bars = [_bar(event, threads[event.lane]) for event in timeline.events]
    return {"traceEvents": about + bars, "displayTimeUnit": "ms"}


def _about(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": args}


def _bar(event: TimelineEvent, thread: int) -> dict[str, Any]:
    bar = {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": describe(event),
        "cat": event.lane,
        "ts": event.start_s * 1e6,
        "dur": event.seconds * 1e6,
        "args": {
            "unit": event.unit,
            "module": event.module,
            "phase": event.phase,
            "micro_batch": event.micro_batch,
        },
    }
    return bar | ({"cname": TRACE_COLORS[event.lane]} if event.lane in TRACE_COLORS else {})


def describe(event: TimelineEvent) -> str:
    """What the event is, in a few words."""
    work = event.work.replace("_", " ")
    where = event.module or event.unit
    return f"wait: {work} {where}" if event.lane == EXPOSED else f"{work} {where}".rstrip()
