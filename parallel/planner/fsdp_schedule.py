"""A discrete-event simulation of a training step on the streams of one GPU: the all-gathers, compute and
reductions of each FSDP unit, and the exposed waits."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.parallel.plan.schema import (
    MicroBatch,
    Plan,
    UnitPlan,
    keeps_parameters,
    micro_batch_kinds,
    prefetch_schedule,
    sums_whole_gradients,
)
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.stream_simulator import (
    COMPUTE,
    HOST,
    OFFLOAD,
    STREAMS,
    Span,
    Task,
    find_waits,
    run_tasks,
)
from meshwright.parallel.planner.timeline import (
    EXPOSED,
    HOST_BOUND,
    MicroBatchTimeline,
    Timeline,
    TimelineEvent,
)

# (unit name, phase) -> units whose all-gathers it prefetches
Ahead = Mapping[tuple[str, str], Sequence[UnitPlan]]
SHARD_CHANNEL = "dp_shard"  # the communicator that all-gathers and reduce-scatters share


def simulate_step(plan: Plan, times: StepTimes) -> Timeline:
    """Simulate one optimizer step of one rank under FSDP2 (its rules are in `_FsdpLaunchOrder`)."""
    rounds = [(round_.timeline(), count) for round_, count in _simulate_rounds(plan, times)]
    return _join([*rounds, (_optimizer(times), 1)])


def step_seconds(plan: Plan, times: StepTimes) -> float:
    """Return the seconds of a simulated step, without its timeline."""
    seconds = sum(round_.seconds * count for round_, count in _simulate_rounds(plan, times))
    return seconds + times.scalars_s + times.optimizer_s


def _simulate_rounds(plan: Plan, times: StepTimes) -> Iterator[tuple["_Round", int]]:
    """Yield one micro batch of each kind, and its count.

    At the end of every backward FSDP2 waits for all collectives in flight, and the next forward's first
    all-gather starts after that. Micro batches therefore share nothing but the parameters that stay gathered,
    and one of each kind is simulated.
    """
    ahead, kept = start_ahead(plan), frozenset[str]()
    simulated: dict[tuple[MicroBatch, frozenset[str]], _Round] = {}
    for micro_batch, count in micro_batch_kinds(plan):
        key = _same_tasks(micro_batch, plan, times), kept
        if key not in simulated:
            simulated[key] = _simulate_round(plan, times, ahead, *key)
        kept = simulated[key].kept
        yield simulated[key], count


def _same_tasks(micro_batch: MicroBatch, plan: Plan, times: StepTimes) -> MicroBatch:
    """Return a micro batch with the same tasks; one for all micro batches if every one does the same."""
    if any(sums_whole_gradients(unit, plan) for unit in plan.units):
        return micro_batch
    replicated = any(unit.all_reduce_s for unit in times.units.values())
    kept = any(keeps_parameters(unit, plan) for unit in plan.units)
    return MicroBatch(first=False, last=micro_batch.last if replicated or kept else True)


def start_ahead(plan: Plan) -> Ahead:
    """Return the prefetch schedule of both phases."""
    schedules = {phase: prefetch_schedule(plan, phase) for phase in ("forward", "backward")}
    return {(name, phase): units for phase, schedule in schedules.items() for name, units in schedule.items()}


class _FsdpLaunchOrder:
    """The tasks of a step in the order in which the CPU launches them, from the hooks of FSDP2 in torch 2.13
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py).

    - The host launches in this order and runs ahead of the device: FSDP2's hooks of a unit, then the module's
      kernels or graph. A task starts after its launch (`_launch`).
    - All-gather: `_unshard`, `_copy_out`. Reduction: `_reduce`. End of a backward: `_finish`.
    - All-gathers and reduce-scatters over dp_shard share one NCCL communicator, which runs them one at a time
      in launch order, whatever their streams (see FSDPModule.set_separate_reduce_scatter_group, which is not
      used). Without backward prefetching, a unit is therefore gathered only after the previous unit's
      reduction.
    - Copies to host memory: `_send`; from host memory: `_fetch` (parallel/activation_offload.py).
    - A unit's parameters are freed after its backward, so the next micro batch gathers them again, unless the
      plan keeps them; then they are freed after the backward of the last one.
    """

    def __init__(self, plan: Plan, times: StepTimes, ahead: Ahead, kept: frozenset[str]) -> None:
        """`kept`: units that are gathered before the first micro batch to launch."""
        self.tasks: list[Task] = []
        self._plan, self._times = plan, times
        self._owner = {module: unit for unit in plan.units for module in unit.modules}
        self._modules: dict[str, list[str]] = {}  # by unit, in the order of the forward
        for module in plan.modules:
            self._modules.setdefault(self._owner[module].name, []).append(module)
        self._ahead = ahead
        # block -> the previous offloaded block
        self._previous_offloaded = {after: name for name, after in pairwise(times.offload_s)}
        self._copies: dict[str, int] = {}  # block -> its latest copy to or from host memory
        self._last: dict[str, int] = {}  # stream, or SHARD_CHANNEL -> its latest task
        self._waits: list[int] = []  # tasks that the next task on the compute stream waits for
        self._gather_after: list[int] = []  # tasks that the all-gather stream waits for
        self._deferred: int | None = None  # forward: the copy-out to wait for one unit later
        # unit whose all-gather has started -> its task, if it takes time
        self._in_flight: dict[str, int | None] = {}
        self._gathered: set[str] = set(kept)
        self._resharded: set[str] = set()  # after their forward
        self._scatter: int | None = None  # the latest reduce-scatter, which still holds its input buffer
        self._launched: tuple[int, ...] = ()  # the host's latest work

    def launch_forward(self) -> None:
        """Launch all modules in order: gather each unit before its first module, reshard after its last."""
        for module in self._plan.modules:
            unit = self._owner[module]
            modules = self._modules[unit.name]
            if module == modules[0]:
                self._gather(unit, "forward")
            self._compute(module, "forward")
            self._send(module)
            if module == modules[-1] and unit.reshard_after_forward is not False:
                self._gathered.discard(unit.name)
                self._resharded.add(unit.name)
        self._release_deferred()

    @property
    def kept(self) -> frozenset[str]:
        """The units that are gathered now."""
        return frozenset(self._gathered)

    def launch_backward(self, micro_batch: MicroBatch) -> None:
        """Launch all modules in reverse order: gather each unit before its last module, sum or reduce its
        gradients after its first module, and wait at the end."""
        for module in reversed(self._plan.modules):
            unit = self._owner[module]
            modules = self._modules[unit.name]
            if module == modules[-1]:
                self._gather(unit, "backward")
            self._fetch(module)
            self._compute(module, "backward")
            if module == modules[0]:
                self._end_backward(unit, micro_batch)
        self._finish(micro_batch)

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        """Before the unit's compute: start its all-gather unless it was prefetched, wait, copy out, and
        prefetch the next units."""
        self._launch(unit.name, "", phase, self._times.hook_s)
        self._unshard(unit, phase)
        self._copy_out(unit, phase)
        for prefetched in self._ahead[unit.name, phase]:
            self._unshard(prefetched, phase)

    def _unshard(self, unit: UnitPlan, phase: str) -> None:
        """Start the all-gather unless the unit is gathered, being gathered, or not needed by the backward.

        On the compute stream the all-gather stream waits only for copies out of its buffers, which it would
        otherwise overwrite.
        """
        if unit.name in self._in_flight or unit.name in self._gathered:
            return
        if phase == "backward" and not unit.unshard_in_backward:
            return
        again = unit.name in self._resharded
        unit_times = self._times.units[unit.name]
        alone_s = unit_times.regather_s if again else unit_times.gather_s
        self._in_flight[unit.name] = None
        if alone_s:
            size = unit.reshard_after_forward
            smaller_group = again and type(size) is int and size != self._plan.mesh.shards
            self._in_flight[unit.name] = self._collective(
                "all_gather", unit, phase, alone_s, self._gather_after, "" if smaller_group else SHARD_CHANNEL
            )
            self._gather_after = []

    def _copy_out(self, unit: UnitPlan, phase: str) -> None:
        """Wait for the unit's all-gather and copy out of its buffer, on the compute stream. Later all-gathers
        wait for this copy in the backward; in the forward, which has two buffers, they wait only for the copy
        of the previous unit."""
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

    def _end_backward(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """After the unit's backward: add its gradients to the sums of whole gradients, if the plan has them,
        free its parameters, and reduce its gradients or, in the last micro batch, the sums."""
        unit_times, copy_in_s = self._times.units[unit.name], self._times.units[unit.name].copy_in_s
        self._launch(unit.name, "", "backward", self._times.hook_s)
        if sums := sums_whole_gradients(unit, self._plan):
            sum_s = unit_times.first_sum_s if micro_batch.first else unit_times.sum_s
            self._on_compute("sum", unit.name, "", "backward", sum_s)
            copy_in_s = unit_times.sums_copy_in_s
        if micro_batch.last or not self._keeps(unit):
            self._gathered.discard(unit.name)
        if micro_batch.last or not sums:
            self._reduce(unit, copy_in_s, micro_batch.last)

    def _keeps(self, unit: UnitPlan) -> bool:
        """Whether the unit stays gathered until the next micro batch. Without a backward only a forward that
        does not reshard it keeps it."""
        has_backward = any(self._times.modules[name].backward_s for name in unit.modules)
        return keeps_parameters(unit, self._plan) and (has_backward or unit.reshard_after_forward is False)

    def _reduce(self, unit: UnitPlan, copy_in_s: float, all_reduce: bool) -> None:
        """Wait for the previous reduce-scatter (there is one input buffer), copy into that buffer on the
        compute stream, reduce-scatter, and all-reduce on a separate stream and communicator."""
        unit_times = self._times.units[unit.name]
        if self._scatter is not None:
            self._waits.append(self._scatter)
            self._scatter = None
        reduced = self._on_compute("copy_in", unit.name, "", "backward", copy_in_s)
        if unit_times.scatter_s:
            reduced = self._collective(
                "reduce_scatter", unit, "backward", unit_times.scatter_s, [reduced], SHARD_CHANNEL
            )
            self._scatter = reduced
        if unit_times.all_reduce_s and all_reduce:
            self._collective("all_reduce", unit, "backward", unit_times.all_reduce_s, [reduced])

    def _send(self, module: str) -> None:
        """After a block's forward: wait for the previous block's copy to host memory, which frees its device
        memory, and start this block's copy."""
        if module in self._previous_offloaded:
            self._waits.append(self._copies[self._previous_offloaded[module]])
        if self._times.offload_s.get(module):
            self._copy(module, "send", "forward")

    def _fetch(self, module: str) -> None:
        """Before a block's backward: wait for the copy of its activations from host memory, and start the
        copy for the block whose backward is next."""
        if self._times.offload_s.get(module):
            self._waits.append(self._copies[module])
        if module in self._previous_offloaded:
            self._copy(self._previous_offloaded[module], "fetch", "backward")

    def _copy(self, module: str, work: str, phase: str) -> None:
        """Launch a copy after all compute launched so far."""
        after = [*self._waits, self._last[COMPUTE]]
        unit, alone_s = self._owner[module].name, self._times.offload_s[module]
        self._copies[module] = self._add(OFFLOAD, work, unit, module, phase, alone_s, after)

    def _finish(self, micro_batch: MicroBatch) -> None:
        """End a backward: the compute stream waits for all streams, and the next forward's all-gathers wait
        for the compute stream."""
        self._waits += self._last.values()
        self._gather_after = [self._on_compute("", "", "", "backward", 0.0)]
        if micro_batch.last:
            self._gathered = set()
        self._in_flight, self._resharded, self._scatter = {}, set(), None

    def _compute(self, module: str, phase: str) -> None:
        unit, module_times = self._owner[module].name, self._times.modules[module]
        forward = phase == "forward"
        host_s = module_times.forward_host_s if forward else module_times.backward_host_s
        self._launch(unit, module, phase, host_s)
        self._on_compute(
            phase, unit, module, phase, module_times.forward_s if forward else module_times.backward_s
        )
        for axis, seconds in module_times.exposed_s(phase).items():
            self._on_compute(axis, unit, module, phase, seconds, lane=axis)

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


