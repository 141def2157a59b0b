"""The cost model: seconds of operations (their computation plus their traffic), of collectives (rings over
nodes and networks), and of each part of a step when it runs alone.

Also the costs of `activation_checkpoint=offload`: which blocks copy how much to host memory, and in what
time. parallel/activation_offload.py does the copies; memory_model.py has their effect on device memory,
step_time.py their effect on a step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, starmap
from math import gcd, prod
from typing import TypeVar

from meshwright.parallel.model.owners import ITERATIONS, make_rounds, newton_schulz_flops, share_out
from meshwright.parallel.plan.schema import (
    MeshPlan,
    Plan,
    UnitPlan,
    gathers_in_float8,
    reduced_in,
    regathered,
)
from meshwright.parallel.planner.hardware import ALL_TO_ALL, Hardware, HostCosts, seconds_at, share_at
from meshwright.parallel.planner.timeline import AXIS_OF_LANE
from meshwright.parallel.planner.workload import DTYPE_BYTES, Linear, ModelWorkload, ModuleWorkload, Operation


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one FSDP unit's collectives and copies, each alone; 0 if there is none.

    Args:
        gather_s: all-gather in the forward
        regather_s: all-gather in the backward, possibly over a smaller group
        copy_out_s: copy out of the all-gather's buffer
        copy_in_s: copy into the reduce-scatter's buffer
        scatter_s: reduce-scatter
        all_reduce_s: all-reduce over dp_replicate
        first_sum_s: begin the sums of whole gradients: a cast to reduce_dtype
        sum_s: add the gradients of another micro batch
        sums_copy_in_s: copy the sums into the reduce-scatter's buffer
    """

    gather_s: float
    regather_s: float
    copy_out_s: float
    copy_in_s: float
    scatter_s: float
    all_reduce_s: float
    first_sum_s: float = 0.0
    sum_s: float = 0.0
    sums_copy_in_s: float = 0.0

    def most_copied_s(self, phase: str) -> float:
        """Return the most that the compute stream copies for a unit in a phase, forward or backward."""
        reduced_s = max(self.copy_in_s, self.sum_s + self.sums_copy_in_s) if phase == "backward" else 0.0
        return self.copy_out_s + reduced_s


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one module's forward or backward for one micro batch.

    Args:
        compute_s: compute, including recompute
        tp_s, cp_s: collectives of tp and cp, which are always exposed
        host_s: the host's launches
    """

    compute_s: float = 0.0
    tp_s: float = 0.0
    cp_s: float = 0.0
    host_s: float = 0.0

    @property
    def exposed_s(self) -> dict[str, float]:
        """The seconds of the collectives by axis, without zeros."""
        return {axis: seconds for axis, seconds in (("tp", self.tp_s), ("cp", self.cp_s)) if seconds}

    @property
    def device_s(self) -> float:
        """The seconds on the compute stream."""
        return self.compute_s + self.tp_s + self.cp_s


@dataclass(frozen=True)
class ModuleTimes:
    """The times of one module; a module before the first trained one has no backward."""

    forward: PhaseTimes
    backward: PhaseTimes | None

    def of(self, phase: str) -> PhaseTimes:
        """Return the times of a phase, forward or backward; zeros if there is none."""
        return (self.forward if phase == "forward" else self.backward) or PhaseTimes()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of all parts of one rank's step.

    Args:
        units, modules: by name
        optimizer_s: gradient norm and update
        exchange_s: exchanges of Muon that its computing does not hide
        overlaps: as in `Hardware`
        slowdown: share of its speed that compute loses during a collective, by lane
        offload_s: of one copy to or from host memory, by block, from `copy_times`
        hook_s: of the host, in FSDP2's hooks around one all-gather or one reduction of a unit
        scalars_s: all-reduces of the number of tokens, the gradient norm and the loss
    """

    units: Mapping[str, UnitTimes]
    modules: Mapping[str, ModuleTimes]
    optimizer_s: float
    overlaps: bool
    slowdown: Mapping[str, float]
    offload_s: Mapping[str, float] = field(default_factory=dict)
    hook_s: float = 0.0
    scalars_s: float = 0.0
    exchange_s: float = 0.0

    def has_backward(self, modules: Iterable[str]) -> bool:
        """Return whether any of these modules has a backward."""
        return any(self.modules[name].backward for name in modules)


