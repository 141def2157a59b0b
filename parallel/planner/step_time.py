"""A discrete-event simulation of a training step: the tasks of each FSDP unit on the host and on the streams
of one GPU, their speed while they overlap, and the exposed waits."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.parallel.plan.schema import (
    MicroBatch,
    Plan,
    UnitPlan,
    micro_batch_kinds,
    sums_whole_gradients,
)
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.progress import clock
from meshwright.parallel.planner.timeline import (
    COMPUTE,
    EXPOSED,
    HOST,
    HOST_BOUND,
    OFFLOAD,
    MicroBatchTimeline,
    Timeline,
    TimelineEvent,
)
from meshwright.parallel.planner.walk import StepSink, StepWalk

STREAMS = {  # lane -> stream
    HOST: HOST,
    COMPUTE: COMPUTE,
    "tp": COMPUTE,
    "cp": COMPUTE,
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": COMPUTE,  # of the optimizer, as far as it waits for them
    OFFLOAD: OFFLOAD,
}
ALONE = frozenset({COMPUTE, OFFLOAD, HOST})  # streams that do not share the link of the collectives
SHARD_CHANNEL = "dp_shard"  # the communicator that all-gathers and reduce-scatters share


@clock.phase("timeline")
def simulate_step(plan: Plan, times: StepTimes) -> Timeline:
    """Simulate one optimizer step of one rank under FSDP2."""
    return _join([(_timeline(tasks, spans), count) for tasks, spans, count in _simulate(plan, times)])


@dataclass(frozen=True)
class Load:
    """Seconds that each part of one rank is busy in a step, whatever waits for what.

    Args:
        computing_s: the compute stream
        waited_s: copies to and from host memory that outlast the computing beside them
        collectives_s: the link of all streams' collectives
        ends_s: collectives before the first computing of each micro batch, and after the last
        slowed_s: what computing loses if all collectives run beside it, but for those
        host_s: the host
        serial_s: what nothing overlaps
    """

    computing_s: float
    waited_s: float
    collectives_s: float
    ends_s: float
    slowed_s: float
    host_s: float
    serial_s: float

    @property
    def seconds(self) -> float:
        """A lower bound of the step: no order of work is faster than the busiest part."""
        computing_s = self.computing_s + max(self.slowed_s, self.waited_s) + self.ends_s
        return max(computing_s, self.collectives_s, self.host_s) + self.serial_s

    def mixed(self, other: "Load", share: float) -> "Load":
        """Return the load of a step of which a share is like another one."""
        return Load(
            *(a + share * (b - a) for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def step_load(plan: Plan, times: StepTimes, repeats: Mapping[str, int]) -> Load:
    """Return the load of a step. `repeats`: number of equal blocks that a block stands for, as in
    `ModelWorkload`."""
    walk, busy_s = StepWalk(plan, StepSink(), times.has_backward), dict.fromkeys(STREAMS, 0.0)
    slowest, ends_s, slowed_s, waited_s = max(times.slowdown.values(), default=0.0), 0.0, 0.0, 0.0
    # what the compute stream does at most while one block is copied: the phase of another one, and its copies
    beside_s = {
        phase: max(
            times.units[unit.name].most_copied_s(phase) + times.modules[name].of(phase).device_s
            for unit in plan.units
            for name in times.offload_s.keys() & set(unit.modules)
        )
        for phase in (("forward", "backward") if times.offload_s else ())
    }
    for micro_batch, count in micro_batch_kinds(plan):
        walk.sink = sink = TaskSink(plan, times)
        walk.forward(micro_batch)
        walk.backward(micro_batch)
        computing = [i for i, task in enumerate(sink.tasks[:-1]) if STREAMS[task.lane] == COMPUTE]
        for i, task in enumerate(sink.tasks):
            seconds = task.alone_s * count * repeats.get(task.unit, 1)
            busy_s[task.lane] += seconds
            if task.lane == OFFLOAD and task.alone_s:
                waited_s += seconds * max(0.0, 1 - beside_s[task.phase] / task.alone_s)
            elif STREAMS[task.lane] not in ALONE:
                slowed_s += times.slowdown[task.lane] * seconds
                ends_s += seconds * (not computing[0] < i < computing[-1])
    serial_s = times.optimizer_s + times.exchange_s + times.scalars_s
    if not times.overlaps:
        return Load(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, serial_s + sum(busy_s.values()))
    inside_s = busy_s["tp"] + busy_s["cp"]  # which the collectives of other streams do not slow down
    collectives_s = sum(seconds for lane, seconds in busy_s.items() if STREAMS[lane] not in ALONE)
    slowed_s = max(0.0, slowed_s - slowest * (inside_s + ends_s))
    computing_s = busy_s[COMPUTE] + inside_s
    return Load(computing_s, waited_s, collectives_s, ends_s, slowed_s, busy_s[HOST], serial_s)


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel, copy or collective on a stream, or the host's work to launch what follows. The index of a
    task is its launch order.

    Args:
        lane: a key of STREAMS
        work, unit, module, phase: as in `TimelineEvent`
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


def _simulate(plan: Plan, times: StepTimes) -> Iterator[tuple[list[Task], list[Span], int]]:
    """Yield the tasks of one micro batch of each kind, their spans from second 0, and its count; then those
    of the optimizer step, after the all-reduces of single numbers, which nothing hides.

    At the end of every backward FSDP2 waits for all collectives in flight, and the next forward's first
    all-gather starts after that. Micro batches therefore share nothing but the parameters that stay gathered,
    and one of each kind is simulated.
    """
    walk = StepWalk(plan, TaskSink(plan, times), times.has_backward)
    for micro_batch, count in micro_batch_kinds(plan):
        walk.sink = sink = TaskSink(plan, times)
        walk.forward(micro_batch)
        walk.backward(micro_batch)
        yield sink.tasks, run_tasks(sink.tasks, times.slowdown), count
    scalars = Task("all_reduce", "all_reduce", "", "", "optimizer", times.scalars_s, ())
    optimizer = Task(COMPUTE, "optimizer", "", "", "optimizer", times.optimizer_s, (0,))
    exchange = Task("all_to_all", "all_to_all", "", "", "optimizer", times.exchange_s, (1,))
    tasks = [scalars, optimizer, exchange]
    yield tasks, run_tasks(tasks, times.slowdown), 1


class TaskSink(StepSink):
    """The tasks of a walk through a step, in the order in which the host launches them.

    - The host runs ahead of the device: a task starts after its launch.
    - The compute stream waits for an all-gather and copies out of its buffer. Later all-gathers, which would
      overwrite the buffer, wait for this copy in the backward; in the forward, which has two buffers, they
      wait only for the copy of the previous unit. They wait for nothing else on the compute stream.
    - A reduction waits for the previous reduce-scatter (there is one input buffer) and copies into that
      buffer on the compute stream; an all-reduce over replicas has its own stream and communicator.
    - All-gathers and reduce-scatters over dp_shard share one NCCL communicator, which runs them one at a time
      in launch order, whatever their streams (see FSDPModule.set_separate_reduce_scatter_group, which is not
      used). Without backward prefetching, a unit is therefore gathered only after the previous unit's
      reduction. Gathers over a smaller group have a communicator of their own.
    - After a block's forward its activations are copied to host memory, and the compute stream waits for the
      copy of the previous block, which frees its device memory. Before a block's backward it waits for the
      copy back, and that of the block whose backward is next starts (parallel/activation_offload.py).
    """

    def __init__(self, plan: Plan, times: StepTimes) -> None:
        self.tasks: list[Task] = []
        self._plan, self._times = plan, times
        self._unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
        # block -> the previous offloaded block
        self._previous_offloaded = {after: name for name, after in pairwise(times.offload_s)}
        self._copies: dict[str, int] = {}  # block -> its latest copy to or from host memory
        self._last: dict[str, int] = {}  # stream, or SHARD_CHANNEL -> its latest task
        self._waits: list[int] = []  # tasks that the next task on the compute stream waits for
        self._gather_after: list[int] = []  # tasks that the all-gather stream waits for
        self._gathers: dict[str, int] = {}  # unit -> its all-gather in flight, if it takes time
        self._copied_out: int | None = None  # forward: the latest copy out of a buffer
        self._scatter: int | None = None  # the latest reduce-scatter, which still holds its input buffer
        self._launched: tuple[int, ...] = ()  # the host's latest work

    def enter(self, unit: UnitPlan, phase: str) -> None:
        """Let the host run FSDP2's hook."""
        self._launch(unit.name, "", phase, self._times.hook_s)

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """Start an all-gather after the copies out of the buffers that it would overwrite."""
        times, size = self._times.units[unit.name], unit.reshard_after_forward
        if alone_s := times.regather_s if again else times.gather_s:
            smaller_group = again and type(size) is int and size != self._plan.mesh.shards
            channel = "" if smaller_group else SHARD_CHANNEL
            self._gathers[unit.name] = self._collective(
                "all_gather", unit, phase, alone_s, self._gather_after, channel
            )
            self._gather_after = []

    def copy_out(self, unit: UnitPlan, phase: str) -> None:
        """Wait for the all-gather, and copy out of its buffer."""
        gather = self._gathers.pop(unit.name, None)
        if phase == "forward":
            self._release_buffer()
        if gather is not None:
            self._waits.append(gather)
        copy = self._on_compute("copy_out", unit.name, "", phase, self._times.units[unit.name].copy_out_s)
        if gather is not None and phase == "forward":
            self._copied_out = copy
        elif gather is not None:
            self._gather_after.append(copy)

    def compute(self, module: str, phase: str) -> None:
        """Launch a module's kernels, the collectives within, and the copies of its activations."""
        unit, times = self._unit_of[module], self._times.modules[module].of(phase)
        if phase == "backward":
            self._fetch(module)
        self._launch(unit, module, phase, times.host_s)
        self._on_compute(phase, unit, module, phase, times.compute_s)
        for axis, seconds in times.exposed_s.items():
            self._on_compute(axis, unit, module, phase, seconds, lane=axis)
        if phase == "forward":
            self._send(module)

    def leave(self, unit: UnitPlan) -> None:
        """Let the host run FSDP2's hook."""
        self._launch(unit.name, "", "backward", self._times.hook_s)

    def sum(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Add the unit's whole gradients to their sums."""
        times = self._times.units[unit.name]
        seconds = times.first_sum_s if micro_batch.first else times.sum_s
        self._on_compute("sum", unit.name, "", "backward", seconds)

    def reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Copy into the buffer of the reduce-scatter, reduce-scatter, and in the last micro batch
        all-reduce."""
        times = self._times.units[unit.name]
        if self._scatter is not None:
            self._waits.append(self._scatter)
            self._scatter = None
        copy_in_s = times.sums_copy_in_s if sums_whole_gradients(unit, self._plan) else times.copy_in_s
        reduced = self._on_compute("copy_in", unit.name, "", "backward", copy_in_s)
        if times.scatter_s:
            reduced = self._scatter = self._collective(
                "reduce_scatter", unit, "backward", times.scatter_s, [reduced], SHARD_CHANNEL
            )
        if times.all_reduce_s and micro_batch.last:
            self._collective("all_reduce", unit, "backward", times.all_reduce_s, [reduced])

    def end(self, phase: str, micro_batch: MicroBatch) -> None:
        """At the end of a backward the compute stream waits for all streams, and the next forward's
        all-gathers wait for the compute stream."""
        if phase == "forward":
            self._release_buffer()
        else:
            self._waits += self._last.values()
            self._gather_after = [self._on_compute("", "", "", "backward", 0.0)]
            self._gathers, self._scatter = {}, None

    def _release_buffer(self) -> None:
        if self._copied_out is not None:
            self._gather_after.append(self._copied_out)
        self._copied_out = None

    def _send(self, module: str) -> None:
        if module in self._previous_offloaded:
            self._waits.append(self._copies[self._previous_offloaded[module]])
        if self._times.offload_s.get(module):
            self._copy(module, "send", "forward")

    def _fetch(self, module: str) -> None:
        if self._times.offload_s.get(module):
            self._waits.append(self._copies[module])
        if module in self._previous_offloaded:
            self._copy(self._previous_offloaded[module], "fetch", "backward")

    def _copy(self, module: str, work: str, phase: str) -> None:
        """Launch a copy after all compute launched so far."""
        after = [*self._waits, self._last[COMPUTE]]
        unit, alone_s = self._unit_of[module], self._times.offload_s[module]
        self._copies[module] = self._add(OFFLOAD, work, unit, module, phase, alone_s, after)

    def _launch(self, unit: str, module: str, phase: str, host_s: float) -> None:
        """Let the host work before what is launched next can start."""
        if host_s:
            self._launched = (self._add(HOST, HOST, unit, module, phase, host_s, ()),)

    def _on_compute(
        self, work: str, unit: str, module: str, phase: str, alone_s: float, lane: str = COMPUTE
    ) -> int:
        after, self._waits = self._waits, []
        return self._add(lane, work, unit, module, phase, alone_s, after)

    def _collective(
        self, lane: str, unit: UnitPlan, phase: str, alone_s: float, after: Sequence[int], channel: str = ""
    ) -> int:
        return self._add(lane, lane, unit.name, "", phase, alone_s, after, channel)

    def _add(
        self,
        lane: str,
        work: str,
        unit: str,
        module: str,
        phase: str,
        alone_s: float,
        after: Sequence[int],
        channel: str = "",
    ) -> int:
        """Launch a task after the previous one on its stream, and on its communicator if it shares one. If
        the device does not overlap, tasks run one after the other."""
        index = len(self.tasks)
        queues = (STREAMS[lane], channel) if channel else (STREAMS[lane],)
        before = (self._last[queue] for queue in queues if queue in self._last)
        all_after = (*after, *before, *self._launched) if self._times.overlaps else tuple(range(index)[-1:])
        self.tasks.append(Task(lane, work, unit, module, phase, alone_s, all_after))
        self._last |= dict.fromkeys(queues, index)
        return index


def run_tasks(tasks: Sequence[Task], slowdown: Mapping[str, float]) -> list[Span]:
    """Simulate all tasks from second 0 and return their spans.

    Collectives in flight at the same time share the link: each of n runs at 1/n of its speed. That is the
    worst case, because latencies add up only within one communicator. Compute runs at 1 - `slowdown` of its
    speed during a collective: the largest, by lane, of those in flight. Tensor-parallel collectives are on
    the compute stream; they neither slow others down nor are slowed down. Copies to and from host memory have
    a separate link and copy engine. The host is slowed down by nothing.
    """
    queues: dict[str, list[int]] = {}  # by stream, in reverse order
    for index in reversed(range(len(tasks))):
        queues.setdefault(STREAMS[tasks[index].lane], []).append(index)
    running = dict[str, _Running]()  # by stream
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


def find_waits(tasks: Sequence[Task], spans: Sequence[Span]) -> Iterator[tuple[int, float, float]]:
    """Yield the gaps of the compute stream in order: the index of the awaited task, start and end. While the
    awaited task is itself waiting, the gap counts for the task that it waits for."""
    free_s = 0.0
    for task, span in zip(tasks, spans, strict=True):
        if STREAMS[task.lane] == COMPUTE:
            gap, index, end_s = [], span.released_by, span.start_s
            while end_s > free_s:
                start_s = max(spans[index].start_s, free_s)
                gap.append((index, start_s, end_s))
                index, end_s = spans[index].released_by, start_s
            yield from reversed(gap)
            free_s = span.end_s


def _seconds(spans: Sequence[Span]) -> float:
    return max(span.end_s for span in spans)


def _timeline(tasks: Sequence[Task], spans: Sequence[Span]) -> MicroBatchTimeline:
    """Return the events and waits of a micro batch. A collective on the compute stream is both."""
    events = [
        _event(task, lane, task.work, span.start_s, span.end_s)
        for task, span in zip(tasks, spans, strict=True)
        for lane in ((task.lane, EXPOSED) if task.lane in ("tp", "cp", "all_to_all") else (task.lane,))
    ]
    for index, start_s, end_s in find_waits(tasks, spans):
        lane = tasks[index].lane
        events.append(_event(tasks[index], HOST_BOUND if lane == HOST else EXPOSED, lane, start_s, end_s))
    events = [event for event in events if event.end_s > event.start_s]
    return MicroBatchTimeline(0.0, _seconds(spans), tuple(sorted(events, key=lambda event: event.start_s)))


def _event(task: Task, lane: str, work: str, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(lane, work, task.unit, task.module, task.phase, 0, start_s, end_s)


def _join(parts: Sequence[tuple[MicroBatchTimeline, int]]) -> Timeline:
    """Join the parts of a step, each repeated by its count, and sum up their compute, exposed and host-bound
    time."""
    rounds, step_s, compute_s, host_s = list[MicroBatchTimeline](), 0.0, 0.0, 0.0
    by_lane = defaultdict[str, float](float)
    for part, count in parts:
        for _ in range(count):
            rounds.append(replace(part, start_s=step_s))
            step_s += part.seconds
        for event in part.events:
            if event.lane == COMPUTE:
                compute_s += count * event.seconds
            elif event.lane == HOST_BOUND:
                host_s += count * event.seconds
            elif event.lane == EXPOSED:
                by_lane[event.work] += count * event.seconds
    return Timeline(tuple(rounds), step_s, compute_s, sum(by_lane.values()), dict(by_lane), host_s)
