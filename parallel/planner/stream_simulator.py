"""A discrete-event simulator of tasks on the host and on the streams of one GPU: their dependencies, and
their speed while they overlap."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE, OFFLOAD, HOST = "compute", "offload", "host"
STREAMS = {  # lane -> stream
    HOST: HOST,
    COMPUTE: COMPUTE,
    "tp": COMPUTE,
    "cp": COMPUTE,
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    OFFLOAD: OFFLOAD,
}
ALONE = frozenset({COMPUTE, OFFLOAD, HOST})  # streams that do not share the link of the collectives


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel, copy or collective on a stream, or the host's work to launch what follows. The index of a
    task is its launch order.

    Args:
        lane: a key of STREAMS
        work, unit, module, phase: as in `timeline.TimelineEvent`
        alone_s: seconds if nothing runs at the same time
        after: indices of the tasks that it waits for, including the previous one on its stream
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
    """The start and end of a task, and the index of the task whose end released it; -1 if none did."""

    start_s: float
    end_s: float
    released_by: int


def run_tasks(tasks: Sequence[Task], slowdown: Mapping[str, float]) -> list[Span]:
    """Simulate all tasks from second 0 and return their spans.

    Collectives in flight at the same time share the link: each of n runs at 1/n of its speed. That is the
    worst case, because latencies add up only within one communicator. Compute runs at 1 - `slowdown` of its
    speed during a collective: the largest, by lane, of those in flight. Tensor-parallel collectives are on
    the compute stream; they neither slow others down nor are slowed down. Copies to and from host memory have
    a separate link and copy engine. The host is slowed down by nothing.
    """
    queues, running = _queues(tasks), dict[str, _Running]()  # by stream
    spans: dict[int, Span] = {}
    ends_s = [math.nan] * len(tasks)
    # stream -> the task whose end it waits for: the one in flight, or one before its next task
    waits_for, ended = dict.fromkeys(queues, -1), -1
    now_s = 0.0
    while len(spans) < len(tasks):
        for stream, queue in queues.items():
            if queue and waits_for[stream] == ended:
                task = tasks[queue[-1]]
                waits_for[stream] = next((i for i in task.after if i not in spans), queue[-1])
                if waits_for[stream] == queue[-1]:
                    released_by = max(task.after, key=ends_s.__getitem__, default=-1)
                    running[stream] = _Running(queue.pop(), task.lane, task.alone_s, now_s, released_by)
        assert running, "a task waits for a task that is launched later"
        stream, passed_s = _advance(running, slowdown)
        now_s += passed_s
        task_ended = running.pop(stream)
        ended = task_ended.index
        ends_s[ended] = now_s
        spans[ended] = Span(task_ended.start_s, now_s, task_ended.released_by)
    return [spans[i] for i in range(len(tasks))]


@dataclass(slots=True)
class _Running:
    """A task in flight."""

    index: int
    lane: str
    left_s: float  # the rest of `alone_s`
    start_s: float
    released_by: int
    speed: float = 1.0


def _advance(running: Mapping[str, _Running], slowdown: Mapping[str, float]) -> tuple[str, float]:
    """Advance all running tasks until one ends. Return its stream and the seconds until its end."""
    collectives = running.keys() - ALONE
    beside = 1.0 - max((slowdown[stream] for stream in collectives), default=0.0)
    first, passed_s = "", math.inf
    for stream, task in running.items():
        if stream not in ALONE:
            task.speed = 1.0 / len(collectives)
        else:
            task.speed = beside if task.lane == COMPUTE else 1.0
        if (seconds := task.left_s / task.speed) < passed_s:
            first, passed_s = stream, seconds
    for task in running.values():
        task.left_s = max(task.left_s - passed_s * task.speed, 0.0)
    return first, passed_s


def _queues(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Return the task indices of each stream in reverse order."""
    queues: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(STREAMS[task.lane], []).append(index)
    return {stream: queue[::-1] for stream, queue in queues.items()}


@dataclass(frozen=True, slots=True)
class Wait:
    """An interval in which the compute stream waits while the task with index `task` is in flight."""

    task: int
    start_s: float
    end_s: float


def find_waits(tasks: Sequence[Task], spans: Sequence[Span]) -> list[Wait]:
    """Return all gaps of the compute stream, in order. While the awaited task is itself waiting, the gap
    counts for the task that it waits for."""
    waits: list[Wait] = []
    free_s = 0.0
    for task, span in zip(tasks, spans, strict=True):
        if STREAMS[task.lane] == COMPUTE:
            waits += _find_gap(spans, span, free_s)[::-1]
            free_s = span.end_s
    return waits


def _find_gap(spans: Sequence[Span], waiting: Span, free_s: float) -> list[Wait]:
    """Return the parts of the gap before one task, the last part first."""
    waits: list[Wait] = []
    index, end_s = waiting.released_by, waiting.start_s
    while end_s > free_s:
        start_s = max(spans[index].start_s, free_s)
        if start_s < end_s:
            waits.append(Wait(index, start_s, end_s))
        index, end_s = spans[index].released_by, start_s
    return waits
