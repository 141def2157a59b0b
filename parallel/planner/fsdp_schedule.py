"""A training step as events on the streams of one GPU: when each unit is gathered, computed, reduced; what is
waited for."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.parallel.plan.schema import Plan, UnitPlan, prefetch_schedule, regathered
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.stream_simulator import (
    COMPUTE,
    OFFLOAD,
    STREAMS,
    Task,
    find_waits,
    run_tasks,
)
from meshwright.parallel.planner.timeline import EXPOSED, MicroBatchTimeline, Timeline, TimelineEvent

# name of a unit, phase -> units whose all-gathers it starts ahead
Ahead = Mapping[tuple[str, str], Sequence[UnitPlan]]
SHARD_CHANNEL = "dp_shard"  # the communicator that all-gathers and reduce-scatters share


def simulate_step(plan: Plan, times: StepTimes) -> Timeline:
    """One optimizer step of one rank, as FSDP2 runs it (see `_FsdpLaunchOrder` for its rules).

    FSDP2 ends every backward by waiting for all that is in flight, and starts the next forward's first
    all-gather after that, so a micro batch passes as if it were alone, and two kinds are played: the last
    one, with the all-reduces of HSDP, and any other.
    """
    ahead = start_ahead(plan)
    last = _simulate_round(plan, times, ahead, all_reduce=True)
    replicated = any(unit.all_reduce_s for unit in times.units.values())
    other = (
        _simulate_round(plan, times, ahead, all_reduce=False)
        if plan.accumulation > 1 and replicated
        else last
    )
    return _join([(other, plan.accumulation - 1), (last, 1), (_optimizer(times.optimizer_s), 1)])


def start_ahead(plan: Plan) -> Ahead:
    """The prefetch schedule."""
    schedules = {phase: prefetch_schedule(plan, phase) for phase in ("forward", "backward")}
    return {(name, phase): units for phase, schedule in schedules.items() for name, units in schedule.items()}


def launch_tasks(plan: Plan, times: StepTimes, ahead: Ahead, all_reduces: Sequence[bool]) -> list[Task]:
    """What the CPU launches for some micro batches one after the other: for each, whether it all-reduces its
    gradients."""
    launches = _FsdpLaunchOrder(plan, times, ahead)
    for all_reduce in all_reduces:
        launches.launch_forward()
        launches.launch_backward(all_reduce)
    return launches.tasks


class _FsdpLaunchOrder:
    """The tasks of a step in the order in which the CPU launches them: the hooks of FSDP2, read in torch 2.13
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py). The CPU is never late.

    - Gathering and waiting: `_unshard`, `_copy_out`. Reducing: `_reduce`. The end of a backward: `_finish`.
    - All-gathers and reduce-scatters over dp_shard go through one NCCL communicator, which runs one at a time
      in the order of launching, whatever their streams (FSDPModule.set_separate_reduce_scatter_group, which
      is off, says so). That is why a backward without prefetching gathers a unit only after the reduction of
      the one before.
    - What a block sends to host memory: `_send`; back: `_fetch` (parallel/activation_offload.py).
    - Parameters of a unit are freed after its backward in every micro batch, so each of them gathers all
      again.
    """

    def __init__(self, plan: Plan, times: StepTimes, ahead: Ahead) -> None:
        self.tasks: list[Task] = []
        self._plan, self._times = plan, times
        self._owner = {module: unit for unit in plan.units for module in unit.modules}
        self._modules: dict[str, list[str]] = {}  # of each unit, in the order of the forward
        for module in plan.modules:
            self._modules.setdefault(self._owner[module].name, []).append(module)
        self._ahead = ahead
        # block -> the one sent before it
        self._behind = {after: name for name, after in pairwise(times.host_s)}
        self._copies: dict[str, int] = {}  # block -> its last copy to or from host memory
        self._last: dict[str, int] = {}  # task of each stream, and of SHARD_CHANNEL
        self._waits: list[int] = []  # of the next task on the compute stream
        self._gather_after: list[int] = []  # events that the all-gather stream waits for
        self._deferred: int | None = None  # forward: the copy-out that it waits for one unit later
        # unit whose all-gather was started -> its task, if it takes time
        self._in_flight: dict[str, int | None] = {}
        self._gathered: set[str] = set()
        self._resharded: set[str] = set()  # by their forward
        self._scatter: int | None = None  # whose input buffer is not yet taken back

    def launch_forward(self) -> None:
        """All modules in order: each unit is gathered before its first one and resharded behind its last."""
        for module in self._plan.modules:
            unit = self._owner[module]
            modules = self._modules[unit.name]
            if module == modules[0]:
                self._gather(unit, "forward")
            self._compute(module, "forward")
            self._send(module)
            if module == modules[-1] and regathered(unit):
                self._gathered.discard(unit.name)
                self._resharded.add(unit.name)
        self._release_deferred()

    def launch_backward(self, all_reduce: bool) -> None:
        """The same the other way round, with each unit's gradients reduced behind its first module, and the
        wait at the end."""
        for module in reversed(self._plan.modules):
            unit = self._owner[module]
            modules = self._modules[unit.name]
            if module == modules[-1]:
                self._gather(unit, "backward")
            self._fetch(module)
            self._compute(module, "backward")
            if module == modules[0]:
                self._reduce(unit, all_reduce)
        self._finish()

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        """Before the unit computes: gather it, unless that was started ahead, wait, copy out, start others
        ahead."""
        self._unshard(unit, phase)
        self._copy_out(unit, phase)
        for other in self._ahead[unit.name, phase]:
            self._unshard(other, phase)

    def _unshard(self, unit: UnitPlan, phase: str) -> None:
        """Start the all-gather, unless the unit is gathered or being gathered. Its stream waits for no
        computing except for copies out of gathered buffers, which it would otherwise overwrite."""
        if unit.name in self._in_flight or unit.name in self._gathered:
            return
        again = unit.name in self._resharded
        unit_times = self._times.units[unit.name]
        alone_s = unit_times.regather_s if again else unit_times.gather_s
        self._in_flight[unit.name] = None
        if alone_s:
            size = unit.reshard_after_forward
            smaller_group = again and type(size) is int and size != self._plan.mesh.dp_shard
            self._in_flight[unit.name] = self._collective(
                "all_gather", unit, phase, alone_s, self._gather_after, "" if smaller_group else SHARD_CHANNEL
            )
            self._gather_after = []

    def _copy_out(self, unit: UnitPlan, phase: str) -> None:
        """Wait for the unit's all-gather and copy out of its buffer, on the compute stream. All-gathers that
        are launched later wait for this copy in the backward, in the forward only for that of the unit
        before: there are two buffers."""
        if unit.name not in self._in_flight:
            return
        gather = self._in_flight.pop(unit.name)
        if phase == "forward":
            self._release_deferred()
        self._gathered.add(unit.name)
        if gather is not None:
            self._waits.append(gather)
        copy = self._on_compute("copy_out", unit.name, "", phase, self._times.units[unit.name].copy_out_s)
        if gather is not None and phase == "forward":
            self._deferred = copy
        elif gather is not None:
            self._gather_after.append(copy)

    def _release_deferred(self) -> None:
        if self._deferred is not None:
            self._gather_after.append(self._deferred)
        self._deferred = None

    def _reduce(self, unit: UnitPlan, all_reduce: bool) -> None:
        """After the unit's backward: free it, wait for the reduce-scatter before (there is one input buffer),
        copy into that buffer on the compute stream, reduce-scatter, and all-reduce on a stream and a
        communicator of its own."""
        unit_times = self._times.units[unit.name]
        self._gathered.discard(unit.name)
        if self._scatter is not None:
            self._waits.append(self._scatter)
            self._scatter = None
        reduced = self._on_compute("copy_in", unit.name, "", "backward", unit_times.copy_in_s)
        if unit_times.scatter_s:
            reduced = self._collective(
                "reduce_scatter", unit, "backward", unit_times.scatter_s, [reduced], SHARD_CHANNEL
            )
            self._scatter = reduced
        if unit_times.all_reduce_s and all_reduce:
            self._collective("all_reduce", unit, "backward", unit_times.all_reduce_s, [reduced])

    def _send(self, module: str) -> None:
        """After a block's forward: wait for what the block before it has sent, whose memory is freed, and
        send its own."""
        if module in self._behind:
            self._waits.append(self._copies[self._behind[module]])
        if self._times.host_s.get(module):
            self._copy(module, "send", "forward")

    def _fetch(self, module: str) -> None:
        """Before a block's backward: wait for what was fetched for it, and start to fetch the next
        block's."""
        if self._times.host_s.get(module):
            self._waits.append(self._copies[module])
        if module in self._behind:
            self._copy(self._behind[module], "fetch", "backward")

    def _copy(self, module: str, work: str, phase: str) -> None:
        """A copy behind what has been computed so far."""
        after = [*self._waits, self._last[COMPUTE]]
        unit, alone_s = self._owner[module].name, self._times.host_s[module]
        self._copies[module] = self._add(OFFLOAD, work, unit, module, phase, alone_s, after)

    def _finish(self) -> None:
        """The compute stream waits for all streams; the next forward's all-gathers wait for it."""
        self._waits += self._last.values()
        self._gather_after = [self._on_compute("", "", "", "backward", 0.0)]
        self._in_flight, self._gathered, self._resharded, self._scatter = {}, set(), set(), None

    def _compute(self, module: str, phase: str) -> None:
        unit, module_times = self._owner[module].name, self._times.modules[module]
        forward = phase == "forward"
        self._on_compute(
            phase, unit, module, phase, module_times.forward_s if forward else module_times.backward_s
        )
        tp_s = module_times.forward_tp_s if forward else module_times.backward_tp_s
        if tp_s:
            self._on_compute("tp", unit, module, phase, tp_s, lane="tp")

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
        """Launch a task after the one before it on its stream, and on its channel if it shares one. Without
        streams everything runs one after the other."""
        index = len(self.tasks)
        lines = (STREAMS[lane], channel) if channel else (STREAMS[lane],)
        before = (self._last[line] for line in lines if line in self._last)
        every = (*after, *before) if self._times.overlaps else tuple(range(index)[-1:])
        self.tasks.append(Task(lane, work, unit, module, phase, alone_s, every))
        self._last |= dict.fromkeys(lines, index)
        return index


