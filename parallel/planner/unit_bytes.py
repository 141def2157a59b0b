"""The sizes on one rank of what an FSDP unit stores, gathers and reduces; and what needs no walk through a
step: host memory, and bounds of device memory."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from meshwright.parallel.memory_breakdown import round_up
from meshwright.parallel.plan.schema import Plan, UnitPlan, sums_whole_gradients
from meshwright.parallel.planner.cost_model import gathered_bytes, sent_blocks, trained_parameters
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload, ModuleWorkload


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
        reduced, reduce_bytes = sum(map(self.trained_values, unit.modules)), DTYPE_BYTES[unit.reduce_dtype]
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


def whole_gradient_bytes(plan: Plan, work: ModelWorkload) -> int:
    """Return the bytes of the whole gradients that a rank keeps from one micro batch to the next."""
    return sum(
        int(trained_parameters(unit.modules, work)) * DTYPE_BYTES[unit.reduce_dtype]
        for unit in plan.units
        if sums_whole_gradients(unit, plan)
    )


def least_bytes(plan: Plan, work: ModelWorkload) -> int:
    """Return a quick lower bound of a rank's peak in bytes: its shards of parameters and moments, if they are
    on the device, and the saved activations that stay there."""
    parameters = sum(work.modules[name].parameters for name in plan.modules) // plan.mesh.shards
    trained = trained_parameters(plan.modules, work) / plan.mesh.shards
    sent = sent_blocks(plan, work)
    kept = sum(
        work.modules[name].saved_bytes.at(plan.micro_batch_size)
        for name in plan.modules
        if work.has_backward((name,)) and name not in sent
    )
    stored = DTYPE_BYTES[plan.storage_dtype] * parameters + 2 * work.moment_bytes * trained
    return int((0 if plan.cpu_offload else stored) + kept)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one rank in host memory.

    Args:
        activations: saved tensors of blocks with `activation_checkpoint: offload`
        state: parameters, gradients and moments with `cpu_offload`
        copies: of parameters and moments, for saves; none with `cpu_offload`, where training waits instead
    """

    activations: int = 0
    state: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.activations + self.state + self.copies


def host_memory(plan: Plan, work: ModelWorkload) -> HostMemory:
    """Return the host memory of a rank beside a device's. What is pinned counts in powers of two, as torch
    allocates it, except activations, whose tensors are not known one by one."""
    sent = sum(work.modules[name].saved_bytes.at(plan.micro_batch_size) for name in sent_blocks(plan, work))
    if not (plan.cpu_offload or work.saves):
        return HostMemory(int(sent))
    shards = [
        (values, work.trained.get(name, 1.0))
        for name in plan.modules
        for values in shard_values(work.modules[name], plan.mesh.shards)
    ]
    stored, moment = DTYPE_BYTES[plan.storage_dtype], work.moment_bytes
    parameters = sum(round_up(stored * values) for values, _ in shards)
    if plan.cpu_offload:  # moments are not pinned
        gradients_and_moments = sum(
            trained * (round_up(stored * values) + 2 * moment * values) for values, trained in shards
        )
        return HostMemory(int(sent), state=int(parameters + gradients_and_moments))
    moments = sum(trained * 2 * round_up(moment * values) for values, trained in shards)
    return HostMemory(int(sent), copies=int((parameters + moments) / plan.mesh.dp_replicate))