@dataclass(frozen=True)
class _Round:
    """A simulated micro batch, from second 0: its tasks, their spans, and the units gathered at its end."""

    tasks: Sequence[Task]
    spans: Sequence[Span]
    kept: frozenset[str]

    @property
    def seconds(self) -> float:
        """The duration."""
        return max(span.end_s for span in self.spans)

    def timeline(self) -> MicroBatchTimeline:
        """Return its events and waits."""
        events = [
            _event(task, task.lane, task.work, span.start_s, span.end_s)
            for task, span in zip(self.tasks, self.spans, strict=True)
        ]
        for wait in find_waits(self.tasks, self.spans):
            task = self.tasks[wait.task]
            lane = HOST_BOUND if task.lane == HOST else EXPOSED
            events.append(_event(task, lane, task.lane, wait.start_s, wait.end_s))
        events = [event for event in events if event.end_s > event.start_s]
        return MicroBatchTimeline(0.0, self.seconds, tuple(sorted(events, key=lambda event: event.start_s)))


def _simulate_round(
    plan: Plan, times: StepTimes, ahead: Ahead, micro_batch: MicroBatch, kept: frozenset[str]
) -> _Round:
    """Simulate one micro batch. `kept`: the units that are gathered at its begin."""
    launches = _FsdpLaunchOrder(plan, times, ahead, kept)
    launches.launch_forward()
    launches.launch_backward(micro_batch)
    return _Round(launches.tasks, run_tasks(launches.tasks, times.slowdown), launches.kept)


