"""The memory model: the memory of one rank at every moment of a step, from the modules' workload and FSDP2's
buffers, without running the plan.

FSDP2's rules are those of torch/distributed/fsdp/_fully_shard (2.11 to 2.13): a unit is all-gathered into a
buffer and copied out of it; in the forward the buffer lives until the next unit's all-gather has been waited
for, in the backward it is freed immediately; an unsharded gradient is copied into a buffer in reduce_dtype,
which lives until the next unit's gradient is reduced.
"""

from collections.abc import Iterator
from math import prod
from operator import attrgetter

from meshwright.parallel.memory_breakdown import GIB, MemoryBreakdown, StepMemory
from meshwright.parallel.plan.schema import Plan, UnitPlan, prefetch_schedule, regathered
from meshwright.parallel.planner.cost_model import sent_blocks, trained_parameters
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.workload import DTYPE_BYTES, Linear, ModelWorkload, total


def predict_step_memory(plan: Plan, work: ModelWorkload) -> StepMemory:
    """Return a step's memory under AdamW: parameters and gradients in the plan's storage_dtype and two
    moments, all with the same sharding. Allocator overhead and host memory of `cpu_offload` are not
    included."""
    moments = list(_MemoryTimeline(plan, work).moments())
    most = {kind: max(map(attrgetter(kind), moments)) for kind in MemoryBreakdown.__annotations__}
    return StepMemory(MemoryBreakdown(**most), max(moments, key=attrgetter("total")))


