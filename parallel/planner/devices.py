"""The devices of a run, and whether a plan fits into their memory and that of their hosts."""

from dataclasses import dataclass

from meshwright.parallel.memory_breakdown import GIB, PredictedMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.memory_model import reserved_bytes


@dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Args:
        available_bytes: of each process
        gpus_per_node: processes that share a node
        hardware: the kind of device; None if no file in configs/hardware describes it
        host_bytes: host memory for each process, beside the device's; None: not limited
    """

    available_bytes: int
    gpus_per_node: int
    hardware: Hardware | None = None
    host_bytes: int | None = None

    @property
    def kind(self) -> Hardware:
        """The kind of device, which the planner needs."""
        assert self.hardware is not None, "the planner needs a hardware description"
        return self.hardware

    def needed_bytes(self, memory: PredictedMemory) -> int:
        """Return the bytes that a process needs, with those of allocator and process if the hardware is
        known."""
        return reserved_bytes(memory, self.hardware) if self.hardware else memory.peak_bytes

    def fits(self, needed_bytes: int, host_bytes: int) -> bool:
        """Whether a process that needs so much memory of its device and of its host has it."""
        on_host = self.host_bytes is None or host_bytes <= self.host_bytes
        return needed_bytes <= self.available_bytes and on_host

    def host_problem(self, plan: Plan, host_bytes: int) -> str:
        """Say what of a plan needs more host memory than there is, and what to do; "" if it is enough."""
        if self.host_bytes is None or host_bytes <= self.host_bytes:
            return ""
        ways_out = {}
        if any(unit.activation_checkpoint == "offload" for unit in plan.units):
            ways_out["parallel.activation_checkpoint=offload"] = (
                "offload fewer blocks (parallel.activation_checkpoint_blocks), or use full"
            )
        if plan.cpu_offload:
            ways_out["parallel.cpu_offload=true"] = (
                "shard over more processes, or set parallel.cpu_offload=false"
            )
        return (
            f"{' and '.join(ways_out)}: the plan needs {host_bytes / GIB:.1f} GiB of host memory per process, but "
            f"{self.host_bytes / GIB:.1f} GiB are available for each: {'; '.join(ways_out.values())}"
        )