Seconds = TypeVar("Seconds", UnitTimes, PhaseTimes)
# Every tensor-parallel collective of the forward, and half of those of the backward, adjoin a matmul with
# which they can be pipelined in pieces.
ASYNC_TP_HIDDEN = 0.5
SCALARS = 3  # all-reduces of a step over all ranks: tokens, gradient norm, loss (train/step.py)


@dataclass(frozen=True)
class Group:
    """The ranks of one collective.

    Args:
        size: number of ranks
        per_node: number of ranks in each node
        sharing: number of groups that use one node's network at the same time
    """

    size: int
    per_node: int
    sharing: int

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.size // self.per_node


def axis_groups(mesh: MeshPlan, gpus_per_node: int) -> dict[str, Group]:
    """Return the group of each axis of collectives, of a replica, and of all ranks, "world"; that of dp_shard
    includes cp. tp is the innermost axis of the rank numbers, which fill the nodes in order."""
    gpus = min(gpus_per_node, mesh.world_size)
    groups = {
        "tp": (mesh.tp, 1),
        "cp": (mesh.cp, mesh.tp),
        "dp_shard": (mesh.shards, mesh.tp),
        "dp_replicate": (mesh.dp_replicate, mesh.tp * mesh.shards),
        "replica": (mesh.tp * mesh.shards, 1),
        "world": (mesh.world_size, 1),
    }
    return {
        axis: strided_group(size, stride, gpus, mesh.world_size) for axis, (size, stride) in groups.items()
    }


