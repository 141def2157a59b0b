"""Tasks on the streams of one GPU: what waits for what, and how fast each runs beside the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE, OFFLOAD = "compute", "offload"
STREAMS = {  # lane -> stream
    COMPUTE: COMPUTE,
    "tp": COMPUTE,
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    OFFLOAD: OFFLOAD,
}


@dataclass(frozen=True, slots=True)
class Task:
    """Something a stream does, launched in the order of its index.

    Args:
        lane: one of STREAMS
        work, unit, module, phase: as in `timeline.Event`
        alone_s: seconds that it takes with nothing beside it
        after: indices of the tasks that it waits for, the one before it on its stream included
    """

    lane: str
    work: str
    unit: str
    module: str
    phase: str
    alone_s: float
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, and the index of the one whose end let it start; -1 if it waited for none."""

    start_s: float
    end_s: float
    released_by: int


def run_tasks(tasks: Sequence[Task], slowdown: float) -> list[Span]:
    """Play all tasks through, from second 0.

    Collectives in flight together share the link: n of them run at 1/n of their speed each. That is the worst
    case: latencies add up only within one communicator. Computing beside any of them runs at 1 - `slowdown`
    of its speed; tensor-parallel collectives, which stop computing, neither slow down nor are slowed. Copies
    to host memory and back have a link, and an engine, of their own.
    """
    spans: dict[int, Span] = {}
    queues = _queues(tasks)
    running: dict[str, _Running] = {}  # by stream
    now_s = 0.0
    while True:
        for stream, queue in queues.items():
            if stream not in running and queue and all(i in spans for i in tasks[queue[-1]].after):
                task = tasks[queue[-1]]
                released_by = max(task.after, key=lambda i: spans[i].end_s, default=-1)
                running[stream] = _Running(queue.pop(), task.lane, task.alone_s, now_s, released_by)
        if not running:
            break
        stream, passed_s = _advance(running, slowdown)
        now_s += passed_s
        ended = running.pop(stream)
        spans[ended.index] = Span(ended.start_s, now_s, ended.released_by)
    assert len(spans) == len(tasks), "every task waits only for tasks that were launched before it"
    return [spans[i] for i in range(len(tasks))]


@dataclass(slots=True)
class _Running:
    index: int
    lane: str
    left_s: float  # of `alone_s`
    start_s: float
    released_by: int


def _advance(running: Mapping[str, _Running], slowdown: float) -> tuple[str, float]:
    """Let all run until one of them ends. Returns its stream, and the seconds until then."""
    collectives = len(running.keys() - {COMPUTE, OFFLOAD})
    speeds = dict.fromkeys(running, 1.0 / max(collectives, 1))
    if OFFLOAD in running:
        speeds[OFFLOAD] = 1.0
    if COMPUTE in running:
        speeds[COMPUTE] = 1.0 - slowdown if collectives and running[COMPUTE].lane == COMPUTE else 1.0
    stream = min(running, key=lambda stream: running[stream].left_s / speeds[stream])
    passed_s = running[stream].left_s / speeds[stream]
    for other, task in running.items():
        task.left_s = max(task.left_s - passed_s * speeds[other], 0.0)
    return stream, passed_s


def _queues(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """The tasks of each stream, the first at the end."""
    queues: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(STREAMS[task.lane], []).append(index)
    return {stream: queue[::-1] for stream, queue in queues.items()}


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream stands from `start_s` to `end_s`, in which the task of that index is in flight."""

    task: int
    start_s: float
    end_s: float


def find_waits(tasks: Sequence[Task], spans: Sequence[Span]) -> list[Wait]:
    """All gaps of the compute stream, in order. While what is waited for itself waits, what holds it up
    counts."""
    waits: list[Wait] = []
    free_s = 0.0
    for task, span in zip(tasks, spans, strict=True):
        if STREAMS[task.lane] == COMPUTE:
            waits += _find_gap(spans, span, free_s)[::-1]
            free_s = span.end_s
    return waits


def _find_gap(spans: Sequence[Span], waiting: Span, free_s: float) -> list[Wait]:
    """The gap before one task, the last part first."""
    waits: list[Wait] = []
    index, end_s = waiting.released_by, waiting.start_s
    while end_s > free_s:
        start_s = max(spans[index].start_s, free_s)
        if start_s < end_s:
            waits.append(Wait(index, start_s, end_s))
        index, end_s = spans[index].released_by, start_s
    return waits