class _MemoryTimeline:
    """A walk through a step; with gradient accumulation through the last micro batch, when all gradients
    exist."""

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
        self._shares: dict[int, int] = {}
        self._position = {name: position for position, name in enumerate(plan.modules)}
        # block -> the previous offloaded block
        self._previous_offloaded = {after: name for name, after in sent_blocks(plan, work).items()}
        self._stored_bytes = DTYPE_BYTES[plan.storage_dtype]
        trained = sum(map(self._trained_share, plan.modules))
        self._params = sum(map(self._share, plan.modules)) * self._stored_bytes
        self._moments = 2 * trained * work.moment_bytes
        self._grads = sum(map(self._accumulated, plan.units))

    def moments(self) -> Iterator[MemoryBreakdown]:
        """Yield the memory at every moment that can be the peak in total or of one kind."""
        for name in self._plan.modules:
            yield from self._forward(name)
        self._copied_out = 0
        for name in reversed(self._plan.modules):
            if self._work.has_backward((name,)):
                yield from self._backward(name)
        self._reducing, self._all_reduced, self._passing = 0, 0, Linear()
        yield self._moment()  # the optimizer's

    def _forward(self, name: str) -> Iterator[MemoryBreakdown]:
        """Yield the moments of a module's forward."""
        unit, module = self._unit_of[name], self._work.modules[name]
        if name in self._first:
            yield from self._gather(unit, "forward")
        for live in module.forward.live_bytes:
            yield self._moment(name, live)
        self._passing = module.output
        if self._work.has_backward((name,)):
            self._add_saved(module.saved_bytes)
        if name in self._previous_offloaded:
            self._add_saved(self._work.modules[self._previous_offloaded[name]].saved_bytes.times(-1))
        if name in self._last and regathered(unit):
            del self._gathered[unit.name]
            if type(reshard := unit.reshard_after_forward) is int:
                self._gathered[f"{unit.name}, kept"] = self._gathered_bytes(unit) // reshard

    def _backward(self, name: str) -> Iterator[MemoryBreakdown]:
        """Yield the moments of a module's backward, and of its unit's reduction."""
        unit, module = self._unit_of[name], self._work.modules[name]
        if name in self._last:
            yield from self._gather(unit, "backward")
        if name in self._previous_offloaded:
            self._add_saved(self._work.modules[self._previous_offloaded[name]].saved_bytes)
        self._add_saved(module.saved_bytes.times(-1))
        for live in module.backward.live_bytes:
            yield self._moment(name, live)
        self._passing = self._input(name)
        trained = self._trained(name) * DTYPE_BYTES[unit.param_dtype]
        self._full_grads[unit.name] = self._full_grads.get(unit.name, 0) + trained
        if name in self._first_backward:
            del self._gathered[unit.name]
            yield from self._reduce(unit)

    def _add_saved(self, more: Linear) -> None:
        """Add to the saved activations on the device. A block's offloaded activations stay there until the
        end of the next block's forward, and are back when the next block's backward begins."""
        self._saved = total((self._saved, more))

    def _gather(self, unit: UnitPlan, phase: str) -> Iterator[MemoryBreakdown]:
        """Yield the moments of a unit's all-gather unless it is gathered: its buffer is filled, copied out,
        then kept (forward) or freed (backward). Then start the prefetched all-gathers."""
        if unit.name not in self._gathered:
            self._in_flight.setdefault(unit.name, self._buffer(unit))
            yield self._moment()
            self._copied_out = 0
            self._gathered[unit.name] = self._gathered_bytes(unit)
            self._gathered.pop(f"{unit.name}, kept", None)
            yield self._moment()
            buffer = self._in_flight.pop(unit.name)
            self._copied_out = buffer if phase == "forward" else 0
        for ahead in self._ahead[phase][unit.name]:
            if ahead.name not in self._gathered:
                self._in_flight.setdefault(ahead.name, self._buffer(ahead))

    def _reduce(self, unit: UnitPlan) -> Iterator[MemoryBreakdown]:
        """Yield the moments of a unit's reduction: the unsharded gradient and the buffer that it is copied
        into, which lives until the next reduction; then the result in reduce_dtype and in storage_dtype, and
        the gradient of the last weight, which torch's loop still holds."""
        shards, reduce_bytes = self._plan.mesh.dp_shard, DTYPE_BYTES[unit.reduce_dtype]
        reduced = sum(map(self._trained_share, unit.modules))
        self._reducing = reduced * shards * reduce_bytes
        yield self._moment()
        full = self._full_grads.pop(unit.name)
        cast = reduced * self._stored_bytes if reduce_bytes != self._stored_bytes else 0
        if shards == 1:  # no reduce-scatter: the division copies the buffer, and the result is copied again
            yield self._moment(copies=self._reducing + max(self._reducing, cast))
        else:
            weights = self._work.modules[unit.modules[-1]].weights
            last = prod(weights[-1]) * DTYPE_BYTES[unit.param_dtype] if weights else 0
            yield self._moment(copies=min(last, full) + reduced * reduce_bytes + cast)
        self._grads += reduced * self._stored_bytes - self._accumulated(unit)
        if cast and self._plan.mesh.dp_replicate > 1:
            self._all_reduced += reduced * reduce_bytes
        yield self._moment()

    def _accumulated(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's gradient from the micro batches before the last: in storage_dtype, or
        in reduce_dtype if an all-reduce over replicas is still to come."""
        kept = DTYPE_BYTES[unit.reduce_dtype] if self._plan.mesh.dp_replicate > 1 else self._stored_bytes
        return sum(map(self._trained_share, unit.modules)) * kept if self._plan.accumulation > 1 else 0

    def _moment(self, name: str = "", live: Linear | None = None, copies: int = 0) -> MemoryBreakdown:
        """Return the memory now.

        Args:
            name, live: the running module and its live bytes; without them those between two modules
            copies: bytes of buffers that exist only at this moment
        """
        sequences = self._plan.micro_batch_size
        activations = int(total((self._saved, live or self._passing)).at(sequences)) - int(
            (live or self._passing).fixed
        )
        reductions = self._reducing + self._all_reduced + sum(self._full_grads.values())
        logits = 0
        if live and name == self._work.logits:
            logits = max(0, int(live.per_sequence - self._input(name).per_sequence) * sequences)
        on_device = not self._plan.cpu_offload
        return MemoryBreakdown(
            params=self._params * on_device,
            grads=self._grads * on_device,
            optimizer=self._moments * on_device,
            unsharded=sum(self._gathered.values()) + sum(self._in_flight.values()) + self._copied_out,
            activations=activations - logits,
            logits=logits,
            buffers=self._work.tables + copies + reductions + int(live.fixed if live else 0),
        )

    def _input(self, name: str) -> Linear:
        """Return the bytes of a module's input, the output of the previous module."""
        position = self._position[name]
        return self._work.modules[self._plan.modules[position - 1]].output if position else Linear()

    def _trained(self, name: str) -> int:
        """Return the number of trained parameters of a module."""
        return round(self._work.modules[name].parameters * self._work.trained.get(name, 1.0))

    def _share(self, name: str) -> int:
        """Return the number of a module's parameters on one rank: its rows of each weight, with padding."""
        module, shards = self._work.modules[name], self._plan.mesh.dp_shard
        if id(module) not in self._shares:  # all blocks share one workload
            weights = module.weights or ((module.parameters, 1),)
            self._shares[id(module)] = sum(-(-rows // shards) * values for rows, values in weights)
        return self._shares[id(module)]

    def _trained_share(self, name: str) -> int:
        """Return the number of a module's gradient values on one rank."""
        return round(self._share(name) * self._work.trained.get(name, 1.0))

    def _gathered_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's gathered parameters."""
        narrower = (
            sum(self._work.modules[name].float8 for name in unit.modules) * self._plan.float8.all_gather
        )
        parameters = sum(map(self._share, unit.modules)) * self._plan.mesh.dp_shard
        return parameters * DTYPE_BYTES[unit.param_dtype] - narrower * (DTYPE_BYTES[unit.param_dtype] - 1)

    def _buffer(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's all-gather buffer; 0 with dp_shard=1."""
        return self._gathered_bytes(unit) if self._plan.mesh.dp_shard > 1 else 0


def reserved_bytes(memory: StepMemory, hardware: Hardware) -> int:
    """Return the peak plus the memory that the allocator reserves beyond it and the process itself uses."""
    return round(memory.peak_bytes * (1 + hardware.reserved_share) + hardware.reserved_gib * GIB)


def usable_bytes(device_bytes: int, hardware: Hardware) -> int:
    """Return the highest peak that fits into `device_bytes`: the inverse of `reserved_bytes`."""
    return int((device_bytes - hardware.reserved_gib * GIB) / (1 + hardware.reserved_share))


def least_bytes(plan: Plan, work: ModelWorkload) -> int:
    """Return a quick lower bound of a rank's peak in bytes: its shards of parameters and moments, if they are
    on the device, and the saved activations that stay there."""
    parameters = sum(work.modules[name].parameters for name in plan.modules) // plan.mesh.dp_shard
    trained = trained_parameters(plan.modules, work) / plan.mesh.dp_shard
    sent = sent_blocks(plan, work)
    kept = sum(
        work.modules[name].saved_bytes.at(plan.micro_batch_size)
        for name in plan.modules
        if work.has_backward((name,)) and name not in sent
    )
    stored = DTYPE_BYTES[plan.storage_dtype] * parameters + 2 * work.moment_bytes * trained
    return int((0 if plan.cpu_offload else stored) + kept)
