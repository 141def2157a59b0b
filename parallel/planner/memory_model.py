"""The memory model: the memory of one rank at every moment of a step, from the modules' workload and FSDP2's
buffers, without running the plan; and the memory that the allocator reserves for it.

FSDP2's rules are those of torch/distributed/fsdp/_fully_shard (2.11 to 2.13): a unit is all-gathered into a
buffer and copied out of it; in the forward the buffer lives until the next unit's all-gather has been waited
for, in the backward it is freed immediately; an unsharded gradient is copied into a buffer in reduce_dtype,
which lives until the next unit's gradient is reduced.

Inputs and outputs of all-gathers are allocated on FSDP2's copy-in stream, reduced gradients on its
reduce-scatter stream, and casts of gradients that were summed over replicas on its all-reduce stream; all
other tensors on the compute stream.
"""

from math import prod
from operator import attrgetter

from meshwright.parallel.memory_breakdown import GIB, MemoryBreakdown, PredictedMemory
from meshwright.parallel.plan.schema import (
    MicroBatch,
    Plan,
    UnitPlan,
    keeps_parameters,
    micro_batch_kinds,
    prefetch_schedule,
    sums_whole_gradients,
)
from meshwright.parallel.planner.allocator import KEPT, AllocationLog
from meshwright.parallel.planner.cost_model import sent_blocks
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.module_tensors import PASSING, ModuleTensors, repeated_blocks
from meshwright.parallel.planner.unit_bytes import UnitBytes
from meshwright.parallel.planner.workload import DTYPE_BYTES, Linear, ModelWorkload, total

# cuBLAS's workspace on Hopper, one for each thread that multiplies (aten/src/ATen/cuda/CUDABlas.cpp)
WORKSPACE_BYTES = 32 * 2**20
REDUCTION, COPIED_OUT, SUMS = "reduction", "copied out", "sums over replicas"  # groups of tensors


def predict_step_memory(plan: Plan, work: ModelWorkload) -> PredictedMemory:
    """Return a step's memory under AdamW: parameters and gradients in the plan's storage_dtype and two
    moments, all with the same sharding. Host memory of `cpu_offload` is not included."""
    timeline = _MemoryTimeline(plan, work)
    moments = timeline.run()
    most = {kind: max(map(attrgetter(kind), moments)) for kind in MemoryBreakdown.__annotations__}
    return PredictedMemory(
        MemoryBreakdown(**most), max(moments, key=attrgetter("total")), timeline.log.reserved_bytes()
    )


