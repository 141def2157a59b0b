"""The machines of a run, and whether a plan fits into the memory of their devices and hosts."""

from dataclasses import dataclass

from meshwright.parallel.memory_breakdown import GIB, PredictedMemory
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.memory_model import reserved_bytes
from meshwright.parallel.planner.unit_bytes import HostMemory

# by kind of host memory: the key that needs it, and what to do if there is too little
WAYS_OUT = {
    "activations": (
        "parallel.activation_checkpoint=offload",
        "offload fewer blocks (parallel.activation_checkpoint_blocks), or use full",
    ),
    "state": ("parallel.cpu_offload=true", "shard over more processes, or set parallel.cpu_offload=false"),
    "copies": (
        "checkpoint.every",
        "shard over more processes, start fewer on each node, or set checkpoint.on_error=warn",
    ),
}


@dataclass(frozen=True)
class Machines:
    """The machines of a run.

    Args:
        processes: of the run
        per_node: processes that share a node
        available_bytes: device memory of each process; 0 where no one asks
        hardware: the kind of device; None if no file in configs/hardware describes it
        host_bytes: host memory for each process, beside the device's; None: the device's is the host's, as on
            a CPU
        host_source: where `host_bytes` is from
    """

    processes: int
    per_node: int
    available_bytes: int = 0
    hardware: Hardware | None = None
    host_bytes: int | None = None
    host_source: str = "free on the node that has the least"

    @property
    def kind(self) -> Hardware:
        """The kind of device, which the planner needs."""
        assert self.hardware is not None, "the planner needs a hardware description"
        return self.hardware

    def needed_bytes(self, memory: PredictedMemory, host: HostMemory) -> int:
        """Return the device memory that a process needs: with that of allocator and process if the hardware
        is known, and with what is offloaded if the device's memory is the host's."""
        needed = reserved_bytes(memory, self.hardware) if self.hardware else memory.peak_bytes
        return needed + self.kept_bytes(host)

    def kept_bytes(self, host: HostMemory) -> int:
        """Return the bytes of the device's memory that offloading does not free, because it is the host's."""
        return host.activations + host.state if self.host_bytes is None else 0

    def fits(self, needed_bytes: int, host: HostMemory) -> bool:
        """Whether a process that needs so much memory of its device and of its host has it."""
        return needed_bytes <= self.available_bytes and not self.host_problem(host)

    def host_problem(self, host: HostMemory) -> str:
        """Say what needs more host memory than there is, and what to do; "" if there is enough."""
        if self.host_bytes is None or host.total <= self.host_bytes:
            return ""
        kinds = {kind: held for kind in WAYS_OUT if (held := getattr(host, kind))}
        needs = ", ".join(f"{WAYS_OUT[kind][0]} {held / GIB:.1f}" for kind, held in kinds.items())
        return (
            f"this plan needs {host.total / GIB:.1f} GiB of host memory per process ({needs}), but each of "
            f"the {self.per_node} on a node has {self.host_bytes / GIB:.1f} GiB ({self.host_source}): "
            + "; ".join(WAYS_OUT[kind][1] for kind in kinds)
        )


def machines_of_kind(hardware: Hardware, processes: int, per_node: int) -> Machines:
    """Return the machines that a file of configs/hardware describes. Processes on a CPU share its memory."""
    on_node = min(processes, per_node)
    available_bytes = int(hardware.memory_gib * GIB / (on_node if hardware.cores else 1))
    host_bytes = None if hardware.cores else int(hardware.host_memory_gib * GIB)
    source = f"host_memory_gib in configs/hardware/{hardware.name}.yaml"
    return Machines(processes, on_node, available_bytes, hardware, host_bytes, source)