def strided_group(size: int, stride: int, gpus: int, world_size: int) -> Group:
    """Return the group of `size` ranks with a distance of `stride`, on nodes of `gpus`. Ranks that do not
    fill nodes evenly are modeled as spread evenly over more nodes."""
    per_node = gcd(size, max(gpus // stride, 1))
    return Group(size, per_node, max(1, min(gpus // per_node, world_size // size)))


def operation_s(
    operation: Operation, micro_batch_size: int, hardware: Hardware, attention: str = ""
) -> float:
    """Return the seconds of an operation: its FLOPs at their share of the peak, plus its memory traffic.
    `attention`: the kernel.

    Products and attention begin and end with traffic that nothing hides, and write what the next tile waits
    for. A power limit is one of the energy: it decides where computing alone would take longer than that.
    """
    flops, moved = operation.flops.at(micro_batch_size), operation.bytes.at(micro_batch_size)
    if not flops:
        shares = hardware.memory_efficiency
        return traffic_s(moved, hardware, shares.get(operation.dtype, shares["float32"]))
    # a device without float8 products emulates them
    dtype = operation.dtype if operation.dtype in hardware.matmul else "bfloat16"
    if operation.kind == "matmul":
        share = hardware.matmul[dtype]
    else:
        share = hardware.attention_shares(attention, dtype)["backward" in operation.name]
        share *= share_at(hardware.attention_head_dim, operation.head_dim)
    computing_s = flops / (hardware.peak_tflops[dtype] * 1e12 * share)
    return max(computing_s + copying_s(moved, hardware), computing_s / hardware.power_limit)


def traffic_s(moved_bytes: float, hardware: Hardware, efficiency: float) -> float:
    """Return the seconds to move bytes (read plus written) in device memory at a share of its bandwidth."""
    return moved_bytes / (hardware.memory_gb_s * 1e9 * efficiency)


def copying_s(moved_bytes: float, hardware: Hardware) -> float:
    """Return the seconds of plain copies, such as those into or out of FSDP2's buffers."""
    return traffic_s(moved_bytes, hardware, hardware.copy_efficiency)


def collective_s(name: str, full_bytes: float, group: Group, hardware: Hardware) -> float:
    """Return the seconds of an all_gather, reduce_scatter, all_reduce or all_to_all. `full_bytes`: of its
    unsharded tensor; of an all-to-all those that one rank has.

    A ring sends (n - 1) / n of the full tensor over every link in n - 1 hops, an all-reduce twice that
    (Patarasuk and Yuan, 2009). In an all-to-all every rank sends each of the others its part itself, so that
    the network takes the parts of all ranks of a node. The slowest link decides: NVLink, or the network,
    which the groups of a node share. Latencies add up as in NCCL's own model (src/graph/tuning.cc). What was
    measured is used as it is.
    """
    if group.size == 1 or not full_bytes:
        return 0.0
    rounds = 2 if name == "all_reduce" else 1
    sent = between = rounds * full_bytes * (group.size - 1) / group.size
    if name == ALL_TO_ALL:
        part = full_bytes / group.size
        sent, between = part * (group.per_node - 1), part * (group.size - group.per_node) * group.per_node
    node, network = hardware.node, hardware.network
    if group.nodes == 1 and (curve := hardware.collectives_s.get(name, {}).get(group.size)):
        return seconds_at(curve, full_bytes)
    seconds = []
    if group.per_node > 1:
        seconds.append(sent / (node.gb_s * 1e9 * share_at(node.efficiency_of(name), group.per_node)))
    if group.nodes > 1:
        reached = network.gb_s * 1e9 * share_at(network.efficiency_of(name), group.nodes)
        seconds.append(between * group.sharing / reached)
    hops_s = (group.nodes - 1) * network.latency_s + (group.size - group.nodes) * node.latency_s
    return max(seconds) + rounds * hops_s


def step_times(plan: Plan, work: ModelWorkload, hardware: Hardware, gpus_per_node: int) -> StepTimes:
    """Return the seconds of each part of a step, each alone. `cpu_offload` has no time model."""
    groups = axis_groups(plan.mesh, gpus_per_node)
    device = sharing_cores(hardware, min(gpus_per_node, plan.mesh.world_size))
    compiled = {name: unit.compiled for unit in plan.units for name in unit.modules}
    of_work = {id(work.modules[name]): name for name in plan.modules}  # all blocks share one workload
    times = {
        key: _module_times(work.modules[name], compiled[name], plan, device, groups)
        for key, name in of_work.items()
    }
    modules = {name: times[id(work.modules[name])] for name in plan.modules}
    modules = {
        name: module if work.has_backward((name,)) else replace(module, backward=None)
        for name, module in modules.items()
    }
    # identical units share their times too
    kinds = {
        unit.name: (type(unit.reshard_after_forward), unit.settings, *map(work.kind, unit.modules))
        for unit in plan.units
    }
    units = {
        kind: _unit_times(unit, plan, work, device, groups, gpus_per_node)
        for kind, unit in {kinds[unit.name]: unit for unit in plan.units}.items()
    }
    muon_s, exchange_s = muon_times(plan, work, device, groups)
    return StepTimes(
        units={name: units[kind] for name, kind in kinds.items()},
        modules=modules,
        optimizer_s=(optimizer_s(plan, work, device) + muon_s) * hardware.slower,
        exchange_s=exchange_s * hardware.slower,
        overlaps=hardware.overlaps,
        slowdown={
            lane: hardware.network_slowdown if groups[axis].nodes > 1 else hardware.slowdown
            for lane, axis in AXIS_OF_LANE.items()
        },
        offload_s=copy_times(plan, work, device),
        hook_s=device.host.unit_s * hardware.slower,
        scalars_s=SCALARS * collective_s("all_reduce", 4, groups["world"], device) * hardware.slower,
    )


def _slowed(times: Seconds, hardware: Hardware) -> Seconds:
    """Return the seconds of a unit or a phase on the machine as it was measured."""
    return replace(times, **{name: seconds * hardware.slower for name, seconds in vars(times).items()})


def sharing_cores(hardware: Hardware, processes: int) -> Hardware:
    """Return the hardware of one process: the complete device, or its share of a CPU's cores."""
    if not hardware.cores:
        return hardware
    share = hardware.cores / processes
    peaks = {dtype: peak * share for dtype, peak in hardware.peak_tflops.items()}
    return replace(
        hardware,
        peak_tflops=peaks,
        memory_gb_s=hardware.memory_gb_s * share,
        host=HostCosts(**{name: cost * max(1.0, 1 / share) for name, cost in vars(hardware.host).items()}),
    )


def _module_times(
    module: ModuleWorkload, compiled: bool, plan: Plan, hardware: Hardware, groups: Mapping[str, Group]
) -> ModuleTimes:
    """Return the times of both phases of a module. Parameters that are gathered in float8 are not cast: the
    traffic of element-wise operations that does not depend on the micro batch is left out."""
    uncast, host, phases = gathers_in_float8(plan) and module.float8, hardware.host, list[PhaseTimes]()
    for phase in (module.forward, module.backward):
        operations = phase.operations
        if uncast:
            operations = tuple(op for op in operations if op.kind != "memory" or op.bytes.per_sequence)
        seconds = {"": 0.0, "tp": 0.0, "cp": 0.0}  # by axis of the collective
        for operation in operations:
            if operation.kind == "collective":
                moved = operation.bytes.at(plan.micro_batch_size)
                taken = collective_s(operation.name, moved, groups[operation.axis], hardware)
            else:
                taken = operation_s(operation, plan.micro_batch_size, hardware, plan.attention)
            seconds[operation.axis] += taken
        tp_s, kernels = seconds["tp"] * (1 - ASYNC_TP_HIDDEN * plan.async_tp), len(operations)
        host_s = host.graph_s + host.kernel_s * kernels if compiled else host.operator_s * kernels
        phases.append(_slowed(PhaseTimes(seconds[""], tp_s, seconds["cp"], host_s), hardware))
    return ModuleTimes(*phases)


def _unit_times(
    unit: UnitPlan,
    plan: Plan,
    work: ModelWorkload,
    hardware: Hardware,
    groups: Mapping[str, Group],
    gpus_per_node: int,
) -> UnitTimes:
    """Return the seconds of a unit's collectives and copies. A rank casts its shard to param_dtype, if it is
    stored in another, and all-gathers the unit into one buffer, which is copied out into the weights;
    gradients are cast and copied into another buffer, which is reduce-scattered, and the result is cast to
    storage_dtype. One shard has no collective: its buffers are copied, over replicas with a division by
    one before."""
    shard, replicate = groups["dp_shard"], groups["dp_replicate"]
    parameters = sum(work.modules[name].parameters for name in unit.modules)
    trained = trained_parameters(unit.modules, work)
    stored, gathered = DTYPE_BYTES[plan.storage_dtype], gathered_bytes(parameters, unit, plan, work)
    given = trained * DTYPE_BYTES[unit.param_dtype]
    reduced = trained * DTYPE_BYTES[reduced_in(unit, plan)]
    cast = gathered + parameters * stored if gathered != parameters * stored else 0
    cast_s = copying_s(cast / shard.size, hardware)
    back = reduced + trained * stored if reduced != trained * stored else 0
    size = unit.reshard_after_forward
    regroup = (
        shard
        if type(size) is not int
        else strided_group(size, plan.mesh.tp, min(gpus_per_node, plan.mesh.world_size), plan.mesh.world_size)
    )
    alone = shard.size == 1
    regather_s = collective_s("all_gather", gathered, regroup, hardware) + (
        cast_s if regroup == shard and not alone else 0.0
    )
    copies = (1 + (replicate.size > 1)) * 2 * reduced if alone else 0.0
    reducing_s = copying_s(copies + back / shard.size, hardware)
    times = UnitTimes(
        gather_s=0.0 if alone else collective_s("all_gather", gathered, shard, hardware) + cast_s,
        regather_s=regather_s if regathered(unit) else 0.0,
        copy_out_s=copying_s(2 * gathered, hardware) + (cast_s if alone else 0.0),
        copy_in_s=copying_s(given + reduced, hardware) + reducing_s,
        scatter_s=collective_s("reduce_scatter", reduced, shard, hardware),
        all_reduce_s=collective_s("all_reduce", reduced / shard.size, replicate, hardware),
        first_sum_s=copying_s(given + reduced, hardware) if given != reduced else 0.0,
        sum_s=copying_s(given + 2 * reduced, hardware),
        sums_copy_in_s=copying_s(2 * reduced, hardware) + reducing_s,
    )
    return _slowed(times, hardware)


def gathered_bytes(parameters: int, unit: UnitPlan, plan: Plan, work: ModelWorkload) -> int:
    """Return the bytes of a number of parameters of a unit when they are gathered: in param_dtype, but one
    byte for each that is gathered in float8."""
    size = DTYPE_BYTES[unit.param_dtype]
    float8 = sum(work.modules[name].float8 for name in unit.modules) * plan.float8.all_gather
    return parameters * size - float8 * (size - 1)


# Instructions of our Triton AdamW for one value, by bytes of a parameter and of a moment, in its machine code
# for an H100 (tests/fake_gpu/test_triton_kernels.py). For float32 alone torch's is used.
ADAMW_INSTRUCTIONS = {(4, 2): 70.0, (2, 4): 70.0, (2, 2): 80.0}


def optimizer_s(
    plan: Plan,
    work: ModelWorkload,
    hardware: Hardware,
    instructions: Mapping[tuple[int, int], float] = ADAMW_INSTRUCTIONS,
) -> float:
    """Return the seconds of AdamW's step, without what Muon updates: its traffic, and on a GPU the time to
    issue the instructions of the update. A GPU issues one for each of its float32 lanes a clock, of which the
    peak counts two operations."""
    trained = sum(trained_parameters(unit.modules, work) * work.count(unit.name) for unit in plan.units)
    trained = (trained - muon_parameters(plan, work)) / plan.mesh.shards
    kinds = DTYPE_BYTES[plan.storage_dtype], work.moment_bytes
    issued = 0.0 if hardware.cores else instructions.get(kinds, 0.0)
    issuing_s = issued / (hardware.peak_tflops["float32"] * 1e12 / 2)
    return trained * (traffic_s(optimizer_bytes(*kinds), hardware, hardware.optimizer_efficiency) + issuing_s)


def optimizer_bytes(stored_bytes: int, moment_bytes: int) -> int:
    """Return the bytes that the optimizer step moves per parameter.

    The norm reads the gradient. AdamW reads parameter, gradient and two moments, and writes all but the
    gradient; torch's fused AdamW, used for float32 only, also writes the clipped gradient
    (aten/src/ATen/native/cuda/fused_adam_utils.cuh).

    Args:
        stored_bytes: of the parameter, and of its gradient
        moment_bytes: of one of the two moments
    """
    clipped = stored_bytes if stored_bytes == moment_bytes == 4 else 0
    return stored_bytes + 3 * stored_bytes + 4 * moment_bytes + clipped


@dataclass(frozen=True)
class MuonRound:
    """One of Muon's rounds: (rows, columns) of the matrices that the rank with the most to do owns, and the
    number of values of all ranks' matrices."""

    owned: tuple[tuple[int, int], ...]
    values: int

    @property
    def owned_values(self) -> int:
        return sum(map(prod, self.owned))


@cache
def muon_rounds(blocks: tuple[tuple[tuple[int, int], ...], ...], ranks: int) -> tuple[MuonRound, ...]:
    """Return the rounds in which Muon orthogonalises the matrices of blocks."""
    rounds = []
    for matrices in make_rounds(blocks, lambda matrix: newton_schulz_flops(*matrix), ranks):
        owners = share_out([*starmap(newton_schulz_flops, matrices)], ranks)
        by_owner = [[m for m, o in zip(matrices, owners, strict=True) if o == owner] for owner in {*owners}]
        owned = max(by_owner, key=lambda each: sum(starmap(newton_schulz_flops, each)))
        rounds.append(MuonRound(tuple(owned), sum(map(prod, matrices))))
    return tuple(rounds)


def newton_schulz(matrix: tuple[int, int], dtype: str) -> Operation:
    """Return the orthogonalisation of a matrix. It is unpacked, stacked, measured, scaled and packed; in an
    iteration three products move it three times, and their square results four times."""
    short, long = sorted(matrix)
    moved = 9 * short * long + ITERATIONS * (3 * short * long + 4 * short**2)
    flops = Linear(newton_schulz_flops(*matrix))
    return Operation("matmul", "newton_schulz", flops, Linear(moved * DTYPE_BYTES[dtype]), dtype)


def muon_bytes(stored_bytes: int, sent_bytes: int) -> int:
    """Return the bytes that Muon moves per parameter, besides those of orthogonalising. As stored: gradient
    for the norm 1, divided 2, kept in a skipped step 3; the momentum 3; weights decayed 2; Nesterov's update
    3; its result scaled 2, and subtracted 3. As sent: packing 2; and two conversions."""
    return 19 * stored_bytes + 2 * (stored_bytes + sent_bytes) + 2 * sent_bytes


def muon_times(
    plan: Plan, work: ModelWorkload, hardware: Hardware, groups: Mapping[str, Group]
) -> tuple[float, float]:
    """Return the seconds that Muon computes on the rank with the most to do, and those that it waits.

    A round's parts go to the owners of its matrices, from their own replicas, and the results to all ranks.
    While a round is orthogonalised, the next one's parts and the last one's results are sent, one after the
    other (train/optim/muon.py). The host, which launches more for Muon than for AdamW, is not counted.
    """
    muon, rounds = work.muon, muon_rounds(work.muon.blocks, plan.mesh.world_size)
    if not rounds:
        return 0.0, 0.0
    sent_bytes, replicas = DTYPE_BYTES[muon.dtype], plan.mesh.dp_replicate
    moved = muon_bytes(DTYPE_BYTES[plan.storage_dtype], sent_bytes) * muon_parameters(plan, work)
    passes_s = traffic_s(moved / plan.mesh.shards, hardware, hardware.optimizer_efficiency)
    orthogonalising_s = [
        sum(operation_s(newton_schulz(matrix, muon.dtype), 1, hardware) for matrix in each.owned)
        for each in rounds
    ]
    owned = [each.owned_values * sent_bytes for each in rounds]
    to_owners_s = [collective_s(ALL_TO_ALL, size, groups["replica"], hardware) for size in owned]
    to_all_s = [collective_s(ALL_TO_ALL, size * replicas, groups["world"], hardware) for size in owned]
    beside_s = map(sum, zip([*to_owners_s[1:], 0.0], [0.0, *to_all_s[:-1]], strict=True))
    waited_s = to_owners_s[0] + to_all_s[-1]
    for busy_s, sending_s in zip(orthogonalising_s, beside_s, strict=True):
        waited_s += max(0.0, sending_s - busy_s * hardware.overlaps)
    return passes_s + sum(orthogonalising_s), waited_s


def muon_parameters(plan: Plan, work: ModelWorkload) -> float:
    """Return the number of parameters that Muon updates on one tp rank."""
    shares = work.muon.shares
    return sum(
        trained_parameters((name,), work) * shares.get(name, 0.0) * work.count(unit.name)
        for unit in (plan.units if shares else ())
        for name in unit.modules
    )


def trained_parameters(modules: Iterable[str], work: ModelWorkload) -> float:
    """Return the number of trained parameters of these modules on one tp rank."""
    return sum(work.modules[name].parameters * work.trained.get(name, 1.0) for name in modules)


def sent_blocks(plan: Plan, work: ModelWorkload) -> dict[str, str]:
    """Map each block whose activations are copied to host memory to the next block with offload. The last
    block's activations stay on the device, because the backward needs them first."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    names = (
        name
        for name in plan.modules
        if unit_of[name].activation_checkpoint == "offload" and work.has_backward((name,))
    )
    return dict(pairwise(names))


def copy_times(plan: Plan, work: ModelWorkload, hardware: Hardware) -> Mapping[str, float]:
    """Return the seconds of one copy of each offloaded block's activations, in the order of the forward; 0
    for the last block, whose activations stay. The latency of a copy is negligible."""
    sent = sent_blocks(plan, work)
    if not sent:
        return {}
    seconds = {
        name: work.modules[name].saved_bytes.at(plan.micro_batch_size)
        / (hardware.host_gb_s * 1e9)
        * hardware.slower
        for name in sent
    }
    return seconds | {next(reversed(sent.values())): 0.0}
