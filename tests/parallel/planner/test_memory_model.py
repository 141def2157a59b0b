"""The predicted memory of a step, compared with manual calculations for small artificial workloads."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.memory_breakdown import GIB, MemoryBreakdown, PredictedMemory, StepMemory
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.planner import ledger, memory_model
from meshwright.parallel.planner.cost_model import sent_blocks
from meshwright.parallel.planner.hardware import HostMemory, allocator_bytes, load_hardware, reserved_bytes
from meshwright.parallel.planner.memory_model import host_memory, least_step_memory, predict_step_memory
from meshwright.parallel.planner.workload import Linear, ModelWorkload, ModuleWorkload, MuonWorkload, Phase
from tests.support.plans import change

EMBEDDING, BLOCK, HEAD = 800, 400, 1000  # parameters
# bytes: of a block's output and of its saved activations, per sequence; of the model's buffers
HIDDEN, KEPT, TABLES = 20, 200, 7


def per_sequence(size: float, fixed: float = 0) -> Linear:
    return Linear(fixed, size)


def make_work(passing: int = 240, n_blocks: int = 2, dtype_bytes: int = 4, head: int = 500) -> ModelWorkload:
    """Return a workload of embedding, blocks and head. Live bytes per sequence: at most `passing` in a
    block's forward; 300 in its backward, at the end 150 plus its weight gradients; `head` in the head's
    forward."""

    def module(
        parameters: int, forward: float, keeps: float, backward: tuple[Linear, ...], output: float
    ) -> ModuleWorkload:
        phases = Phase((), (per_sequence(forward),)), Phase((), backward)
        return ModuleWorkload(parameters, *phases, per_sequence(keeps), per_sequence(output))

    block = (per_sequence(300), per_sequence(150, fixed=dtype_bytes * BLOCK))
    modules = {
        "embed": module(EMBEDDING, HIDDEN, 5, (per_sequence(25, fixed=dtype_bytes * EMBEDDING),), HIDDEN),
        **{f"layers.{i}": module(BLOCK, passing, KEPT, block, HIDDEN) for i in range(n_blocks)},
        "head": module(HEAD, head, 310, (per_sequence(330, fixed=dtype_bytes * HEAD),), 4),
    }
    return ModelWorkload(modules, {}, 5, "head", TABLES)


def with_module(work: ModelWorkload, name: str = "head", **changes: Any) -> ModelWorkload:
    """Return the workload with another head, or other module."""
    changed = dataclasses.replace(work.modules[name], **changes)
    return dataclasses.replace(work, modules={**work.modules, name: changed})


def make(world_size: int, micro: int = 1, n_blocks: int = 2, global_batch: int = -1, **keys: Any) -> Plan:
    blocks = [f"layers.{i}" for i in range(n_blocks)]
    modules = dict(embed=EMBEDDING, **dict.fromkeys(blocks, BLOCK), head=HEAD)
    model = ModelUnits(modules, [(name,) for name in modules], frozenset(), frozenset(blocks))
    return make_plan(ParallelConfig(**keys), model, RunShape(world_size, 8, 5, micro, global_batch))


def predict(*sizes: int, work: ModelWorkload | None = None, **keys: Any) -> StepMemory:
    return predict_step_memory(make(*sizes, **keys), work or make_work())


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
STORED = {**BF16, "storage_dtype": "bfloat16"}
SAVING = {"reduce_gradients": "last_micro_batch", "reshard_after_backward": False}
SHARDS = (400 + 200 + 200 + 500) * 4  # bytes per rank with two shards


def test_whole_gradients_and_kept_parameters_by_hand() -> None:
    """Three micro batches, gathered in bfloat16 and summed in float32."""
    parameters = 2 * SHARDS // 4
    once = predict(2, global_batch=6, reduce_gradients="last_micro_batch", **BF16)
    assert once.memory.grads == 4 * parameters
    kept = predict(2, global_batch=6, reshard_after_backward=False, **BF16)
    assert kept.memory.grads == SHARDS
    # the head's buffer is still there in the first backward, after its copy
    assert 2 * parameters <= kept.memory.unsharded <= 2 * (parameters + 2 * 500 + 2 * 200)
    one_micro_batch = predict(2, reshard_after_backward=False, **BF16).memory
    assert one_micro_batch == predict(2, **BF16).memory


def test_a_small_plan_by_hand() -> None:
    """Two shards, a micro batch of 3 sequences, all in float32."""
    assert predict(2, 3).memory == MemoryBreakdown(
        params=SHARDS,
        grads=SHARDS,
        optimizer=2 * SHARDS,
        # In the embedding's forward: the embedding, its all-gather buffer, and the buffer of the prefetched
        # block. (The head and its buffer are 8000.)
        unsharded=3200 + 3200 + 1600,
        # In the last block's backward: saved activations of embedding and first block, and the block's peak.
        activations=3 * (5 + 200 + 300),
        # The head's forward, without its input hidden states.
        logits=3 * (500 - 20),
        # The head's gradient, and the reduction buffer that it is copied into.
        buffers=TABLES + 4000 + 4000,
    )


def test_the_moment_of_the_peak_by_hand() -> None:
    """The end of the last block's backward: its gradients exist, and the head's reduction still has its
    buffer."""
    assert predict(2, 3).at_peak == MemoryBreakdown(
        params=SHARDS,
        grads=2000,  # of the head
        optimizer=2 * SHARDS,
        unsharded=1600 + 1600,  # the block, and the first block's buffer
        activations=3 * (5 + 200 + 150),  # saved by embedding and first block, and live at this moment
        logits=0,
        buffers=TABLES + 4000 + 1600,
    )


def test_the_peak_is_in_the_forward_where_logits_are_many() -> None:
    """A head with 5000 live bytes for each of three sequences."""
    assert predict(2, 3, work=make_work(head=5000)).at_peak == MemoryBreakdown(
        params=SHARDS,
        grads=0,
        optimizer=2 * SHARDS,
        unsharded=4000 + 4000,  # the head and its all-gather buffer
        activations=3 * (5 + 2 * 200 + 20),
        logits=3 * (5000 - 20),
        buffers=TABLES,
    )


def test_bfloat16_halves_what_is_gathered_and_gradients_but_not_their_reduction_nor_the_shards() -> None:
    memory = predict(2, 3, work=make_work(dtype_bytes=2), **BF16).memory
    assert (memory.params, memory.grads, memory.optimizer) == (SHARDS, SHARDS, 2 * SHARDS)
    assert memory.unsharded == (3200 + 3200 + 1600) // 2
    assert memory.buffers == TABLES + 2000 + 4000


def test_storage_in_bfloat16_halves_shards_and_gradients_and_moments_have_a_dtype_of_their_own() -> None:
    work = make_work(dtype_bytes=2)
    for moment_bytes in (4, 2):
        memory = predict(2, 3, work=dataclasses.replace(work, moment_bytes=moment_bytes), **STORED).memory
        assert (memory.params, memory.grads) == (SHARDS // 2, SHARDS // 2)
        assert memory.optimizer == 2 * SHARDS * moment_bytes // 4


def test_what_muon_updates_has_one_moment() -> None:
    work = dataclasses.replace(make_work(), muon=MuonWorkload({"layers.0": 1.0, "layers.1": 0.5}))
    fewer = (200 + 100) * 4
    assert predict(2, 3, work=work).memory.optimizer == 2 * SHARDS - fewer
    plan, saves = make(2), dataclasses.replace(make_work(), saves=True)
    least = least_step_memory(plan, make_work()).at_end - least_step_memory(plan, work).at_end
    assert least == fewer
    offloaded = make(2, cpu_offload=True)
    assert host_memory(offloaded, make_work()).state - host_memory(offloaded, work).state == fewer
    saved = (
        host_memory(plan, saves).copies - host_memory(plan, dataclasses.replace(saves, muon=work.muon)).copies
    )
    assert saved == 1.5 * 1024  # in powers of two


def test_sums_that_wait_for_the_replicas_wait_in_reduce_dtype() -> None:
    """Four micro batches: in the head's forward of the last one all gradients of the others are live."""
    keys = {"work": make_work(head=5000, dtype_bytes=2), "dp_replicate": 2, "global_batch": 16}
    assert predict(4, **keys, **STORED).at_peak.grads == SHARDS
    assert predict(4, **keys, **{**STORED, "reduce_dtype": "bfloat16"}).at_peak.grads == SHARDS // 2