def _event(task: Task, lane: str, work: str, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(lane, work, task.unit, task.module, task.phase, 0, start_s, end_s)


def _optimizer(times: StepTimes) -> MicroBatchTimeline:
    """Return the optimizer step, after the all-reduces of single numbers, which nothing hides."""
    scalars_s, end_s = times.scalars_s, times.scalars_s + times.optimizer_s
    events = (
        TimelineEvent("all_reduce", "all_reduce", "", "", "optimizer", 0, 0.0, scalars_s),
        TimelineEvent(EXPOSED, "all_reduce", "", "", "optimizer", 0, 0.0, scalars_s),
        TimelineEvent(COMPUTE, "optimizer", "", "", "optimizer", 0, scalars_s, end_s),
    )
    return MicroBatchTimeline(0.0, end_s, tuple(event for event in events if event.end_s > event.start_s))


def _join(parts: Sequence[tuple[MicroBatchTimeline, int]]) -> Timeline:
    """Join rounds, each repeated by its count, and sum up their compute, exposed and host-bound time."""
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
            elif event.lane in (EXPOSED, "tp", "cp"):
                by_lane[event.work] += count * event.seconds
    return Timeline(tuple(rounds), step_s, compute_s, sum(by_lane.values()), dict(by_lane), host_s)
