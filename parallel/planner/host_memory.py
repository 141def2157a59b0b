"""The host memory of a rank: of offloaded activations, of the state that `cpu_offload` moves, and of copies
of the state that checkpoints are written from."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.parallel.memory_breakdown import round_up
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import sent_blocks
from meshwright.parallel.planner.unit_bytes import shard_values
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload


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
    stored, moment = DTYPE_BYTES[plan.storage_dtype], work.moment_bytes
    if plan.cpu_offload:  # moments are not pinned
        parameters, trained = _shards(plan, work, lambda values: round_up(stored * values))
        moments = _shards(plan, work, lambda values: 2 * moment * values)[1]
        return HostMemory(int(sent), state=int(parameters + trained + moments))
    parameters, _ = _shards(plan, work, lambda values: round_up(stored * values))
    moments = _shards(plan, work, lambda values: 2 * round_up(moment * values))[1]
    return HostMemory(int(sent), copies=int((parameters + moments) / plan.mesh.dp_replicate))


def _shards(plan: Plan, work: ModelWorkload, size_bytes: Callable[[int], int]) -> tuple[float, float]:
    """Return the bytes of a rank's shards of all and of trained weights, given those of so many values."""
    sizes = dict[int, int]()  # by identity of the workload, which all blocks share
    in_total = trained = 0.0
    for name in plan.modules:
        module = work.modules[name]
        if id(module) not in sizes:
            sizes[id(module)] = sum(map(size_bytes, shard_values(module, plan.mesh.shards)))
        in_total += sizes[id(module)]
        trained += sizes[id(module)] * work.trained.get(name, 1.0)
    return in_total, trained