def test_replicas_sums_stay_until_the_backward_ends_where_gradients_are_stored_in_another_dtype() -> None:
    """On one shard, in the embedding's reduction: three copies of its gradient in float32, and the sums of
    blocks and head."""
    step = predict(2, strategy="ddp", work=make_work(dtype_bytes=2), **STORED)
    assert step.at_peak.buffers == TABLES + 3 * 3200 + 2 * 1600 + 4000
    assert predict(2, strategy="ddp", work=make_work()).at_peak.buffers == TABLES + 3 * 3200


def test_shards_divide_parameters_gradients_and_optimizer_and_replicas_nothing() -> None:
    for shards, per_rank in ((1, 2600), (2, 1300), (4, 650), (8, 325)):
        memory = predict(shards).memory
        assert (memory.params, memory.grads, memory.optimizer) == (4 * per_rank, 4 * per_rank, 8 * per_rank)
    assert predict(8, dp_replicate=4) == predict(2)


def test_rows_are_dealt_out_whole_and_padded() -> None:
    """A head with 3 rows of 300 and 100 rows of 1, on 8 ranks: each has 1 row of 300 and 13 rows of 1; those
    of the last ranks are padding."""
    work = with_module(make_work(), weights=((3, 300), (100, 1)))
    memory = predict(8, work=work, forward_prefetch=0).memory
    assert memory.params == memory.grads == 4 * (100 + 2 * 50 + 313)
    assert memory.unsharded == 2 * 4 * 8 * 313, "the head and its buffer, padded"
    assert memory.buffers == TABLES + 4000 + 4 * 8 * 313, (
        "its gradient is padded only in the reduction buffer"
    )


