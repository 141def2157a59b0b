"""Operations, copies and collectives in seconds: a roofline, rings that know which of their members share a
node, and how long each part of a step takes alone.

What activation_checkpoint offload sends to host memory: which blocks, how much, and how long a copy takes.
How it is done is in parallel/activation_offload.py; what it does to memory on the device is in
memory_model.py, and to a step in fsdp_schedule.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd

from meshwright.parallel.plan.schema import MeshPlan, Plan, UnitPlan, regathered
from meshwright.parallel.planner.hardware import Hardware, share_at
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload, ModuleWorkload, Operation, Phase


@dataclass(frozen=True)
class UnitTimes:
    """Seconds that the collectives of one FSDP unit take alone: its all-gather in the forward and in the
    backward (which can be over a smaller group), the copies out of the gathered buffer and into the reduced
    one, the reduce-scatter, and the all-reduce over dp_replicate. 0 where there is none."""

    gather_s: float
    regather_s: float
    copy_out_s: float
    copy_in_s: float
    scatter_s: float
    all_reduce_s: float


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of one module's forward and backward for one micro batch: computing (recomputation included),
    and the tensor-parallel collectives in between, which nothing hides."""

    forward_s: float
    forward_tp_s: float
    backward_s: float
    backward_tp_s: float

    def forward_only(self) -> "ModuleTimes":
        """The same where the backward ends before it."""
        return ModuleTimes(self.forward_s, self.forward_tp_s, 0.0, 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Everything that takes time in a step, by name of unit and module, of one rank. `optimizer_s`: norm and
    update. `overlaps` and `slowdown`: as in Hardware. `host_s`: of `offload.copy_times`."""

    units: Mapping[str, UnitTimes]
    modules: Mapping[str, ModuleTimes]
    optimizer_s: float
    overlaps: bool
    slowdown: float
    host_s: Mapping[str, float] = field(default_factory=dict)

    def busy_s(self, micro_batches: int) -> float:
        """Seconds of a step that waits for no gather and no reduction, and for host memory as little as can
        be: what is sent is sent before the forward ends, and fetched before the backward does."""
        copying = sum(self.host_s.values())
        forward = sum(m.forward_s + m.forward_tp_s for m in self.modules.values())
        backward = sum(m.backward_s + m.backward_tp_s for m in self.modules.values())
        return micro_batches * (max(forward, copying) + max(backward, copying)) + self.optimizer_s


FLOAT32_ATTENTION = "efficient"  # the one fused kernel of GPUs that takes float32, so the best one there
# Both estimates, not measured. A product's operands are about two thirds of the bytes that it moves; casting
# one to float8 writes half of them, mostly in the kernel that made it, for about two products each, and
# sometimes reads them again.
FLOAT8_CASTING = 0.25
# Every collective of the forward, and half of the backward's, stands beside a product that it can be cut up
# with.
ASYNC_TP_HIDDEN = 0.5


@dataclass(frozen=True)
class Group:
    """The ranks of one collective.

    Args:
        size: members
        per_node: members in each node
        sharing: groups that send at the same time through one node's network
    """

    size: int
    per_node: int
    sharing: int

    @property
    def nodes(self) -> int:
        return self.size // self.per_node


def axis_groups(mesh: MeshPlan, gpus_per_node: int) -> dict[str, Group]:
    """The groups of each axis; ranks are numbered with tp innermost, and nodes filled in that order."""
    gpus = min(gpus_per_node, mesh.world_size)
    strides = {"tp": 1, "dp_shard": mesh.tp, "dp_replicate": mesh.tp * mesh.dp_shard}
    return {
        axis: strided_group(getattr(mesh, axis), stride, gpus, mesh.world_size)
        for axis, stride in strides.items()
    }


def strided_group(size: int, stride: int, gpus: int, world_size: int) -> Group:
    """The group of `size` ranks of all, each `stride` after the one before, on nodes of `gpus`. Ranks that do
    not fill nodes evenly are taken to lie in more of them, evenly."""
    per_node = gcd(size, max(gpus // stride, 1))
    return Group(size, per_node, max(1, min(gpus // per_node, world_size // size)))


def operation_s(operation: Operation, micro_batch_size: int, hardware: Hardware) -> float:
    """Seconds of a product, of attention, or of an operation bound by memory: the slower of computing and
    moving."""
    flops, moved = operation.flops.at(micro_batch_size), operation.bytes.at(micro_batch_size)
    return max(_computing_s(operation, flops, hardware), traffic_s(moved, hardware)) + hardware.operation_s


def traffic_s(moved_bytes: float, hardware: Hardware) -> float:
    """Seconds of reading and writing so many bytes of the device's memory."""
    return moved_bytes / (hardware.memory_gb_s * 1e9 * hardware.memory_efficiency)


def collective_s(name: str, full_bytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds of an all_gather, reduce_scatter or all_reduce whose full side is `full_bytes`.

    A ring sends (n - 1) / n of the full side over every link, in n - 1 hops, an all-reduce twice that
    (Patarasuk and Yuan, 2009). The slowest link decides: NVLink, or the network, which the groups of a node
    share. Latencies add up as in NCCL's own model (src/graph/tuning.cc).
    """
    if group.size == 1 or not full_bytes:
        return 0.0
    rounds = 2 if name == "all_reduce" else 1
    sent = rounds * full_bytes * (group.size - 1) / group.size
    node, network = hardware.node, hardware.network
    seconds = []
    if group.per_node > 1:
        seconds.append(sent / (node.gb_s * 1e9 * share_at(node.efficiency[name], group.per_node)))
    if group.nodes > 1:
        seconds.append(
            sent * group.sharing / (network.gb_s * 1e9 * share_at(network.efficiency[name], group.nodes))
        )
    hops_s = (group.nodes - 1) * network.latency_s + (group.size - group.nodes) * node.latency_s
    return max(seconds) + rounds * hops_s


def step_times(plan: Plan, work: ModelWorkload, hardware: Hardware, gpus_per_node: int) -> StepTimes:
    """What a step's parts take, each alone. Of `cpu_offload` it knows nothing."""
    groups = axis_groups(plan.mesh, gpus_per_node)
    device = with_kernel(sharing_cores(hardware, min(gpus_per_node, plan.mesh.world_size)), plan.attention)
    hidden = ASYNC_TP_HIDDEN if plan.async_tp else 0.0
    times: dict[int, ModuleTimes] = {}  # blocks are one and the same work: each is looked at once
    keys = {name: id(work.modules[name]) for name in plan.modules}
    for name, key in keys.items():
        if key not in times:
            times[key] = _module_times(
                work.modules[name], plan.micro_batch_size, device, groups["tp"], hidden
            )
    modules = {
        name: times[key] if work.has_backward((name,)) else times[key].forward_only()
        for name, key in keys.items()
    }
    units: dict[tuple[object, ...], UnitTimes] = {}  # units alike are looked at once too
    kinds = {unit.name: _unit_kind(unit, work) for unit in plan.units}
    for unit in plan.units:
        if kinds[unit.name] not in units:
            units[kinds[unit.name]] = _unit_times(unit, plan, work, device, groups, gpus_per_node)
    return StepTimes(
        units={name: units[kind] for name, kind in kinds.items()},
        modules=modules,
        optimizer_s=_optimizer_s(plan, work, device),
        overlaps=hardware.overlaps,
        slowdown=hardware.slowdown,
        host_s=copy_times(plan, work, device),
    )


def sharing_cores(hardware: Hardware, processes: int) -> Hardware:
    """The device that each of a node's processes has: all of it, or of a CPU its share of the cores."""
    if not hardware.cores:
        return hardware
    share = hardware.cores / processes
    peaks = {dtype: peak * share for dtype, peak in hardware.peak_tflops.items()}
    return replace(
        hardware,
        peak_tflops=peaks,
        memory_gb_s=hardware.memory_gb_s * share,
        operation_s=hardware.operation_s * max(1.0, 1 / share),
    )


def with_kernel(hardware: Hardware, attention: str) -> Hardware:
    """The device with the attention rates of a kernel; of one it does not know, those of its best. A device's
    rates of float32 are those of the best kernel that takes it."""
    share = hardware.attention_kernels.get(attention, 1.0)
    shares = {"float32": 1.0} if attention == FLOAT32_ATTENTION else {}
    forward, backward = (
        {dtype: rate * shares.get(dtype, share) for dtype, rate in rates.items()}
        for rates in (hardware.attention_forward, hardware.attention_backward)
    )
    return replace(hardware, attention_forward=forward, attention_backward=backward)


def _computing_s(operation: Operation, flops: float, hardware: Hardware) -> float:
    if not flops:
        return 0.0
    if operation.kind == "matmul":
        share = share_at(hardware.matmul[operation.dtype], flops / 1e9)
    else:
        shares = hardware.attention_backward if "backward" in operation.name else hardware.attention_forward
        share = shares[operation.dtype]
    return flops / (hardware.peak_tflops[operation.dtype] * 1e12 * share)


def _module_times(
    module: ModuleWorkload, micro_batch_size: int, hardware: Hardware, tp: Group, hidden: float
) -> ModuleTimes:
    phases = (module.forward, module.backward)
    computing = [_phase_s(phase, micro_batch_size, hardware, module.float8_share) for phase in phases]
    sending = [_collectives_s(phase, micro_batch_size, hardware, tp) * (1 - hidden) for phase in phases]
    return ModuleTimes(computing[0], sending[0], computing[1], sending[1])


def _phase_s(phase: Phase, micro_batch_size: int, hardware: Hardware, float8_share: float) -> float:
    """Seconds of computing, with a share of the products in float8."""
    seconds = 0.0
    for operation in phase.operations:
        if operation.kind == "collective":
            continue
        share = float8_share if operation.kind == "matmul" else 0.0
        if share:
            cast_s = traffic_s(FLOAT8_CASTING * operation.bytes.at(micro_batch_size), hardware)
            dtype = "float8" if "float8" in hardware.matmul else operation.dtype  # emulated
            seconds += share * (
                operation_s(replace(operation, dtype=dtype), micro_batch_size, hardware) + cast_s
            )
        seconds += (1 - share) * operation_s(operation, micro_batch_size, hardware)
    return seconds


def _collectives_s(phase: Phase, micro_batch_size: int, hardware: Hardware, tp: Group) -> float:
    """Seconds of the tensor-parallel collectives."""
    return sum(
        collective_s(operation.name, operation.bytes.at(micro_batch_size), tp, hardware)
        for operation in phase.operations
        if operation.kind == "collective"
    )


def _unit_kind(unit: UnitPlan, work: ModelWorkload) -> tuple[object, ...]:
    """What decides how long a unit's collectives take."""
    modules = ((id(work.modules[name]), work.trained.get(name, 1.0)) for name in unit.modules)
    return (
        *modules,
        unit.param_dtype,
        unit.reduce_dtype,
        type(unit.reshard_after_forward),
        unit.reshard_after_forward,
        work.has_backward(unit.modules),
    )


def _unit_times(
    unit: UnitPlan,
    plan: Plan,
    work: ModelWorkload,
    hardware: Hardware,
    groups: Mapping[str, Group],
    gpus_per_node: int,
) -> UnitTimes:
    """A unit's collectives and copies. A rank casts its shard to param_dtype and gathers the whole unit into
    one buffer, which is copied out into the weights; gradients are copied, and cast, into another, which is
    scattered."""
    shard, replicate = groups["dp_shard"], groups["dp_replicate"]
    parameters = sum(work.modules[name].parameters for name in unit.modules)
    trained = trained_parameters(unit.modules, work)
    narrower = sum(work.modules[name].float8 for name in unit.modules) * plan.float8.all_gather
    held = parameters * DTYPE_BYTES[unit.param_dtype] - narrower * (DTYPE_BYTES[unit.param_dtype] - 1)
    sent = trained * DTYPE_BYTES[unit.reduce_dtype]
    cast_s = traffic_s((parameters * DTYPE_BYTES[plan.storage_dtype] + held) / shard.size, hardware)
    size = unit.reshard_after_forward
    again = regathered(unit) and work.has_backward(unit.modules)
    regroup = (
        shard
        if type(size) is not int
        else strided_group(size, plan.mesh.tp, min(gpus_per_node, plan.mesh.world_size), plan.mesh.world_size)
    )
    alone = shard.size == 1
    regather_s = collective_s("all_gather", held, regroup, hardware) + (
        cast_s if regroup == shard and not alone else 0.0
    )
    return UnitTimes(
        gather_s=0.0 if alone else collective_s("all_gather", held, shard, hardware) + cast_s,
        regather_s=regather_s if again else 0.0,
        copy_out_s=traffic_s(2 * held, hardware) + (cast_s if alone else 0.0),
        copy_in_s=traffic_s(trained * DTYPE_BYTES[unit.param_dtype] + sent, hardware),
        scatter_s=collective_s("reduce_scatter", sent, shard, hardware),
        all_reduce_s=collective_s("all_reduce", sent / shard.size, replicate, hardware),
    )


def _optimizer_s(plan: Plan, work: ModelWorkload, hardware: Hardware) -> float:
    trained = sum(trained_parameters(unit.modules, work) for unit in plan.units)
    return traffic_s(
        trained / plan.mesh.dp_shard * optimizer_bytes(DTYPE_BYTES[plan.storage_dtype], work.moment_bytes),
        hardware,
    )


def optimizer_bytes(stored_bytes: int, moment_bytes: int) -> int:
    """Bytes moved for a parameter in a step's end, where it and its gradient have `stored_bytes`, each moment
    `moment_bytes`.

    The norm reads the gradient. AdamW reads parameter, gradient and two moments, and writes all but the
    gradient; torch's fused one, for float32 alone, writes the clipped gradient too
    (aten/src/ATen/native/cuda/fused_adam_utils.cuh).
    """
    clipped = stored_bytes if stored_bytes == moment_bytes == 4 else 0
    return stored_bytes + 3 * stored_bytes + 4 * moment_bytes + clipped


def trained_parameters(modules: Iterable[str], work: ModelWorkload) -> float:
    """Parameters of these modules, on one tp rank, that are trained."""
    return sum(work.modules[name].parameters * work.trained.get(name, 1.0) for name in modules)


def sent_blocks(plan: Plan, work: ModelWorkload) -> dict[str, str]:
    """Each block whose activations are sent -> the next block with offload. The last one's are needed first:
    they stay."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    names = (
        name
        for name in plan.modules
        if unit_of[name].activation_checkpoint == "offload" and work.has_backward((name,))
    )
    return dict(pairwise(names))


def host_bytes(plan: Plan, work: ModelWorkload) -> int:
    """What a rank keeps in host memory: activations, and what `cpu_offload` does. Pinned memory comes in
    powers of two, which is not counted."""
    sent = sum(work.modules[name].saved_bytes.at(plan.micro_batch_size) for name in sent_blocks(plan, work))
    return int(sent) + (stored_bytes(plan, work) if plan.cpu_offload else 0)


def stored_bytes(plan: Plan, work: ModelWorkload) -> int:
    """A rank's shards of parameters, gradients and moments, as if every weight could be divided evenly."""
    parameters = sum(work.modules[name].parameters for name in plan.modules)
    trained = trained_parameters(plan.modules, work)
    values = DTYPE_BYTES[plan.storage_dtype] * (parameters + trained) + 2 * work.moment_bytes * trained
    return int(values / plan.mesh.dp_shard)


def copy_times(plan: Plan, work: ModelWorkload, hardware: Hardware) -> Mapping[str, float]:
    """Seconds of one copy of what each block with offload sends, in the order of the forward; 0 for the last
    one's, which stay. No copy's latency matters beside its bytes."""
    sent = sent_blocks(plan, work)
    if not sent:
        return {}
    seconds = {
        name: work.modules[name].saved_bytes.at(plan.micro_batch_size) / (hardware.host_gb_s * 1e9)
        for name in sent
    }
    return seconds | {next(reversed(sent.values())): 0.0}
