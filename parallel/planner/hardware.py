"""Machine kinds: one small YAML file each in configs/hardware, with a source for every number; and the
machines of a run, with whether a plan fits into the memory of their devices and hosts.

A file has the keys of `Hardware` except `name`, which is the file's name. A curve is a list of pairs, or one
number for every size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Annotated

import msgspec

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, PredictedMemory
from meshwright.parallel.structure import Amount, Natural, Positive, report, structure, wrong_keys
from meshwright.parallel.yaml_io import YamlError, load_mapping

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "hardware"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
ALL_TO_ALL = "all_to_all"  # a link may name it too
DTYPES = ("bfloat16", "float32")  # that every kind has rates for
# (size, share) pairs in ascending order of size
Curve = Annotated[tuple[tuple[Positive, Positive], ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Link:
    """The link that collectives use: between the devices of a node, or between nodes.

    Args:
        gb_s: bandwidth in one direction in 10^9 bytes per second: per device within a node, per node between
            nodes
        latency_s: seconds per hop of a ring
        efficiency: share of the bandwidth that each collective reaches (all_gather, reduce_scatter,
            all_reduce; all_to_all, if it is not listed, as all_gather): a curve over the number of ranks in a
            node (for `node`) or of nodes (for `network`)
    """

    gb_s: Positive
    latency_s: Amount
    efficiency: Mapping[str, Curve | Positive]

    def efficiency_of(self, collective: str) -> Curve | float:
        """Return the curve of a collective."""
        return self.efficiency.get(collective, self.efficiency["all_gather"])


@dataclass(frozen=True)
class HostCosts:
    """Seconds that the host takes, in Python and in torch, until a device can start its work. Each is a cost
    per call, whatever the sizes.

    Args:
        operator_s: of one eager operator
        kernel_s: of one kernel in a compiled graph
        graph_s: of one call of a compiled graph, besides its kernels
        unit_s: of FSDP2 around one all-gather or one reduction of a unit
    """

    operator_s: Amount
    kernel_s: Amount
    graph_s: Amount
    unit_s: Amount


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and the machine that contains it.

    Args:
        name: the name of its file
        device_names: names that torch reports for it
        memory_gib: memory of one device
        memory_gb_s: memory bandwidth, 10^9 bytes per second
        peak_tflops: dense matmul rate by dtype of the inputs
        matmul: share of the peak at which a product computes, besides its traffic, by dtype
        attention: the same of causal attention, forward and backward, by kernel, the best one first, and by
            dtype
        attention_head_dim: the part of this share that heads of a width reach: a curve over it
        power_limit: the device's power as a share of the power with which it reaches `matmul` and attention's
            rates; 1 without a limit
        memory_efficiency: share of the memory bandwidth that other operations of a module reach, by dtype
        copy_efficiency: the same for copies, and for the traffic of products and attention
        optimizer_efficiency: the same for AdamW
        host: costs of launching
        node, network: the links
        collectives_s: measured seconds of each collective within a node, by number of ranks, while all such
            groups of the node run it: a curve over the bytes of the unsharded tensor. Used instead of the
            formula of `node`
        host_gb_s: bandwidth of copies between device and host memory, each way, 10^9 bytes per second
        host_memory_gib: host memory available to each device; 0 if there is no separate host memory, as on a
            CPU
        overlaps: whether collectives overlap with compute (streams on a GPU) or stop it (gloo on a CPU)
        slowdown, network_slowdown: share of its speed that compute loses while a collective runs within a
            node, or between nodes
        reserved_share, reserved_gib: memory that the allocator reserves beyond its predicted pools (on a CPU
            beyond the peak), as a share of them, and fixed memory of the process, in GiB
        reached: the speed that published runs on machines of this data sheet, or of the H100's, reached, as a
            share of the one that all other keys predict, which is a bound; 1 for a machine that was measured
        cores: number of cores of a CPU, which its processes share; 0 if each process has its own device. A
            CPU's rates are those of one core while the others are equally busy: a process gets
            cores / processes of them
        correction: measured speed of this machine's own runs as a share of the predicted one; in no file
    """

    name: str
    device_names: tuple[str, ...]
    memory_gib: Positive
    memory_gb_s: Positive
    peak_tflops: Mapping[str, Positive]
    matmul: Mapping[str, Positive]
    attention: Mapping[str, Mapping[str, tuple[Positive, Positive]]]
    attention_head_dim: Curve | Positive
    power_limit: Positive
    memory_efficiency: Mapping[str, Positive]
    copy_efficiency: Positive
    optimizer_efficiency: Positive
    host: HostCosts
    node: Link
    network: Link
    collectives_s: Mapping[str, Mapping[int, Curve]]
    host_gb_s: Positive
    host_memory_gib: Amount
    overlaps: bool
    slowdown: Amount
    network_slowdown: Amount
    reserved_share: Amount
    reserved_gib: Amount
    reached: Positive
    cores: Natural
    correction: Positive

    @property
    def slower(self) -> float:
        """What a part of a step takes, as a multiple of what all keys but `reached` predict."""
        return 1 / (self.reached * self.correction)

    @property
    def is_bound(self) -> bool:
        """Whether nothing that was measured on such a machine is in it."""
        return self.reached != 1.0 and self.correction == 1.0

    @property
    def source(self) -> str:
        """Where the speeds that it predicts are from."""
        known = "measured here" if self.device_names or self.cores else "fitted to published runs"
        return "data sheet, an upper bound" if self.is_bound else known

    def attention_shares(self, kernel: str, dtype: str) -> tuple[float, float]:
        """Return the shares of a kernel in a dtype, or those of the best one if they are not listed."""
        kernels = (self.attention.get(kernel, {}), *self.attention.values())
        return next(shares[dtype] for shares in kernels if dtype in shares)