@pytest.mark.parametrize(
    ("dtype_bytes", "weights", "dtypes", "live"),
    [
        # of 1000 values 900, to which torch's loop holds a reference
        (4, ((100, 1), (10, 90)), {}, 4000 + 2000 + 3600),
        # with the result in float32, and in bfloat16, and the gradient of the only weight
        (2, ((1000, 1),), {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, 2000 + 1000 + 2000 + 2000),
        (2, ((1000, 1),), STORED, 4000 + 2000 + 1000 + 2000),
    ],
    ids=["float32", "cast to float32", "cast to bfloat16"],
)
def test_a_reductions_buffer_its_result_and_the_last_gradient_live_until_it_is_done(
    dtype_bytes: int, weights: Any, dtypes: dict[str, Any], live: int
) -> None:
    work = with_module(make_work(dtype_bytes=dtype_bytes), weights=weights)
    assert predict(2, work=work, **dtypes).memory.buffers == TABLES + live


def test_what_is_sent_to_host_memory_is_there_only_beside_the_block_at_work() -> None:
    """Five blocks with offload: the last block's activations stay. In the last forward the previous block's
    copy is still in flight; in every backward except the first block's the next block's activations are
    already back."""
    work, keys = make_work(n_blocks=5), {"n_blocks": 5, "activation_checkpoint": "offload"}
    plan = make(2, **keys)
    assert sent_blocks(plan, work) == {f"layers.{i}": f"layers.{i + 1}" for i in range(4)}
    assert host_memory(plan, work) == HostMemory(4 * KEPT)
    assert predict(2, work=work, **keys).memory.activations == 5 + KEPT + 300, (
        "as with two blocks without offload"
    )
    kept = predict(2, work=work, n_blocks=5).memory.activations
    assert kept == 5 + 4 * KEPT + 300
    assert predict(2, work=work, **keys, activation_checkpoint_blocks=3).memory.activations == kept - 2 * KEPT
    assert predict(2, work=make_work(n_blocks=5, passing=900), **keys).memory.activations == 5 + KEPT + 900, (
        "in a forward"
    )


def test_what_is_sent_needs_no_backward_of_its_own() -> None:
    work = dataclasses.replace(make_work(n_blocks=5), trained={"embed": 0.0, "layers.0": 0.0})
    plan = make(2, n_blocks=5, activation_checkpoint="offload")
    assert host_memory(plan, work) == HostMemory(3 * KEPT)
    offloaded = make(2, n_blocks=5, activation_checkpoint="offload", cpu_offload=True)
    halves = [values // 2 for values in (EMBEDDING, *[BLOCK] * 5, HEAD)]
    pinned = sum(2 ** (4 * values - 1).bit_length() for values in halves)  # parameters, and again gradients
    assert host_memory(offloaded, make_work(n_blocks=5)) == HostMemory(4 * KEPT, 2 * pinned + 8 * sum(halves))
    saved = dataclasses.replace(make_work(n_blocks=5), saves=True)
    assert host_memory(make(2, n_blocks=5), saved) == HostMemory(copies=3 * pinned)
    assert host_memory(make(4, n_blocks=5, dp_replicate=2, dp_shard=2), saved) == HostMemory(
        copies=3 * pinned // 2
    )


IN_THE_HEADS_BACKWARD = MemoryBreakdown(
    unsharded=4000 + 1600, activations=5 + 2 * 200 + 20, logits=330 - 20, buffers=TABLES + 4000
)


def test_accumulated_gradients_are_there_through_the_last_micro_batch() -> None:
    once, accumulated = predict(2), predict(2, global_batch=8)
    assert accumulated.memory == once.memory
    shards = {"params": SHARDS, "grads": SHARDS, "optimizer": 2 * SHARDS}
    assert accumulated.at_peak == dataclasses.replace(IN_THE_HEADS_BACKWARD, **shards)


def test_offloaded_parameters_gradients_and_moments_are_not_on_the_device() -> None:
    on_device, offloaded = (predict(2, cpu_offload=offload) for offload in (False, True))
    assert offloaded.memory == dataclasses.replace(on_device.memory, params=0, grads=0, optimizer=0)
    assert offloaded.at_peak == IN_THE_HEADS_BACKWARD


def test_prefetching_further_fills_more_buffers_at_once() -> None:
    def unsharded(ahead: int) -> int:
        return predict(2, forward_prefetch=ahead, backward_prefetch=ahead).memory.unsharded

    assert unsharded(0) == 4000 + 4000, "the head with its buffer; prefetching does not change that"
    assert unsharded(1) == 3200 + 3200 + 1600, "the embedding with its buffer, and that of a block"
    assert unsharded(2) == 3200 + 3200 + 2 * 1600
    plan = change(make(2, forward_prefetch=0, backward_prefetch=0), 0, forward_prefetch=("layers.1", "head"))
    assert predict_step_memory(plan, make_work()).memory.unsharded == 3200 + 3200 + 1600 + 4000


def test_the_backward_keeps_no_buffer_behind_a_unit() -> None:
    """With a very small head the maximum is while the embedding is copied out: the embedding and its buffer,
    without prefetched units."""
    work = with_module(make_work(head=0), parameters=4)
    step = predict(2, work=work, forward_prefetch=0, backward_prefetch=0)
    assert step.memory.unsharded == 3200 + 3200


def test_resharding_decides_what_is_gathered_in_the_heads_forward() -> None:
    """Beside the head and its buffer: all units, or a half of each."""
    assert predict(2, reshard_after_forward=False).memory.unsharded == 3200 + 1600 + 1600 + 4000 + 4000
    assert predict(8, reshard_after_forward=2).memory.unsharded == (3200 + 1600 + 1600) // 2 + 4000 + 4000


def test_a_rank_alone_gathers_through_nothing_and_copies_what_it_would_scatter() -> None:
    """Weights in another dtype than their shards: the head's gradient, the reduction's buffer, its result. In
    the same dtype nothing is copied."""
    memory = predict(1, reshard_after_forward=True, param_dtype="bfloat16").memory
    assert memory.unsharded == 4000 // 2
    assert memory.buffers == TABLES + 4000 // 2 + 4000 // 2 + 4000
    memory = predict(1, reshard_after_forward=True).memory
    assert (memory.unsharded, memory.buffers) == (0, TABLES + 4000)


def test_units_joined_by_size_are_gathered_and_reduced_together() -> None:
    memory = predict(2, unit_min_params=500).memory
    plan = make(2, unit_min_params=500)
    assert [unit.modules for unit in plan.units] == [("embed",), ("layers.0", "layers.1"), ("head",)]
    assert memory.params == (400 + 200 + 200 + 500) * 4, "each weight is sharded separately"
    assert memory.unsharded == 3200 + 3200 + 4000, (
        "the blocks, their buffer, and the buffer of the prefetched head"
    )


def test_a_unit_of_first_and_last_module_is_reduced_when_both_are_done() -> None:
    """Tied embeddings: the head uses the embedding's weight, so its gradient exists from the head's backward
    on."""
    modules = {"embed": 0, "layers.0": BLOCK, "head": HEAD}
    model = ModelUnits(modules, [("layers.0",), ("embed", "head")], frozenset(), frozenset())
    plan = make_plan(ParallelConfig(), model, RunShape(2, 8, 5, 1))
    work = with_module(make_work(n_blocks=1), "embed", parameters=0)
    memory = predict_step_memory(plan, work).memory
    assert memory.params == (200 + 500) * 4
    # The gradients of head and embedding and their sum are live; the block's reduction still has its buffer.
    assert memory.buffers == TABLES + 4000 + 3200 + 3200 + 1600
    compiled = predict_step_memory(change(plan, 1, compiled=True), work)
    assert compiled.memory.buffers == memory.buffers - 3200, "added in place"


def test_frozen_parameters_have_no_gradients_no_moments_and_no_reduction() -> None:
    work = dataclasses.replace(make_work(), trained={"head": 0.0, "embed": 0.5})
    memory = predict(2, work=work).memory
    assert memory.params == SHARDS
    assert memory.grads == (200 + 200 + 200) * 4
    assert memory.optimizer == 2 * memory.grads


def test_what_comes_before_the_first_trained_module_keeps_nothing_and_has_no_backward() -> None:
    work = dataclasses.replace(make_work(), trained={"embed": 0.0, "layers.0": 0.0})
    step = predict(2, work=work)
    assert step.memory.activations == 300, "of the second block's backward only"
    assert step.memory.grads == (200 + 500) * 4


@pytest.fixture
def exact_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that grow by bytes, without cuBLAS's workspaces."""
    monkeypatch.setattr(ledger, "PAGE_BYTES", 1)
    monkeypatch.setattr(ledger, "ALIGNMENT_BYTES", 1)
    monkeypatch.setattr(memory_model, "WORKSPACE_BYTES", 0)


@pytest.mark.usefixtures("exact_pools")
def test_the_pools_by_hand() -> None:
    """Two shards in float32. All-gathers: the last block's buffer, which the forward keeps, and the head's
    behind it. The sharded gradients are on the reduce-scatter stream."""
    pools = predict(2, 3).pools
    assert (pools["all_gather"], pools["reduce_scatter"], pools["all_reduce"]) == (1600 + 4000, SHARDS, 0)
    without = predict(2, 3, forward_prefetch=0, backward_prefetch=0).pools
    assert without["all_gather"] == 4000 + 1600, "the last block's is still kept when the head's is filled"


@pytest.mark.usefixtures("exact_pools")
def test_shards_are_cast_on_the_stream_of_the_all_gathers_before_they_are_sent() -> None:
    """In the last block: the gap that its shard has left, its buffer, the head's shard, the head's buffer."""
    pools = predict(2, 3, work=make_work(dtype_bytes=2), **BF16).pools
    assert pools["all_gather"] == 400 + 800 + 1000 + 2000
    assert predict(2, 3, work=make_work(dtype_bytes=2), **STORED).pools["all_gather"] == 800 + 2000


@pytest.mark.usefixtures("exact_pools")
def test_casts_of_sums_over_replicas_are_on_the_all_reduce_stream() -> None:
    """The sums in float32 stay on the reduce-scatter stream until the backward ends. Without replicas the
    casts are on that stream."""
    work = make_work(dtype_bytes=2)
    pools = predict(4, dp_replicate=2, work=work, **STORED).pools
    assert (pools["reduce_scatter"], pools["all_reduce"]) == (SHARDS, SHARDS // 2)
    alone = predict(2, work=work, **STORED).pools
    assert alone["all_reduce"] == 0
    assert SHARDS // 2 < alone["reduce_scatter"] < SHARDS


EVERY_SCHEDULE: list[dict[str, Any]] = [
    {},
    {"forward_prefetch": 2, "backward_prefetch": 3},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2},
    {"cpu_offload": True},
    {"dp_replicate": 2, "global_batch": 24},
    {"global_batch": 36, "reduce_gradients": "last_micro_batch"},
    {"global_batch": 36, "reshard_after_backward": False},
    {"global_batch": 36, **SAVING, "reshard_after_forward": False},
    {"dp_replicate": 2, **STORED},
    {"activation_checkpoint": "offload"},
    {"strategy": "ddp"},
    STORED,
]


@pytest.mark.usefixtures("exact_pools")
@pytest.mark.parametrize("keys", EVERY_SCHEDULE, ids=str)
def test_the_least_the_peak_and_the_pools_are_in_this_order(keys: dict[str, Any]) -> None:
    """The pools hold the peak, and at most what is live at any time."""
    work = make_work(dtype_bytes=2 if "storage_dtype" in keys else 4)
    for micro in (1, 3, 9):
        plan = make(4, micro, **{k: v * micro // 3 if k == "global_batch" else v for k, v in keys.items()})
        *moments, buffers = least_step_memory(plan, work)
        memory = predict_step_memory(plan, work)
        assert 0 < max(moments) <= memory.peak_bytes <= memory.pool_bytes
        assert 0.5 * memory.pool_bytes < max(moments) + buffers <= memory.pool_bytes
        assert micro != 3 or memory.pool_bytes < 1.6 * memory.memory.total


@pytest.mark.usefixtures("exact_pools")
@pytest.mark.parametrize(
    "keys",
    [*EVERY_SCHEDULE, {"activation_checkpoint": "full", "activation_checkpoint_blocks": 20}],
    ids=str,
)
def test_40_blocks_that_are_one_object_need_what_40_equal_ones_do(keys: dict[str, Any]) -> None:
    """The planner predicts repeated blocks in total instead of one by one."""
    work = make_work(n_blocks=40, dtype_bytes=2 if "storage_dtype" in keys else 4)
    same = {f"layers.{i}": work.modules["layers.0"] for i in range(40)}
    in_total, one_by_one = (
        predict(4, 3, n_blocks=40, work=each, **keys)
        for each in (dataclasses.replace(work, modules={**work.modules, **same}), work)
    )
    assert (in_total.memory, in_total.at_peak) == (one_by_one.memory, one_by_one.at_peak)
    for stream, size in one_by_one.pools.items():
        assert in_total.pools[stream] == pytest.approx(size, rel=0.02), stream


def test_what_is_reserved_is_the_pools_or_on_a_cpu_the_peak_and_what_allocator_and_process_add() -> None:
    pools = {"compute": 7 * GIB, "all_gather": GIB}
    memory = PredictedMemory(MemoryBreakdown(), MemoryBreakdown(params=4 * GIB), pools)
    for kind, of_allocator in (("h100-sxm", 10 * GIB), ("cpu", 5 * GIB)):
        hardware = dataclasses.replace(load_hardware()[kind], reserved_share=0.25, reserved_gib=2.0)
        assert allocator_bytes(memory, hardware) == of_allocator
        assert reserved_bytes(memory, hardware) == of_allocator + 2 * GIB