def _simulate_round(plan: Plan, times: StepTimes, ahead: Ahead, all_reduce: bool) -> MicroBatchTimeline:
    """A micro batch from second 0."""
    tasks = launch_tasks(plan, times, ahead, [all_reduce])
    spans = run_tasks(tasks, times.slowdown)
    events = [
        _event(task, task.lane, task.work, span.start_s, span.end_s)
        for task, span in zip(tasks, spans, strict=True)
    ]
    for wait in find_waits(tasks, spans):
        task = tasks[wait.task]
        events.append(_event(task, EXPOSED, task.lane, wait.start_s, wait.end_s))
    events = [event for event in events if event.end_s > event.start_s]
    return MicroBatchTimeline(
        0.0, max(span.end_s for span in spans), tuple(sorted(events, key=lambda event: event.start_s))
    )


def _event(task: Task, lane: str, work: str, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(lane, work, task.unit, task.module, task.phase, 0, start_s, end_s)


def _optimizer(seconds: float) -> MicroBatchTimeline:
    event = TimelineEvent(COMPUTE, "optimizer", "", "", "optimizer", 0, 0.0, seconds)
    return MicroBatchTimeline(0.0, seconds, (event,) if seconds else ())


def _join(parts: Sequence[tuple[MicroBatchTimeline, int]]) -> Timeline:
    """Rounds one after the other, each as often as said."""
    rounds, step_s, compute_s = list[MicroBatchTimeline](), 0.0, 0.0
    by_lane = defaultdict[str, float](float)
    for part, count in parts:
        for _ in range(count):
            rounds.append(replace(part, start_s=step_s))
            step_s += part.seconds
        for event in part.events:
            if event.lane == COMPUTE:
                compute_s += count * event.seconds
            elif event.lane in (EXPOSED, "tp"):
                by_lane[event.work] += count * event.seconds
    return Timeline(tuple(rounds), step_s, compute_s, sum(by_lane.values()), dict(by_lane))