def share_at(curve: Curve | float, size: float) -> float:
    """Return the curve's share at a size: interpolated over its logarithm, constant beyond the ends."""
    if isinstance(curve, float):
        return curve
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, share), (high, next_share) in pairwise(curve):
        if size <= high:
            return share + (next_share - share) * log(size / low) / log(high / low)
    return curve[-1][1]


def seconds_at(curve: Curve, size: float) -> float:
    """Return the seconds at a size: interpolated between logarithms; in proportion to the size beyond the
    largest one, constant below the smallest."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, seconds), (high, next_s) in pairwise(curve):
        if size <= high:
            return seconds * (next_s / seconds) ** (log(size / low) / log(high / low))
    return curve[-1][1] * size / curve[-1][0]


@cache
def load_hardware() -> Mapping[str, Hardware]:
    """Return all kinds in configs/hardware by name. Raises PlanError for an invalid file."""
    try:
        return {path.stem: read_hardware(path) for path in sorted(HARDWARE_FOLDER.glob("*.yaml"))}
    except YamlError as error:
        raise PlanError(f"machine kind {error}") from None


def find_hardware(device_name: str) -> Hardware | None:
    """Return the kind whose `device_names` include torch's `device_name`, or None."""
    return next((kind for kind in load_hardware().values() if device_name in kind.device_names), None)


def read_hardware(path: Path) -> Hardware:
    """Return the kind that a file describes. Raises YamlError with all its mistakes, each with its key."""
    data = load_mapping(path)
    if "name" in data:
        raise YamlError(f"{path}: unknown key name: the name of the kind is the file's name; remove the key")
    try:
        hardware = structure(Hardware, {**data, "name": path.stem, "correction": 1.0}, str(path))
    except ValueError as error:
        raise YamlError(str(error)) from None
    if mistakes := list(_find_contradictions(hardware)):
        raise YamlError(report(str(path), mistakes))
    return hardware


def _find_contradictions(kind: Hardware) -> Iterator[str]:
    """Yield mistakes that involve several keys, and those in curves."""
    curves = {"attention_head_dim": kind.attention_head_dim}
    for place, link in (("node", kind.node), ("network", kind.network)):
        given = [name for name in link.efficiency if name != ALL_TO_ALL]
        yield from wrong_keys(given, COLLECTIVES, f"{place}.efficiency")
        curves |= {f"{place}.efficiency.{name}": curve for name, curve in link.efficiency.items()}
    curves |= {
        f"collectives_s.{name}.{ranks}": curve
        for name, by_ranks in kind.collectives_s.items()
        for ranks, curve in by_ranks.items()
    }
    for place, curve in curves.items():
        sizes = [] if isinstance(curve, float) else [size for size, _ in curve]
        if sizes != sorted(set(sizes)):
            yield f"{place}: sizes must be in ascending order: {sizes}"
    attention = {dtype for shares in kind.attention.values() for dtype in shares}
    for key, dtypes in (
        ("matmul", kind.matmul.keys()),
        ("attention", attention),
        ("memory_efficiency", kind.memory_efficiency.keys()),
    ):
        yield from (
            f"{key}.{dtype}: peak_tflops has no key {dtype}" for dtype in dtypes - kind.peak_tflops.keys()
        )
        yield from (f"{key}.{dtype} is missing" for dtype in DTYPES if dtype not in dtypes)


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


def allocator_bytes(memory: PredictedMemory, hardware: Hardware) -> int:
    """Return the memory that the allocator reserves, as torch.cuda.memory_reserved() does: its pools, or on a
    CPU the peak, and the share beyond them."""
    return _with_share(memory.peak_bytes if hardware.cores else memory.pool_bytes, hardware)


def reserved_bytes(memory: PredictedMemory, hardware: Hardware) -> int:
    """Return the memory that a process takes from the device: that of the allocator and its own."""
    return allocator_bytes(memory, hardware) + round(hardware.reserved_gib * GIB)


def _with_share(used: int, hardware: Hardware) -> int:
    return round(used * (1 + hardware.reserved_share))


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

    def least_needed_bytes(self, used: int) -> int:
        """Return the device memory that a process needs at least if its tensors take so many bytes."""
        return _with_share(used, self.kind) + round(self.kind.reserved_gib * GIB)

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