class _MemoryTimeline:
    """A walk through a step: through its last micro batch, when all gradients exist; if whole gradients or
    gathered parameters are kept between micro batches, through one of each kind."""

    def __init__(self, plan: Plan, work: ModelWorkload) -> None:
        self._plan, self._work = plan, work
        self._unit_of = {module: unit for unit in plan.units for module in unit.modules}
        self._ahead = {phase: prefetch_schedule(plan, phase) for phase in ("forward", "backward")}
        in_order = [sorted(unit.modules, key=plan.modules.index) for unit in plan.units]
        self._first, self._last = {modules[0] for modules in in_order}, {modules[-1] for modules in in_order}
        self._first_backward = {
            next((name for name in modules if work.has_backward((name,))), "") for modules in in_order
        }
        # Bytes by unit: gathered parameters, buffers of all-gathers in flight, unsharded gradients.
        self._gathered: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self._full_grads: dict[str, int] = {}
        self._copied_out = 0  # bytes of the previous all-gather's buffer, which the forward keeps
        self._reducing = 0  # bytes of the latest reduction's buffer
        # bytes of sums over replicas that need a cast: they live until the end of the backward
        self._all_reduced = 0
        self._saved = Linear()  # activations saved for the backward
        self._passing = Linear()  # between two modules: hidden states, or their gradient
        self._position = {name: position for position, name in enumerate(plan.modules)}
        # block -> the previous offloaded block
        self._previous_offloaded = {after: name for name, after in sent_blocks(plan, work).items()}
        self._bytes = UnitBytes(plan, work)
        trained = sum(map(self._bytes.trained_values, plan.modules))
        self._params = sum(map(self._bytes.values, plan.modules)) * self._bytes.stored
        self._optimizer = 2 * trained * work.moment_bytes
        kept = any(sums_whole_gradients(unit, plan) or keeps_parameters(unit, plan) for unit in plan.units)
        kinds = [kind for kind, _ in micro_batch_kinds(plan)]
        self._micro_batches = kinds if kept else kinds[-1:]
        # Bytes of the sums of earlier micro batches, by unit: of this rank's shard, or whole.
        begun = not self._micro_batches[0].first
        self._shard_grads = {unit.name: begun * self._bytes.accumulated(unit) for unit in plan.units}
        self._whole_grads = dict.fromkeys(self._shard_grads, 0)
        self._moments: list[MemoryBreakdown] = []
        self.log = AllocationLog()
        self._tensors = ModuleTensors(self.log, work, plan.micro_batch_size)
        self._repeated = repeated_blocks(plan, work)  # their tensors are logged in total
        self._log_state()

    def run(self) -> list[MemoryBreakdown]:
        """Return the memory at every moment that can be the peak in total or of one kind."""
        for micro_batch in self._micro_batches:
            self._micro_batch(micro_batch)
        self._note_moment()  # the optimizer's
        return self._moments

    def _micro_batch(self, micro_batch: MicroBatch) -> None:
        """Note the moments of a forward and its backward."""
        for name in self._plan.modules:
            self.log.muted = name in self._repeated
            self._forward(name)
            if self.log.muted:
                self._log_repeated_forward(name)
        self._copied_out = 0
        self.log.drop(COPIED_OUT, PASSING)
        for name in reversed(self._plan.modules):
            if self._work.has_backward((name,)):
                self.log.muted = name in self._repeated
                self._backward(name, micro_batch)
                if self.log.muted:
                    self._log_repeated_backward(name, micro_batch)
        self._reducing, self._all_reduced, self._passing = 0, 0, Linear()
        self.log.drop(REDUCTION, SUMS, PASSING)
        self._end_prefetched(micro_batch)

    def _end_prefetched(self, micro_batch: MicroBatch) -> None:
        """Free what FSDP2 frees at the end of a backward: prefetched all-gathers that no backward has used,
        and parameters of units without a backward."""
        for name in self._in_flight:
            self.log.drop((name, "buffer"))
        self._in_flight.clear()
        for unit in self._plan.units:
            if not self._work.has_backward(unit.modules) and not (
                keeps_parameters(unit, self._plan) and not micro_batch.last
            ):
                for name in (unit.name, f"{unit.name}, kept"):
                    self._gathered.pop(name, None)
                self.log.drop((unit.name, "gathered"), (unit.name, "kept"))

    def _log_repeated_forward(self, name: str) -> None:
        """Log what remains after the forward of a block that repeats others: its saved activations as one
        tensor, and its weights if they stay gathered."""
        log, unit = self.log, self._unit_of[name]
        log.muted = False
        self._pass_buffer(unit, self._repeated[name])
        if previous := self._previous_offloaded.get(name):
            self._tensors.release(previous)
        if self._work.has_backward((name,)) and name not in self._previous_offloaded.values():
            saved = self._work.modules[name].saved_bytes.at(self._plan.micro_batch_size)
            log.hold("compute", (name, "saved"), saved)
        for state in ("gathered", "kept"):
            gathered = self._gathered.get(unit.name if state == "gathered" else f"{unit.name}, kept", 0)
            log.drop((unit.name, state))
            log.hold("compute", (unit.name, state), gathered)

    def _log_repeated_backward(self, name: str, micro_batch: MicroBatch) -> None:
        """Log what changes by the backward of a block that repeats others."""
        log, unit = self.log, self._unit_of[name]
        log.muted = False
        self._pass_buffer(unit, -self._repeated[name])
        log.drop(*((unit.name, state) for state in ("gathered", "kept", "saved")))
        log.hold("compute", (unit.name, "gathered"), self._gathered.get(unit.name, 0))
        self._tensors.release(name)
        if (previous := self._previous_offloaded.get(name)) and previous not in self._repeated:
            self._tensors.restore(previous)
        if sums := sums_whole_gradients(unit, self._plan):
            full = self._bytes.trained_parameters(name) * DTYPE_BYTES[unit.param_dtype]
            log.hold("compute", f"{unit.name}, full gradients", full)
            self._log_sums(unit, micro_batch)
            log.drop(f"{unit.name}, full gradients")  # the sums too, if they are reduced
        if micro_batch.last or not sums:
            self._log_reduction(unit, micro_batch)

    def _pass_buffer(self, unit: UnitPlan, distance: int) -> None:
        """Let the unit at a distance have a unit's all-gather buffer, if the unit before has allocated it."""
        position = self._position[unit.name] + distance  # of blocks, whose units have one module
        if 0 <= position < len(self._plan.modules):
            self.log.move((unit.name, "buffer"), (self._plan.modules[position], "buffer"))

    def _log_state(self) -> None:
        """Log the tensors that exist before the last micro batch."""
        log = self.log
        log.hold("compute", KEPT, self._work.tables)
        if not self._plan.cpu_offload:
            log.hold("compute", KEPT, self._params, self._optimizer)
            for unit in reversed(self._plan.units):
                log.hold("reduce_scatter", (unit.name, "sharded gradients"), self._shard_grads[unit.name])

    def _forward(self, name: str) -> None:
        """Note the moments of a module's forward."""
        unit, module = self._unit_of[name], self._work.modules[name]
        if name in self._first:
            self._gather(unit, "forward")
        for live in module.forward.live_bytes:
            self._note_moment(name, live)
        if name in self._plan.modules[1:2]:
            self.log.hold("compute", KEPT, WORKSPACE_BYTES)
        self._tensors.forward(name)
        self._passing = module.output
        if self._work.has_backward((name,)):
            self._add_saved(module.saved_bytes)
        if previous := self._previous_offloaded.get(name):
            self._add_saved(self._work.modules[previous].saved_bytes.times(-1))
            self._tensors.release(previous)
        if name in self._last and unit.reshard_after_forward is not False:
            if type(reshard := unit.reshard_after_forward) is int:  # copied weight by weight
                kept = [size // reshard for size in self._by_weight(unit, self._bytes.gathered(unit))]
                self._gathered[f"{unit.name}, kept"] = kept[0]
                self._note_moment()
                self._gathered[f"{unit.name}, kept"] = sum(kept)
                self.log.hold("compute", (unit.name, "kept"), *kept)
            self._gathered.pop(unit.name)
            self.log.drop((unit.name, "gathered"))

    def _backward(self, name: str, micro_batch: MicroBatch) -> None:
        """Note the moments of a module's backward, and of the end of its unit's."""
        unit, module = self._unit_of[name], self._work.modules[name]
        if name in self._last:
            self._gather(unit, "backward")
        if previous := self._previous_offloaded.get(name):
            self._add_saved(self._work.modules[previous].saved_bytes)
            self._tensors.restore(previous)
        self._add_saved(module.saved_bytes.times(-1))
        # Autograd adds the gradients of a tied weight into a third tensor, unless inductor made the first.
        tied = not module.parameters and not unit.compiled
        added = int(max((live.fixed for live in module.backward.live_bytes), default=0)) if tied else 0
        for live in module.backward.live_bytes:
            self._note_moment(name, live, copies=added)
        if name in self._plan.modules[-2:-1]:
            self.log.hold("compute", KEPT, WORKSPACE_BYTES)
        self.log.hold("compute", (name, "sum"), added)
        self._tensors.backward(name, f"{unit.name}, full gradients")
        self.log.drop((name, "sum"))
        self._passing = self._input(name)
        trained = self._bytes.trained_parameters(name) * DTYPE_BYTES[unit.param_dtype]
        self._full_grads[unit.name] = self._full_grads.get(unit.name, 0) + trained
        if name in self._first_backward:
            self._end_backward(unit, micro_batch)

    def _end_backward(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Note the moments of the end of a unit's backward: free its gathered parameters unless they are
        kept, and sum or reduce its gradients."""
        sums = sums_whole_gradients(unit, self._plan)
        if sums and not micro_batch.first:
            self._sum(unit, micro_batch)
        self._gathered.pop(f"{unit.name}, kept", None)
        self.log.drop((unit.name, "kept"))
        if micro_batch.last or not keeps_parameters(unit, self._plan):
            self._gathered.pop(unit.name, None)
            self.log.drop((unit.name, "gathered"))
        if sums and micro_batch.first:
            self._sum(unit, micro_batch)
        if micro_batch.last or not sums:
            self._reduce(unit, micro_batch)

    def _sum(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Note the moment in which a unit's full gradients become, or are added to, its sums in
        reduce_dtype; a cast holds the last weight's gradient in both dtypes."""
        full = self._full_grads.pop(unit.name)
        if micro_batch.first:
            self._whole_grads[unit.name] = (
                full // DTYPE_BYTES[unit.param_dtype] * DTYPE_BYTES[unit.reduce_dtype]
            )
            casts = unit.param_dtype != unit.reduce_dtype
            last = self._bytes.last_weight(unit) * DTYPE_BYTES[unit.param_dtype]
            self._note_moment(copies=min(last, full) if casts else 0)
        else:
            self._note_moment(copies=full)
        self._log_sums(unit, micro_batch)

    def _log_sums(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Log the sums of a unit's whole gradients, which the first micro batch casts one weight at a time
        and the last one reduces."""
        log, sums, full = self.log, (unit.name, "whole gradients"), f"{unit.name}, full gradients"
        if micro_batch.first and unit.param_dtype == unit.reduce_dtype:
            log.move(full, sums)
        elif micro_batch.first:
            log.hold("compute", sums, *self._by_weight(unit, self._whole_grads[unit.name]))
        log.drop(full)
        if micro_batch.last:
            log.move(sums, full)

    def _add_saved(self, more: Linear) -> None:
        """Add to the saved activations on the device. A block's offloaded activations stay there until the
        end of the next block's forward, and are back when the next block's backward begins."""
        self._saved = total((self._saved, more))

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        """Note the moments of a unit's all-gather unless it is gathered or not needed by the backward: its
        buffer is filled, copied out, then kept (forward) or freed. Then start the prefetched ones."""
        if unit.name not in self._gathered and (phase == "forward" or unit.unshard_in_backward):
            self._start_gather(unit)
            self._note_moment()
            self._copied_out = 0
            self._gathered[unit.name] = self._bytes.gathered(unit)
            self._gathered.pop(f"{unit.name}, kept", None)
            self._log_copy_out(unit)
            self._note_moment()
            buffer = self._in_flight.pop(unit.name)
            self._copied_out = buffer if phase == "forward" else 0
            if phase == "backward":
                self.log.drop(COPIED_OUT)
        for ahead in self._ahead[phase][unit.name]:
            if ahead.name not in self._gathered:
                self._start_gather(ahead)

    def _start_gather(self, unit: UnitPlan) -> None:
        """Start a unit's all-gather unless in flight: allocate its shard in param_dtype, and the buffer."""
        if unit.name in self._in_flight:
            return
        self._in_flight[unit.name] = buffer = self._bytes.buffer(unit)
        log, shard = self.log, buffer // self._plan.mesh.shards
        if self._plan.cpu_offload:
            stored = sum(map(self._bytes.values, unit.modules)) * self._bytes.stored
            log.hold("all_gather", (unit.name, "shard"), stored if buffer else 0)
        if DTYPE_BYTES[unit.param_dtype] != self._bytes.stored:
            log.hold("all_gather", (unit.name, "shard"), shard)
        log.hold("all_gather", (unit.name, "buffer"), buffer)
        log.drop((unit.name, "shard"))

    def _log_copy_out(self, unit: UnitPlan) -> None:
        """Log the allocation of a unit's gathered weights. A rank without others to gather from casts its
        weights one by one instead."""
        log, casts = self.log, DTYPE_BYTES[unit.param_dtype] != self._bytes.stored
        if log.muted:
            return
        log.drop(COPIED_OUT, (unit.name, "kept"))
        for size in self._by_weight(unit, self._bytes.gathered(unit)):
            if casts and self._plan.mesh.shards == 1:
                log.hold("compute", (unit.name, "cast"), size)
            log.hold("compute", (unit.name, "gathered"), size)
            log.drop((unit.name, "cast"))
        log.move((unit.name, "buffer"), COPIED_OUT)

    def _reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Note the moments of a unit's reduction: the unsharded gradient, or the sums, and the buffer that
        it is copied into, which lives until the next reduction; then the result in reduce_dtype and in
        storage_dtype, and the gradient of the last weight, which torch's loop still holds."""
        shards, (result, cast) = self._plan.mesh.shards, self._bytes.reduction(unit, micro_batch.last)
        self._reducing = result * shards
        self.log.drop(REDUCTION)
        self.log.hold("compute", REDUCTION, self._reducing)
        self._note_moment()
        if sums := sums_whole_gradients(unit, self._plan):
            full, dtype = self._whole_grads[unit.name], unit.reduce_dtype
            self._whole_grads[unit.name] = 0
        else:
            full, dtype = self._full_grads.pop(unit.name), unit.param_dtype
        self.log.drop(f"{unit.name}, full gradients")
        self._log_reduction(unit, micro_batch)
        if shards == 1:  # no reduce-scatter: the division copies the buffer, and the result is copied again
            self._note_moment(copies=self._reducing + max(self._reducing, cast))
        else:
            last = min(full, self._bytes.last_weight(unit) * DTYPE_BYTES[dtype])
            self._whole_grads[unit.name] = last if sums else 0
            self._note_moment(copies=result + cast + (0 if sums else last))
            self._whole_grads[unit.name] = 0
        trained = sum(map(self._bytes.trained_values, unit.modules))
        self._shard_grads[unit.name] = (
            trained * self._bytes.stored if micro_batch.last else self._bytes.accumulated(unit)
        )
        if cast and self._plan.mesh.dp_replicate > 1:
            self._all_reduced += result
        self._note_moment()

    def _log_reduction(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        """Log the result of a unit's reduction, its cast to storage_dtype if there is one, and how both
        become the sharded gradients.

        Over replicas the sum of the earlier micro batches is added to the result before, and the result of a
        cast lives until the backward's end; without replicas the result is added to that sum and freed.
        """
        log, mesh, (result, cast) = self.log, self._plan.mesh, self._bytes.reduction(unit, micro_batch.last)
        reduced, gradients = (unit.name, "reduced"), (unit.name, "sharded gradients")
        added = not micro_batch.first and not sums_whole_gradients(unit, self._plan)
        log.hold("reduce_scatter", reduced, result)
        if mesh.shards == 1:  # divided
            log.hold("reduce_scatter", (unit.name, "copy"), result)
            log.drop((unit.name, "copy"))
        if mesh.dp_replicate > 1 and micro_batch.last:
            log.drop(gradients)
        if cast:
            log.hold("all_reduce" if mesh.dp_replicate > 1 else "reduce_scatter", (unit.name, "cast"), cast)
            if mesh.dp_replicate > 1:
                log.move(reduced, SUMS)
            log.drop(reduced)
            log.move((unit.name, "cast"), reduced)
        if self._plan.cpu_offload or (added and not (mesh.dp_replicate > 1 and micro_batch.last)):
            log.drop(reduced)
        log.move(reduced, gradients)

    def _note_moment(self, name: str = "", live: Linear | None = None, copies: int = 0) -> None:
        """Note the memory now, except in a block that repeats others: from each of these to the next it
        changes by the same bytes, so that it is largest next to one of the ends of their row.

        Args:
            name, live: the running module and its live bytes; without them those between two modules
            copies: bytes of buffers that exist only at this moment
        """
        if self.log.muted:
            return
        sequences = self._plan.micro_batch_size
        activations = int(total((self._saved, live or self._passing)).at(sequences)) - int(
            (live or self._passing).fixed
        )
        reductions = self._reducing + self._all_reduced + sum(self._full_grads.values())
        logits = 0
        if live and name == self._work.logits:
            logits = max(0, int(live.per_sequence - self._input(name).per_sequence) * sequences)
        on_device, whole = not self._plan.cpu_offload, sum(self._whole_grads.values())
        moment = MemoryBreakdown(
            params=self._params * on_device,
            grads=(sum(self._shard_grads.values()) + whole) * on_device,
            optimizer=self._optimizer * on_device,
            unsharded=sum(self._gathered.values()) + sum(self._in_flight.values()) + self._copied_out,
            activations=activations - logits,
            logits=logits,
            buffers=self._work.tables
            + copies
            + reductions
            + int(live.fixed if live else 0)
            + whole * (not on_device),
        )
        self._moments.append(moment)

    def _input(self, name: str) -> Linear:
        """Return the bytes of a module's input, the output of the previous module."""
        position = self._position[name]
        return self._work.modules[self._plan.modules[position - 1]].output if position else Linear()

    def _by_weight(self, unit: UnitPlan, size: int) -> list[int]:
        """Divide the bytes of a unit among its weights; of a block that repeats others, in one piece."""
        modules = [self._work.modules[name] for name in unit.modules]
        weights = [prod(weight) for module in modules for weight in module.weights] or [1]
        if unit.name in self._repeated:
            return [size]
        in_total = sum(weights)
        return [size * weight // in_total for weight in weights]


def allocator_bytes(memory: PredictedMemory, hardware: Hardware) -> int:
    """Return the memory that the allocator reserves, as torch.cuda.memory_reserved() does: its pools, or on a
    CPU the peak, and the share beyond them."""
    used = memory.peak_bytes if hardware.cores else memory.pool_bytes
    return round(used * (1 + hardware.reserved_share))


def reserved_bytes(memory: PredictedMemory, hardware: Hardware) -> int:
    """Return the memory that a process takes from the device: that of the allocator and its own."""
    return allocator_bytes(memory, hardware) + round(hardware.reserved_gib * GIB)
