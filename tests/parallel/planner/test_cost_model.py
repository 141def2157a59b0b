"""The seconds of operations, copies and collectives, compared with manual calculations for a machine with
round numbers."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.planner.cost_model import (
    ADAMW_INSTRUCTIONS,
    ASYNC_TP_HIDDEN,
    Group,
    ModuleTimes,
    PhaseTimes,
    axis_groups,
    collective_s,
    operation_s,
    sharing_cores,
    step_times,
    strided_group,
)
from meshwright.parallel.planner.hardware import Hardware, HostCosts, Link, load_hardware
from meshwright.parallel.planner.step_time import simulate_step, step_load
from meshwright.parallel.planner.workload import (
    Linear,
    ModelWorkload,
    ModuleWorkload,
    MuonWorkload,
    Operation,
    Phase,
)
from tests.support.plans import BLOCK, EMBEDDING, HEAD, plan_of

# 100 TF/s in bfloat16, half of it for attention; 1 TB/s of memory at 50%; links of 100 and 10 GB/s, which an
# all-gather uses in full, a reduce-scatter at 50%, an all-reduce at 25%; 1 us and 1 ms per hop.
SHARES = {"all_gather": ((1.0, 1.0),), "reduce_scatter": ((1.0, 0.5),), "all_reduce": ((1.0, 0.25),)}
MACHINE = Hardware(
    name="round",
    device_names=(),
    memory_gib=80.0,
    memory_gb_s=1000.0,
    peak_tflops={"bfloat16": 100.0, "float8": 200.0, "float32": 10.0},
    matmul={"bfloat16": 1.0, "float8": 1.0, "float32": 1.0},
    attention={"best": {"bfloat16": (0.5, 0.25)}, "slow": {"bfloat16": (0.1, 0.1), "float32": (0.5, 0.2)}},
    memory_efficiency={"bfloat16": 0.5, "float32": 0.5},
    copy_efficiency=0.5,
    optimizer_efficiency=0.5,
    host=HostCosts(0.0, 0.0, 0.0, 0.0),
    node=Link(100.0, 1e-6, SHARES),
    network=Link(10.0, 1e-3, SHARES),
    collectives_s={},
    host_gb_s=20.0,
    host_memory_gib=100.0,
    overlaps=True,
    slowdown=0.1,
    network_slowdown=0.1,
    attention_head_dim=1.0,
    power_limit=1.0,
    reserved_share=0.0,
    reserved_gib=0.0,
    reached=1.0,
    cores=0,
    correction=1.0,
)
GB = 1e9


def operation(
    kind: Any, name: str = "mm", flops: float = 0.0, moved: float = 0.0, dtype: str = "bfloat16"
) -> Operation:
    """Return an operation; the amounts are per sequence. Collectives are those of tp."""
    axis = "tp" if kind == "collective" else ""
    return Operation(kind, name, Linear(0.0, flops), Linear(0.0, moved), dtype, axis=axis)


def work_of(
    forward: list[Operation], backward: list[Operation] | None = None, **trained: float
) -> ModelWorkload:
    """Return a workload with the same operations in every module of `plans.MODEL`."""
    phases = Phase(tuple(forward), ()), Phase(tuple(backward or []), ())
    counts = {"embed": EMBEDDING, **{f"layers.{i}": BLOCK for i in range(4)}, "head": HEAD}
    modules = {name: ModuleWorkload(count, *phases, Linear(), Linear()) for name, count in counts.items()}
    shares = {name.replace("_", "."): share for name, share in trained.items()}
    return ModelWorkload(modules, shares, seq_len=64, logits="head", tables=0)


# Operations


@pytest.mark.parametrize(
    ("work", "micro_batch", "seconds"),
    [
        # a product computes and moves its operands and result
        (operation("matmul", flops=10 * GB), 10, 100 * GB / 100e12),
        (operation("matmul", flops=100 * GB, moved=GB), 2, 200 * GB / 100e12 + 2 / 500),
        # attention's backward has a rate of its own
        (operation("attention", "_scaled_dot_product_flash_attention", 50e12, 500 * GB), 1, 2.0),
        (operation("attention", "_scaled_dot_product_flash_attention_backward", 50e12), 1, 2.0),
        # other operations take their traffic
        (operation("memory", "add", moved=500 * GB), 2, 2.0),
    ],
)
def test_an_operation_takes_its_work_by_its_rate(work: Operation, micro_batch: int, seconds: float) -> None:
    assert operation_s(work, micro_batch, MACHINE) == pytest.approx(seconds)


# Groups


@pytest.mark.parametrize(
    ("mesh", "tp", "cp", "dp_shard", "dp_replicate"),
    [
        # tp stays in its node and the other axes leave it
        (MeshPlan(2, 4, 8), Group(8, 8, 1), Group(1, 1, 8), Group(4, 1, 8), Group(2, 1, 8)),
        # cp is between tp and dp_shard and shards with it
        (MeshPlan(2, 4, 2, 4), Group(2, 2, 4), Group(4, 4, 2), Group(16, 4, 2), Group(2, 1, 8)),
        # a node holds part of a strided group: ranks 0, 2, 4, 6 of each node, or the odd ones
        (MeshPlan(2, 16, 2), Group(2, 2, 4), Group(1, 1, 8), Group(16, 4, 2), Group(2, 1, 8)),
        # a run smaller than a node has no network
        (MeshPlan(1, 1, 1), Group(1, 1, 1), Group(1, 1, 1), Group(1, 1, 1), Group(1, 1, 1)),
        (MeshPlan(1, 3, 1), Group(1, 1, 3), Group(1, 1, 3), Group(3, 3, 1), Group(1, 1, 3)),
    ],
)
def test_groups_of_a_mesh(mesh: MeshPlan, tp: Group, cp: Group, dp_shard: Group, dp_replicate: Group) -> None:
    expected = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
    groups = axis_groups(mesh, 8)
    replica = mesh.world_size // mesh.dp_replicate
    assert groups.pop("replica") == Group(
        replica, min(8, replica), max(1, min(8, mesh.world_size) // replica)
    )
    assert groups.pop("world") == Group(mesh.world_size, min(8, mesh.world_size), 1)
    assert groups == expected


def test_a_group_that_does_not_fill_nodes_evenly_lies_in_more_of_them() -> None:
    assert strided_group(12, 1, 8, 24) == Group(12, 4, 2)
    assert strided_group(12, 1, 8, 12) == Group(12, 4, 1), "there is no other ring to share the network with"
    assert strided_group(3, 1, 8, 24).nodes == 3


# Collectives


@pytest.mark.parametrize(
    ("name", "times", "share"), [("all_gather", 1, 1), ("reduce_scatter", 1, 0.5), ("all_reduce", 2, 0.25)]
)
def test_a_ring_in_a_node(name: str, times: int, share: float) -> None:
    assert collective_s(name, 8 * GB, Group(8, 8, 1), MACHINE) == pytest.approx(
        times * (7 / (100 * share) + 7e-6)
    )


def test_in_an_all_to_all_every_rank_sends_its_parts_itself() -> None:
    """As efficient as an all-gather, if nothing else is listed; a node's link takes what all its ranks send
    to others."""
    within = collective_s("all_to_all", 8 * GB, Group(8, 8, 1), MACHINE)
    assert within == pytest.approx(7 / 100 + 7e-6)
    between = collective_s("all_to_all", 16 * GB, Group(16, 8, 1), MACHINE)
    assert between == pytest.approx(8 * 8 / 10 + 1e-3 + 14e-6)
    half = Link(100.0, 0.0, {**SHARES, "all_to_all": ((1.0, 0.5),)})
    slower = collective_s("all_to_all", 8 * GB, Group(8, 8, 1), dataclasses.replace(MACHINE, node=half))
    assert slower == pytest.approx(7 / 50)


def test_groups_of_a_node_share_its_network() -> None:
    for sharing in (1, 8):
        seconds = collective_s("all_gather", 8 * GB, Group(8, 1, sharing), MACHINE)
        assert seconds == pytest.approx(sharing * 7 / 10 + 7e-3)


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_link() -> None:
    group = Group(16, 8, 1)  # 15 hops, one of them between the two nodes
    assert collective_s("all_gather", 16 * GB, group, MACHINE) == pytest.approx(15 / 10 + 1e-3 + 14e-6)
    fast = dataclasses.replace(MACHINE, network=dataclasses.replace(MACHINE.network, gb_s=1000.0))
    assert collective_s("all_gather", 16 * GB, group, fast) == pytest.approx(15 / 100 + 1e-3 + 14e-6)


def test_a_links_share_depends_on_how_many_use_it() -> None:
    curve = {**SHARES, "all_gather": ((2.0, 0.25), (8.0, 1.0))}
    machine = dataclasses.replace(MACHINE, node=Link(100.0, 0.0, curve), network=Link(10.0, 0.0, curve))
    assert collective_s("all_gather", 4 * GB, Group(2, 2, 4), machine) == pytest.approx(2 / 25)
    assert collective_s("all_gather", 4 * GB, Group(4, 4, 2), machine) == pytest.approx(3 / 62.5)
    assert collective_s("all_gather", 8 * GB, Group(8, 1, 1), machine) == pytest.approx(7 / 10)
    # two nodes, not 16
    assert collective_s("all_gather", 16 * GB, Group(16, 8, 1), machine) == pytest.approx(15 / 2.5)


# A step


def test_a_unit_is_gathered_copied_and_reduced() -> None:
    plan = plan_of(8, param_dtype="bfloat16")
    unit = step_times(plan, work_of([]), MACHINE, 8).units["layers.0"]
    group = Group(8, 8, 1)
    cast_s = BLOCK / 8 * (4 + 2) / 500e9
    assert unit.gather_s == pytest.approx(collective_s("all_gather", BLOCK * 2, group, MACHINE) + cast_s)
    assert unit.regather_s == unit.gather_s
    assert unit.copy_out_s == pytest.approx(BLOCK * 2 * 2 / 500e9)
    assert unit.copy_in_s == pytest.approx(BLOCK * (2 + 4) / 500e9)
    assert unit.scatter_s == pytest.approx(collective_s("reduce_scatter", BLOCK * 4, group, MACHINE))
    assert unit.all_reduce_s == 0
    assert step_times(plan, work_of([]), MACHINE, 8).units["head"].regather_s == 0, "it stays gathered"


def test_casts_are_copied_where_the_stored_dtype_is_another() -> None:
    for ranks, stored, gathering, reducing in (
        (8, "bfloat16", 4, 6 + 6 / 8),  # the result of the reduction is narrowed
        (1, "float32", 4 + 6, 4 + 4 + 6),  # in bfloat16: into one buffer, into the other, widened
    ):
        plan = plan_of(ranks, param_dtype="bfloat16", storage_dtype=stored)
        unit = step_times(plan, work_of([]), MACHINE, 8).units["layers.0"]
        copied = (unit.copy_out_s, unit.copy_in_s)
        assert copied == pytest.approx((BLOCK * gathering / 500e9, BLOCK * reducing / 500e9))


def test_resharding_to_a_smaller_group_gathers_again_over_it() -> None:
    plan = plan_of(16, per_node=8, reshard_after_forward=4)
    unit = step_times(plan, work_of([]), MACHINE, 8).units["layers.0"]
    assert unit.regather_s == pytest.approx(collective_s("all_gather", BLOCK * 4, Group(4, 4, 2), MACHINE))
    assert unit.gather_s == collective_s("all_gather", BLOCK * 4, Group(16, 8, 1), MACHINE)


def test_hybrid_sharding_reduces_shards_over_the_replicas() -> None:
    plan = plan_of(16, per_node=8, dp_replicate=2)
    unit = step_times(plan, work_of([]), MACHINE, 8).units["layers.0"]
    assert unit.all_reduce_s == pytest.approx(
        collective_s("all_reduce", BLOCK * 4 / 8, Group(2, 1, 8), MACHINE)
    )
    assert unit.scatter_s == pytest.approx(collective_s("reduce_scatter", BLOCK * 4, Group(8, 8, 1), MACHINE))


def test_what_is_frozen_is_gathered_and_not_reduced() -> None:
    units = step_times(plan_of(8), work_of([], None, layers_0=0.0, layers_1=0.5), MACHINE, 8).units
    assert units["layers.0"].gather_s == units["layers.2"].gather_s
    assert (units["layers.0"].copy_in_s, units["layers.0"].scatter_s) == (0, 0)
    assert units["layers.1"].copy_in_s == units["layers.2"].copy_in_s / 2


# Bytes: the norm reads the gradient; AdamW reads gradient, parameter and two moments, and writes all but the
# gradient; torch's fused AdamW, for float32 only, writes that too. Ours is issued besides, on a GPU.
@pytest.mark.parametrize(
    ("stored", "moment", "moved"),
    [
        ("float32", 4, 4 + 16 + 12 + 4),
        ("float32", 2, 4 + 12 + 8),
        ("bfloat16", 4, 2 + 12 + 10),
        ("bfloat16", 2, 2 + 8 + 6),
    ],
)
def test_the_optimizer_passes_over_this_ranks_shards(stored: str, moment: int, moved: int) -> None:
    parameters = EMBEDDING + 4 * BLOCK + HEAD
    plan = plan_of(8, dp_shard=4, tp=2, param_dtype="bfloat16", storage_dtype=stored)
    for frozen, trained in (({}, parameters), ({"embed": 0.0}, parameters - EMBEDDING)):
        work = dataclasses.replace(work_of([], None, **frozen), moment_bytes=moment)
        issued = ADAMW_INSTRUCTIONS.get((4 if stored == "float32" else 2, moment), 0)
        assert (issued > 0) == ((stored, moment) != ("float32", 4))
        for cores, issuing_s in ((0, issued / 5e12), (8, 0.0)):
            machine = dataclasses.replace(MACHINE, cores=cores)
            optimizer_s = step_times(plan, work, machine, 8).optimizer_s
            assert optimizer_s == pytest.approx(trained / 4 * (moved / 500e9 + issuing_s))


@pytest.mark.parametrize("overlaps", [True, False])
def test_muon_exchanges_beside_what_it_orthogonalises(overlaps: bool) -> None:
    """Four rounds on two nodes, each of a replica: every rank owns a matrix of a round, of 8 MB."""
    blocks = (((1000, 4000),) * 16,) * 4
    muon = MuonWorkload({f"layers.{i}": 1.0 for i in range(4)}, blocks, "bfloat16")
    work, machine = work_of([]), dataclasses.replace(MACHINE, overlaps=overlaps)
    plan = plan_of(16, per_node=8, dp_replicate=2)
    alone = step_times(
        plan, dataclasses.replace(work, trained={f"layers.{i}": 0.0 for i in range(4)}), machine, 8
    )
    times = step_times(plan, dataclasses.replace(work, muon=muon), machine, 8)
    # 5 iterations of 4 s^2 l + 2 s^3; 9 s l and in each 3 s l + 4 s^2 values moved
    busy_s = 5 * (16e9 + 2e9) / 100e12 + 2 * (36e6 + 5 * (12e6 + 4e6)) / 500e9
    passes_s = 4 * BLOCK / 8 * (19 * 4 + 2 * (4 + 2) + 2 * 2) / 500e9
    assert times.optimizer_s == pytest.approx(alone.optimizer_s + passes_s + 4 * busy_s)
    # 7 of 8 parts to the owners in a node; 14 MB to all ranks, 64 MB between the nodes
    owners_s, all_s = 7e6 / 100e9 + 7e-6, 64e6 / 10e9 + 1e-3 + 14e-6
    between_s = 2 * (owners_s + all_s - busy_s) + all_s - busy_s  # the first parts are hidden
    waited_s = owners_s + between_s + all_s if overlaps else 4 * (owners_s + all_s)
    assert times.exchange_s == pytest.approx(waited_s)
    step, load = simulate_step(plan, times), step_load(plan, times, {})
    assert step.exposed_by_lane["all_to_all"] == pytest.approx(waited_s)
    optimizer_s = times.optimizer_s + waited_s + times.scalars_s
    assert step.optimizer_s == pytest.approx(optimizer_s)
    assert optimizer_s < load.seconds <= step.step_s
    one = step_times(plan_of(1), dataclasses.replace(work, muon=muon), machine, 8)
    assert (one.exchange_s, one.optimizer_s > 64 * busy_s) == (0, True)


def test_the_collectives_of_cp_are_exposed_on_its_own_group() -> None:
    sent = Operation("collective", "all_to_all", Linear(), Linear(0.0, GB), "bfloat16", axis="cp")
    plan = dataclasses.replace(plan_of(8), mesh=MeshPlan(1, 2, 1, 4))
    times = step_times(plan, work_of([sent], [sent, sent]), MACHINE, 8).modules["layers.3"]
    once_s = collective_s("all_to_all", GB, Group(4, 4, 2), MACHINE)
    assert times.forward.exposed_s == {"cp": pytest.approx(once_s)}
    assert times.backward.exposed_s == {"cp": pytest.approx(2 * once_s)}


def float8_work() -> ModelWorkload:
    """Return a workload with one product per module, in float8 in the blocks, which also cast an operand and
    a weight."""
    product = operation("matmul", flops=100 * GB, moved=0.1 * GB)
    casts = (
        operation("memory", moved=GB),
        Operation("memory", "cast", Linear(), Linear(3 * GB, 0.0), "bfloat16"),
    )
    plain = work_of([product])
    block = dataclasses.replace(
        work_of([*casts, dataclasses.replace(product, dtype="float8")]).modules["layers.0"], float8=1000
    )
    return dataclasses.replace(
        plain,
        modules={name: block if name.startswith("layers.") else work for name, work in plain.modules.items()},
    )


def test_float8_is_for_the_products_of_the_blocks_that_are_in_it() -> None:
    plan = plan_of(8)
    gathered = dataclasses.replace(plan, float8=dataclasses.replace(plan.float8, all_gather=True))
    rates = {dtype: rate for dtype, rate in MACHINE.matmul.items() if dtype != "float8"}
    without = dataclasses.replace(MACHINE, matmul=rates)
    for case, machine, seconds in (
        (plan, MACHINE, 0.5e-3 + (0.1 + 1 + 3) / 500),
        (gathered, MACHINE, 0.5e-3 + (0.1 + 1) / 500),  # weights gathered in float8 are not cast
        (plan, without, 1e-3 + (0.1 + 1 + 3) / 500),  # emulated
    ):
        times = step_times(case, float8_work(), machine, 8).modules
        assert times["layers.0"].forward.compute_s == pytest.approx(seconds)
        assert times["head"].forward.compute_s == pytest.approx(1e-3 + 0.1 / 500)


def test_attention_is_as_fast_as_its_head_dim_allows() -> None:
    kind = dataclasses.replace(MACHINE, attention_head_dim=((64.0, 0.5), (128.0, 1.0)))
    for name, head_dim, share in (
        ("attention", 128, 0.5),
        ("attention", 64, 0.25),
        ("attention_backward", 64, 0.125),
    ):
        work = Operation("attention", name, Linear(0.0, GB), Linear(), "bfloat16", head_dim)
        assert operation_s(work, 1, kind) == pytest.approx(GB / 100e12 / share)
    assert MACHINE.attention_shares("slow", "bfloat16") == (0.1, 0.1)
    assert (
        MACHINE.attention_shares("best", "float32") == MACHINE.attention_shares("", "float32") == (0.5, 0.2)
    )


def test_a_power_limit_bounds_the_energy_of_computing() -> None:
    limited = dataclasses.replace(MACHINE, power_limit=0.5)
    for product, seconds in (
        (operation("matmul", flops=100 * GB, moved=0.1 * GB), 2e-3),  # 1 ms at full power, 0.2 ms of traffic
        (operation("matmul", flops=100 * GB, moved=GB), 3e-3),  # cools in 2 ms of traffic
        (operation("memory", moved=GB), 2e-3),
    ):
        assert operation_s(product, 1, limited) == pytest.approx(seconds)


def test_compute_is_slowed_by_the_link_of_the_collective() -> None:
    kind = dataclasses.replace(MACHINE, slowdown=0.2, network_slowdown=0.1)
    work = work_of([operation("matmul", flops=GB)])
    plan = plan_of(16, dp_replicate=2)
    assert step_times(plan, work, kind, 8).slowdown == {
        "all_gather": 0.2,
        "reduce_scatter": 0.2,
        "all_reduce": 0.1,
    }


def test_the_host_launches_graphs_kernels_and_operators() -> None:
    host = HostCosts(operator_s=5e-6, kernel_s=1e-6, graph_s=1e-4, unit_s=2e-4)
    operations = [operation("matmul", flops=4 * GB)] * 3
    plan = plan_of(8)
    times = step_times(plan, work_of(operations, operations * 2), dataclasses.replace(MACHINE, host=host), 8)
    eager, compiled = times.modules["embed"], times.modules["layers.0"]
    assert (eager.forward.host_s, eager.backward.host_s) == pytest.approx((15e-6, 30e-6))
    assert (compiled.forward.host_s, compiled.backward.host_s) == pytest.approx((103e-6, 106e-6))
    assert times.hook_s == 2e-4
    slow = ModuleTimes(PhaseTimes(host_s=1.0), PhaseTimes())
    slow_host = dataclasses.replace(times, modules=dict.fromkeys(times.modules, slow))
    assert step_load(plan, slow_host, {}).seconds >= len(times.modules), (
        "a step is bound by whichever is later"
    )
    serial = dataclasses.replace(times, overlaps=False)
    assert step_load(plan, serial, {}).seconds == pytest.approx(simulate_step(plan, serial).step_s)


def test_async_tp_hides_part_of_the_collectives() -> None:
    work = work_of([operation("collective", "all_gather", moved=GB)])
    plan = plan_of(8, tp=8)
    plain, hidden = (
        step_times(dataclasses.replace(plan, async_tp=a), work, MACHINE, 8).modules["head"]
        for a in (False, True)
    )
    assert hidden.forward.tp_s == pytest.approx(plain.forward.tp_s * (1 - ASYNC_TP_HIDDEN))


def test_processes_on_a_cpu_share_its_cores() -> None:
    cpu = dataclasses.replace(MACHINE, cores=2)
    product = operation("matmul", flops=100 * GB)
    seconds = [operation_s(product, 1, sharing_cores(cpu, processes)) for processes in (1, 2, 4)]
    assert seconds == pytest.approx([0.5e-3, 1e-3, 2e-3])
    assert sharing_cores(MACHINE, 4) is MACHINE
    times = [
        step_times(plan_of(n), work_of([product]), cpu, 8).modules["head"].forward.compute_s for n in (2, 4)
    ]
    assert times == pytest.approx([1e-3, 2e-3])


def test_what_a_machine_reaches_and_its_runs_correct_changes_all_seconds_by_one_factor() -> None:
    operations = [operation(kind, moved=GB) for kind in ("matmul", "memory")]
    operations += [operation("collective", "all_gather", moved=GB)]
    kept = dataclasses.replace(
        MACHINE, host=HostCosts(1e-3, 1e-3, 1e-3, 1e-3), collectives_s={"all_gather": {2: ((1.0, 1e-3),)}}
    )
    slower = dataclasses.replace(kept, reached=0.5, correction=0.5)
    plan = plan_of(16, tp=2, dp_replicate=2, activation_checkpoint="offload")
    work = dataclasses.replace(work_of(operations, operations), muon=MuonWorkload({}, (((64, 64),) * 16,)))
    fast, slow = (step_times(plan, work, kind, 8) for kind in (kept, slower))
    for name in ("optimizer_s", "hook_s", "scalars_s", "exchange_s"):
        assert getattr(slow, name) == pytest.approx(4 * getattr(fast, name)) != 0
    for unit, times in fast.units.items():
        scaled = [4 * seconds for seconds in dataclasses.astuple(times)]
        assert dataclasses.astuple(slow.units[unit]) == pytest.approx(scaled)
    for phase in ("forward", "backward"):
        scaled = [4 * seconds for seconds in dataclasses.astuple(fast.modules["layers.0"].of(phase))]
        assert dataclasses.astuple(slow.modules["layers.0"].of(phase)) == pytest.approx(scaled)
    assert list(slow.offload_s.values()) == pytest.approx([4 * s for s in fast.offload_s.values()])
    assert slow.slowdown == fast.slowdown


@pytest.mark.parametrize("kind", sorted(load_hardware()))
def test_every_kind_of_machine_can_be_asked(kind: str) -> None:
    operations = [operation("matmul", flops=GB, moved=GB, dtype=dtype) for dtype in ("bfloat16", "float32")]
    operations += [
        operation("attention", "attention", GB, dtype="bfloat16"),
        operation("collective", "all_reduce", moved=GB),
    ]
    times = step_times(
        plan_of(16, tp=2, dp_replicate=2), work_of(operations, operations), load_hardware()[kind], 8
    )
    for phase in ("forward", "backward"):
        of_phase = dataclasses.asdict(times.modules["head"].of(phase))
        assert of_phase.pop("cp_s") == 0, "cp=1"
        assert all(0 < seconds < 1e3 for seconds in of_phase.values())
    of_unit = dataclasses.asdict(times.units["layers.0"])
    assert of_unit.pop("first_sum_s") == 0, "in one dtype nothing is cast"
    assert all(seconds > 0 for seconds in of_unit.values())
