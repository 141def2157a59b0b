"""The memory model: the memory of one rank at every moment of a step, from the modules' workload and FSDP2's
buffers, without running the plan; and host memory, and bounds of device memory, from sizes alone.

The walk of a step has the order in which FSDP2 gathers, frees and reduces; here is what it allocates for it
(torch/distributed/fsdp/_fully_shard, 2.11 to 2.13): a unit is all-gathered into a buffer and copied out of
it; in the forward the buffer lives until the next unit's all-gather has been waited for, in the backward it
is freed immediately; an unsharded gradient is copied into a buffer in reduce_dtype, which lives until the
next unit's gradient is reduced.

Inputs and outputs of all-gathers are allocated on FSDP2's copy-in stream, reduced gradients on its
reduce-scatter stream, and casts of gradients that were summed over replicas on its all-reduce stream; all
other tensors on the compute stream.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import NamedTuple

from meshwright.parallel.memory_breakdown import MemoryBreakdown, PredictedMemory, round_up
from meshwright.parallel.plan.schema import (
    MicroBatch,
    Plan,
    UnitPlan,
    leaves_parameters,
    micro_batch_kinds,
    prefetch_schedule,
    reduced_in,
    regathered,
    sums_whole_gradients,
)
from meshwright.parallel.planner.cost_model import gathered_bytes, muon_rounds, sent_blocks
from meshwright.parallel.planner.hardware import HostMemory
from meshwright.parallel.planner.ledger import KEPT, PASSING, Ledger, ModuleTensors
from meshwright.parallel.planner.progress import clock
from meshwright.parallel.planner.walk import StepSink, StepWalk, inner_blocks, without
from meshwright.parallel.planner.workload import DTYPE_BYTES, Linear, ModelWorkload, ModuleWorkload, total

# cuBLAS's workspace on Hopper, one for each thread that multiplies (aten/src/ATen/cuda/CUDABlas.cpp)
WORKSPACE_BYTES = 32 * 2**20
EDGE = 2  # blocks at each end of a row whose tensors are held one by one
REDUCTION, COPIED_OUT = "reduction", "copied out"  # groups of tensors; those of a unit are (name, state)
GATHERED = ("gathered", "kept")
AFTER_BACKWARD = ("saved", *GATHERED, "whole gradients", "sharded gradients", "summed over replicas")


@clock.phase("memory")
def predict_step_memory(plan: Plan, work: ModelWorkload) -> PredictedMemory:
    """Return a step's memory: parameters and gradients in the plan's storage_dtype and the optimizer's
    moments, all with the same sharding. Host memory of `cpu_offload` is not included.

    The walk is through the last micro batch, when all gradients exist; if whole gradients or gathered
    parameters are kept between micro batches, through one of each kind.
    """
    kinds = [kind for kind, _ in micro_batch_kinds(plan)]
    if not kinds[0].first:
        kinds = kinds[-1:]
    sink = MemorySink(plan, work, begun=not kinds[0].first)
    walk = StepWalk(sink.plan, sink, work.has_backward)
    for micro_batch in kinds:
        walk.forward(micro_batch)
        walk.backward(micro_batch)
    sink.ledger.hold("compute", "rounds", *round_bytes(plan, work), kind="buffers")
    sink.note()  # the optimizer's moment
    most = {kind: max(map(attrgetter(kind), sink.moments)) for kind in MemoryBreakdown.__annotations__}
    return PredictedMemory(
        MemoryBreakdown(**most), max(sink.moments, key=attrgetter("total")), sink.ledger.reserved_bytes()
    )


class MemorySink(StepSink):
    """Holds every tensor of a step in a ledger while it exists, and notes the moments that can be the peak in
    total or of one kind.

    Follows the walk of `plan`, which has only the outer blocks of a row of equal ones. From each of the
    others to the next memory changes by the same bytes, so that it is largest next to an end of the row.
    """

    def __init__(self, plan: Plan, work: ModelWorkload, begun: bool) -> None:
        """`begun`: whether earlier micro batches have left sharded gradients."""
        rows = inner_blocks(plan, work.kind, EDGE)
        self.plan = without(plan, frozenset().union(*(row.blocks for row in rows)))
        self._rows = {(row.after, "forward"): row for row in rows} | {
            (row.before, "backward"): row for row in rows
        }
        self.ledger, self.moments = Ledger(), list[MemoryBreakdown]()
        self._work, self._bytes = work, UnitBytes(plan, work)
        self._tensors = ModuleTensors(self.ledger, work, plan.micro_batch_size)
        self._names = [unit.name for unit in plan.units]
        self._unit_of = {module: unit for unit in plan.units for module in unit.modules}
        self._passing = Linear()  # between two modules: hidden states, or their gradient
        # block -> the previous offloaded block
        self._previous_offloaded = {after: name for name, after in sent_blocks(self.plan, work).items()}
        self._sums_kind = "buffers" if plan.cpu_offload else "grads"  # of whole gradients
        self._hold_state(plan, begun)

    def _hold_state(self, plan: Plan, begun: bool) -> None:
        """Hold the tensors that exist before the first forward of the walk."""
        ledger = self.ledger
        parameters = sum(map(self._bytes.values, plan.modules)) * self._bytes.stored
        ledger.hold("compute", KEPT, self._work.tables, kind="buffers")
        if plan.cpu_offload:
            return
        ledger.hold("compute", KEPT, parameters, kind="params")
        ledger.hold("compute", KEPT, sum(map(self._bytes.moments, plan.modules)), kind="optimizer")
        for unit in reversed(self.plan.units if begun else ()):
            size = self._bytes.accumulated(unit)
            ledger.hold("reduce_scatter", (unit.name, "sharded gradients"), size, kind="grads")
            if row := self._rows.get((unit.name, "forward")):
                ledger.repeat(unit.name, row.blocks[::-1], ("sharded gradients",))

    def enter(self, unit: UnitPlan, phase: str) -> None:
        """Pass the blocks that are left out before a unit: each keeps what the block before has kept. Of
        offloaded activations nothing stays. Note a loss's backward, which ends before its unit's begins."""
        if phase == "backward" and (name := self._work.logits) in unit.modules:
            logits = self._work.modules[name]
            for live in logits.of_loss:
                self.note(name, total((live, logits.saved_bytes.times(-1))))
        if row := self._rows.get((unit.name, phase)):
            if phase == "backward":
                self.ledger.repeat(row.after, row.blocks[::-1], AFTER_BACKWARD)
            else:
                sent = row.before in self._previous_offloaded.values()
                states = GATHERED if sent else ("saved", *GATHERED)
                self.ledger.repeat(row.before, row.blocks, states)

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        """Hold the buffer; before that, for a moment, the shard: copied from the host, or in param_dtype."""
        ledger, buffer = self.ledger, self._bytes.buffer(unit)
        if self.plan.cpu_offload:
            stored = sum(map(self._bytes.values, unit.modules)) * self._bytes.stored
            ledger.hold("all_gather", (unit.name, "shard"), stored if buffer else 0)
        if self._casts(unit):
            ledger.hold("all_gather", (unit.name, "shard"), buffer // self.plan.mesh.shards)
        ledger.hold("all_gather", (unit.name, "buffer"), buffer, kind="unsharded")
        ledger.drop((unit.name, "shard"))

    def copy_out(self, unit: UnitPlan, phase: str) -> None:
        """Hold the gathered weights. A rank without others to gather from casts its weights one by one."""
        ledger = self.ledger
        self.note()
        ledger.drop(COPIED_OUT, (unit.name, "kept"))
        for size in self._bytes.by_weight(unit, self._bytes.gathered(unit)):
            if self._casts(unit) and self.plan.mesh.shards == 1:
                ledger.hold("compute", (unit.name, "cast"), size)
            ledger.hold("compute", (unit.name, "gathered"), size, kind="unsharded")
            ledger.drop((unit.name, "cast"))
        self.note()
        ledger.move((unit.name, "buffer"), COPIED_OUT)
        if phase == "backward":
            ledger.drop(COPIED_OUT)

    def compute(self, module: str, phase: str) -> None:
        """Note the moments of a module's forward or backward, and hold what remains of it."""
        (self._forward if phase == "forward" else self._backward)(module)

    def _forward(self, name: str) -> None:
        module = self._work.modules[name]
        for live in module.forward.live_bytes:
            self.note(name, live)
        if name in self.plan.modules[1:2]:
            self.ledger.hold("compute", KEPT, WORKSPACE_BYTES)
        self._tensors.forward(name)
        self._passing = module.output
        if self._work.has_backward((name,)):
            self._count_saved(name)
        # offloaded activations stay until the next block's forward has ended
        if previous := self._previous_offloaded.get(name):
            self.ledger.drop((previous, "saved"))
            self._tensors.release(previous)

    def _backward(self, name: str) -> None:
        unit, module, ledger = self._unit_of[name], self._work.modules[name], self.ledger
        if previous := self._previous_offloaded.get(name):  # they are back when the next block begins
            self._count_saved(previous)
            self._tensors.restore(previous)
        ledger.drop((name, "saved"))
        # Autograd adds the gradients of a tied weight into a third tensor, unless inductor made the first.
        tied = not module.parameters and not unit.compiled
        added = int(max((live.fixed for live in module.backward.live_bytes), default=0)) if tied else 0
        for live in module.backward.live_bytes:
            self.note(name, live, buffers=added)
        if name in self.plan.modules[-2:-1]:
            ledger.hold("compute", KEPT, WORKSPACE_BYTES)
        ledger.hold("compute", (name, "sum"), added)
        self._tensors.backward(name, (unit.name, "full gradients"))
        ledger.drop((name, "sum"))
        self._passing = self._tensors.given(name)
        full = self._bytes.trained_parameters(name) * DTYPE_BYTES[unit.param_dtype]
        ledger.count("buffers", (unit.name, "full gradients"), full)

    def _count_saved(self, name: str) -> None:
        saved = self._work.modules[name].saved_bytes.at(self.plan.micro_batch_size)
        self.ledger.count("activations", (name, "saved"), saved)

    def reshard(self, unit: UnitPlan, phase: str) -> None:
        """Drop the gathered weights; resharded to a smaller group, a part of each is copied before."""
        ledger, size = self.ledger, unit.reshard_after_forward
        if phase == "forward" and type(size) is int:
            for i, weight in enumerate(self._bytes.by_weight(unit, self._bytes.gathered(unit))):
                ledger.hold("compute", (unit.name, "kept"), weight // size, kind="unsharded")
                if i == 0:
                    self.note()
        elif phase == "backward":
            ledger.drop((unit.name, "kept"))
        ledger.drop((unit.name, "gathered"))

    def sum(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Let a unit's full gradients become its sums in reduce_dtype, or add them; a cast, of one weight
        at a time, holds the last weight's gradient in both dtypes."""
        ledger, full, sums = self.ledger, (unit.name, "full gradients"), (unit.name, "whole gradients")
        trained = sum(map(self._bytes.trained_parameters, unit.modules))
        if not micro_batch.first:
            self.note()
            ledger.drop(full)
        elif unit.param_dtype == reduced_in(unit, self.plan):
            ledger.move(full, sums, self._sums_kind)
            self.note()
        else:
            size = trained * DTYPE_BYTES[unit.reduce_dtype]
            ledger.hold("compute", sums, *self._bytes.by_weight(unit, size), kind=self._sums_kind)
            ledger.drop(full)
            self.note(buffers=self._bytes.last_weight(unit) * DTYPE_BYTES[unit.param_dtype])

    def reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Copy a unit's gradients, or sums, into a buffer, which lives until the next reduction, and reduce
        them, while torch's loop still holds the gradient of the last weight."""
        ledger, shards, sums = self.ledger, self.plan.mesh.shards, sums_whole_gradients(unit, self.plan)
        result, cast = self._bytes.reduction(unit, micro_batch.last)
        ledger.drop(REDUCTION)
        ledger.hold("compute", REDUCTION, result * shards, kind="buffers")
        self.note()
        ledger.drop((unit.name, "whole gradients" if sums else "full gradients"))
        ledger.hold("reduce_scatter", (unit.name, "reduced"), result, kind="buffers")
        if shards == 1:  # no reduce-scatter: the buffer is copied, over replicas by a division by one first
            divided = result if self.plan.mesh.dp_replicate > 1 else 0
            ledger.hold("reduce_scatter", (unit.name, "copy"), divided)
            ledger.drop((unit.name, "copy"))
            self.note(buffers=max(divided, cast))
        else:
            dtype, kind = (unit.reduce_dtype, self._sums_kind) if sums else (unit.param_dtype, "buffers")
            ledger.count(kind, (unit.name, "last weight"), self._bytes.last_weight(unit) * DTYPE_BYTES[dtype])
            self.note(buffers=cast)
            ledger.drop((unit.name, "last weight"))
        self._keep_reduced(unit, micro_batch, added=not (micro_batch.first or sums))

    def _keep_reduced(self, unit: UnitPlan, micro_batch: MicroBatch, added: bool) -> None:
        """Let the result of a unit's reduction, or its cast to storage_dtype, become its sharded gradients.

        Over replicas the sum of the earlier micro batches is added to the result before, and the result of a
        cast lives until the backward's end; without replicas the result is added to that sum and freed.
        """
        ledger, replicates = self.ledger, self.plan.mesh.dp_replicate > 1
        reduced, gradients = (unit.name, "reduced"), (unit.name, "sharded gradients")
        if replicates and micro_batch.last:
            ledger.drop(gradients)
        if cast := self._bytes.reduction(unit, micro_batch.last)[1]:
            ledger.hold(
                "all_reduce" if replicates else "reduce_scatter", (unit.name, "cast"), cast, kind="grads"
            )
            if replicates:
                ledger.move(reduced, (unit.name, "summed over replicas"))
            ledger.drop(reduced)
            ledger.move((unit.name, "cast"), reduced)
        if self.plan.cpu_offload or (added and not (replicates and micro_batch.last)):
            ledger.drop(reduced)
        ledger.move(reduced, gradients, "grads")
        self.note()

    def end(self, phase: str, micro_batch: MicroBatch) -> None:
        """Drop what a forward or a backward leaves to its end, as all-gathers that no module has used."""
        self.ledger.drop(COPIED_OUT, PASSING)
        if phase == "backward":
            self._passing = Linear()
            self.ledger.drop(REDUCTION, *((name, "summed over replicas") for name in self._names))
            self.ledger.drop(*((unit.name, "buffer") for unit in self.plan.units))

    def note(self, name: str = "", live: Linear | None = None, buffers: int = 0) -> None:
        """Note the memory now.

        Args:
            name, live: the running module and its live bytes; without them those between two modules
            buffers: bytes of buffers that exist only at this moment
        """
        sequences, counted = self.plan.micro_batch_size, self.ledger.live
        inside, logits = live or self._passing, 0
        if live and name == self._work.logits:
            given = self._tensors.given(name)
            logits = max(0, int(live.per_sequence - given.per_sequence) * sequences)
        activations = int(counted["activations"] + inside.at(sequences)) - int(inside.fixed)
        moment = MemoryBreakdown(
            params=int(counted["params"]),
            grads=int(counted["grads"]),
            optimizer=int(counted["optimizer"]),
            unsharded=int(counted["unsharded"]),
            activations=activations - logits,
            logits=logits,
            buffers=int(counted["buffers"]) + buffers + int(live.fixed if live else 0),
        )
        self.moments.append(moment)

    def _casts(self, unit: UnitPlan) -> bool:
        return DTYPE_BYTES[unit.param_dtype] != self._bytes.stored


def round_bytes(plan: Plan, work: ModelWorkload) -> list[float]:
    """Return the bytes of what a rank holds at the peak of Muon's rounds, if all were as large as the largest
    (train/optim/muon.py): its matrices, what is sent and received of the rounds before and after, and what it
    needs for updates before they are sent, for orthogonalising, or for results before they are sent."""
    ranks, replicas = plan.mesh.world_size, plan.mesh.dp_replicate
    rounds = muon_rounds(work.muon.blocks, ranks)
    if not rounds:
        return []
    size, others = DTYPE_BYTES[work.muon.dtype], len(rounds) > 1
    owned = max(each.owned_values for each in rounds) * size
    parts = max(each.values for each in rounds) * size / ranks  # that a rank gives to owners
    square = max(min(matrix) ** 2 for each in rounds for matrix in each.owned) * size
    given, results = parts + owned * (ranks > 1), (owned + parts * (ranks > 1)) * replicas
    updates = parts * replicas / size * DTYPE_BYTES[plan.storage_dtype]
    moments = (
        [owned, others * results, given, updates + parts],
        [owned, others * results, others * given, 3 * owned + 2 * square],
        [owned, results, others * given, owned + owned * replicas, others * parts * replicas],
    )
    return max(moments, key=sum)


def shard_values(module: ModuleWorkload, shards: int) -> list[int]:
    """Return the number of values of each of a module's weights on one rank: its rows, padded."""
    weights = module.weights or ((module.parameters, 1),)
    return [-(-rows // shards) * values for rows, values in weights]


class UnitBytes:
    """The sizes under one plan. Shares of a rank contain FSDP2's padding."""

    def __init__(self, plan: Plan, work: ModelWorkload) -> None:
        self._plan, self._work = plan, work
        self._values: dict[int, int] = {}  # by identity of the workload, which all blocks share
        self.stored = DTYPE_BYTES[plan.storage_dtype]  # bytes of a stored parameter, and of its gradient

    def values(self, name: str) -> int:
        """Return the number of a module's parameters on one rank."""
        module, shards = self._work.modules[name], self._plan.mesh.shards
        if id(module) not in self._values:
            self._values[id(module)] = sum(shard_values(module, shards))
        return self._values[id(module)]

    def trained_values(self, name: str) -> int:
        """Return the number of a module's gradient values on one rank."""
        return round(self.values(name) * self._work.trained.get(name, 1.0))

    def moments(self, name: str) -> float:
        """Return the bytes of a module's moments on one rank."""
        return self.trained_values(name) * self._work.moments(name) * self._work.moment_bytes

    def trained_parameters(self, name: str) -> int:
        """Return the number of a module's trained parameters before they are sharded."""
        return round(self._work.modules[name].parameters * self._work.trained.get(name, 1.0))

    def gathered(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's gathered parameters."""
        parameters = sum(map(self.values, unit.modules)) * self._plan.mesh.shards
        return gathered_bytes(parameters, unit, self._plan, self._work)

    def buffer(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's all-gather buffer; 0 if nothing shards it."""
        return self.gathered(unit) if self._plan.mesh.shards > 1 else 0

    def by_weight(self, unit: UnitPlan, size: int) -> list[int]:
        """Divide the bytes of a unit among its weights."""
        modules = [self._work.modules[name] for name in unit.modules]
        weights = [prod(weight) for module in modules for weight in module.weights] or [1]
        ends = [size * end // sum(weights) for end in accumulate(weights, initial=0)]
        return [end - begin for begin, end in pairwise(ends)]

    def last_weight(self, unit: UnitPlan) -> int:
        """Return the number of values of a unit's last weight, at most those that are trained."""
        weights = self._work.modules[unit.modules[-1]].weights
        trained = sum(map(self.trained_parameters, unit.modules))
        return min(trained, prod(weights[-1])) if weights else 0

    def reduction(self, unit: UnitPlan, last: bool) -> tuple[int, int]:
        """Return the bytes of the result of a unit's reduction, and of its cast to storage_dtype; 0 without a
        cast, as over replicas before the last micro batch."""
        reduced = sum(map(self.trained_values, unit.modules))
        reduce_bytes = DTYPE_BYTES[reduced_in(unit, self._plan)]
        casts = reduce_bytes != self.stored and (last or self._plan.mesh.dp_replicate == 1)
        return reduced * reduce_bytes, reduced * self.stored if casts else 0

    def accumulated(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's sharded gradient from the micro batches before the last: in
        storage_dtype, or in reduce_dtype if an all-reduce over replicas is still to come; 0 if it is summed
        whole."""
        if sums_whole_gradients(unit, self._plan):
            return 0
        kept = DTYPE_BYTES[unit.reduce_dtype] if self._plan.mesh.dp_replicate > 1 else self.stored
        return sum(map(self.trained_values, unit.modules)) * kept


class LeastMemory(NamedTuple):
    """Bytes of one rank at moments of the last micro batch, which its peak cannot be below: when the head
    needs the most, while the activations of all other modules are saved; in the backward of the module before
    it; and at the end of the backward, when all gradients exist. Without the buffers of all-gathers, of which
    a GPU has a pool of its own: their bytes at the moment with the most.
    """

    at_head: int
    before_head: int
    at_end: int
    gathering: int


def least_step_memory(plan: Plan, work: ModelWorkload) -> LeastMemory:
    """Return a quick lower bound of a rank's peak."""
    sizes, begun, leaves = UnitBytes(plan, work), plan.accumulation > 1, leaves_parameters(plan)
    state = gradients = summed = gathered = 0.0
    for unit in plan.units:
        count, modules, whole = work.count(unit.name), unit.modules, 0
        trained = sum(map(sizes.trained_values, modules))
        state += count * (sum(map(sizes.values, modules)) * sizes.stored + sum(map(sizes.moments, modules)))
        gradients += count * trained * sizes.stored
        if begun and sums_whole_gradients(unit, plan):
            whole = sum(map(sizes.trained_parameters, modules)) * DTYPE_BYTES[reduced_in(unit, plan)]
            summed += count * whole
        elif begun:
            summed += count * sizes.accumulated(unit)
        if unit.reshard_after_forward is False and not leaves:
            gathered += count * sizes.gathered(unit)
    if plan.cpu_offload:
        state = gradients = summed = 0.0
    sent, micro_batch_size = sent_blocks(plan, work), plan.micro_batch_size
    saved = {
        name: work.modules[name].saved_bytes.at(micro_batch_size)
        for name in plan.modules
        if name != work.logits and work.has_backward((name,))
    }
    kept = sum(size * work.count(name) for name, size in saved.items() if name not in sent)
    common = state + summed + gathered + kept
    head, last = work.modules[work.logits], next(reversed(saved), "")

    def most(moments: Iterable[Linear]) -> float:
        return max((moment.at(micro_batch_size) for moment in moments), default=0.0)

    at_head, before = most(head.forward.live_bytes + head.backward.live_bytes), 0.0
    if last:
        (unit,) = (unit for unit in plan.units if last in unit.modules)
        fetched = sum(saved[name] for name, following in sent.items() if following == last)
        before = fetched + most(work.modules[last].backward.live_bytes) - saved[last]
        if not leaves:
            before += sizes.gathered(unit) * regathered(unit)
            of_head = plan.units[-1]
            if of_head is not unit and work.has_backward(of_head.modules):  # it is reduced, and was freed
                buffer = sizes.reduction(of_head, True)[0] * plan.mesh.shards
                freed = sizes.gathered(of_head) + (0 if plan.cpu_offload else whole)
                before += buffer - freed
    ahead = prefetch_schedule(plan, "forward")
    gathering = max(sum(map(sizes.buffer, (unit, *ahead[unit.name]))) for unit in plan.units)
    buffers = 0 if leaves else gathering
    return LeastMemory(int(common + at_head), int(common + before), int(state + gradients), buffers)


def host_memory(plan: Plan, work: ModelWorkload) -> HostMemory:
    """Return the host memory of a rank beside a device's. What is pinned counts in powers of two, as torch
    allocates it, except activations, whose tensors are not known one by one."""
    sent = sum(
        work.modules[name].saved_bytes.at(plan.micro_batch_size) * work.count(name)
        for name in sent_blocks(plan, work)
    )
    if not (plan.cpu_offload or work.saves):
        return HostMemory(int(sent))
    shards = [
        (work.count(name), values, trained := work.trained.get(name, 1.0), trained * work.moments(name))
        for name in plan.modules
        for values in shard_values(work.modules[name], plan.mesh.shards)
    ]
    stored, moment = DTYPE_BYTES[plan.storage_dtype], work.moment_bytes
    parameters = sum(count * round_up(stored * values) for count, values, *_ in shards)
    if plan.cpu_offload:  # moments are not pinned
        gradients_and_moments = sum(
            count * (trained * round_up(stored * values) + held * moment * values)
            for count, values, trained, held in shards
        )
        return HostMemory(int(sent), state=int(parameters + gradients_and_moments))
    copied = parameters + sum(count * held * round_up(moment * values) for count, values, _, held in shards)
    return HostMemory(int(sent), copies=int(copied / plan.mesh.dp_replicate))
