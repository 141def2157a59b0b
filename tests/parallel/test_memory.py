"""The memory estimate against numbers worked out by hand."""

import dataclasses
from typing import Any

import pytest

from parallel.config import ParallelConfig
from parallel.make_plan import Job, make_plan
from parallel.plan import ModelUnits, Plan
from parallel.planner.memory import MemoryEstimate, ModelFootprint, ModuleFootprint, estimate_memory
from tests.parallel.plans import change

GIB = 2**30


def make(n_blocks: int, world_size: int, micro: int = 1, **keys: Any) -> Plan:
    blocks = [f"layers.{i}" for i in range(n_blocks)]
    modules = dict.fromkeys(["embed", *blocks, "head"], 401)
    model = ModelUnits(modules, [(name,) for name in modules], frozenset(blocks), frozenset(blocks))
    return make_plan(ParallelConfig(**keys), model, Job(world_size, 8, 5, micro))


def model_of(embedding: int, block: ModuleFootprint, n_blocks: int, head: int, logits: int) -> ModelFootprint:
    modules = {"embed": ModuleFootprint(embedding), "head": ModuleFootprint(head)}
    return ModelFootprint(modules | {f"layers.{i}": block for i in range(n_blocks)}, logits)


# embedding, two blocks, head; the block keeps 50 values per token, of which 30 are products with the 10 of its input
SMALL = model_of(800, ModuleFootprint(401, everything=50, products=30, input=10), 2, 1000, logits=100)
# 4096 wide, 14336 in the feed-forward, 8 kv heads of 128, 128256 ids
BLOCK_8B = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
SAVED_8B = 7 * 4096 + 2 * 1024 + 3 * 14336
LLAMA_8B = model_of(128256 * 4096, ModuleFootprint(BLOCK_8B, SAVED_8B, 0, 4096), 32, 128256 * 4096 + 4096, logits=128256)
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def test_a_small_plan_by_hand() -> None:
    """Two shards, a micro batch of 3 sequences of 5 tokens, all in float32."""
    got = estimate_memory(make(2, world_size=2, micro=3), SMALL, seq_len=5)
    sharded = (400 + 201 + 201 + 500) * 4  # the odd unit is rounded up
    assert got == MemoryEstimate(
        params=sharded,
        grads=sharded,
        optimizer=2 * sharded,
        unsharded=(1000 + 800 + 401) * 4,  # the head stays; of the others the largest, and one prefetched
        activations=2 * 50 * 15 * 4,
        logits=15 * 100 * (4 + 4 + 4),
        buffers=1000 * (4 + 4),
    )
    assert got.total == sum(dataclasses.asdict(got).values())


def test_the_same_plan_in_bfloat16_by_hand() -> None:
    got = estimate_memory(make(2, world_size=2, micro=3, **BF16), SMALL, seq_len=5)
    assert got.params == (400 + 201 + 201 + 500) * 4, "the sharded weights stay float32"
    assert got.unsharded == (1000 + 800 + 401) * 2
    assert got.activations == 2 * 50 * 15 * 2
    assert got.logits == 15 * 100 * (2 + 4 + 2)
    assert got.buffers == 1000 * (2 + 4)


@pytest.mark.parametrize(("shards", "per_rank"), [(1, 2602), (2, 1302), (4, 652), (8, 327)])
def test_shards_divide_parameters_gradients_and_optimizer(shards: int, per_rank: int) -> None:
    got = estimate_memory(make(2, shards), SMALL, 5)
    assert (got.params, got.grads, got.optimizer) == (4 * per_rank, 4 * per_rank, 8 * per_rank)


def test_replication_divides_nothing() -> None:
    assert estimate_memory(make(2, 8, dp_replicate=4), SMALL, 5) == estimate_memory(make(2, 2), SMALL, 5)


def test_full_activation_checkpointing_keeps_inputs_and_one_recomputed_block() -> None:
    none, full = (estimate_memory(make(2, 2, 3, activation_checkpoint=a), SMALL, 5) for a in ("none", "full"))
    assert full.activations == (2 * 10 + 50) * 15 * 4 < none.activations
    assert dataclasses.replace(full, activations=0) == dataclasses.replace(none, activations=0)


def test_selective_checkpointing_keeps_products_and_recomputes_the_rest_of_one_block() -> None:
    plan = make(2, 2, 3, activation_checkpoint="selective", selective_policy="aten.mm")
    assert estimate_memory(plan, SMALL, 5).activations == (2 * 30 + (50 - 30 + 10)) * 15 * 4


@pytest.mark.parametrize(("policy", "values"), [("every:2", 50 + 10 + 50), ("every:1", 10 + 10 + 50)])
def test_every_nth_block_keeps_its_input_only(policy: str, values: int) -> None:
    plan = make(2, 2, 3, activation_checkpoint="selective", selective_policy=policy)
    assert estimate_memory(plan, SMALL, 5).activations == values * 15 * 4


@pytest.mark.parametrize(("budget", "kept"), [(0.0, 10), (0.5, 30), (1.0, 50)])
def test_a_budget_keeps_its_share_between_the_input_and_everything(budget: float, kept: int) -> None:
    plan = make(2, 2, 3, activation_checkpoint="budget", activation_budget=budget)
    recomputed = 50 - kept + 10
    assert estimate_memory(plan, SMALL, 5).activations == (2 * kept + recomputed) * 15 * 4


def test_offloaded_parameters_gradients_and_moments_are_not_on_the_device() -> None:
    here, there = (estimate_memory(make(2, 2, cpu_offload=offload), SMALL, 5) for offload in (False, True))
    assert (there.params, there.grads, there.optimizer) == (0, 0, 0)
    assert dataclasses.replace(there, params=here.params, grads=here.grads, optimizer=here.optimizer) == here


def test_units_joined_by_size_are_gathered_together() -> None:
    got = estimate_memory(make(2, 2, unit_min_params=500), SMALL, 5)
    assert got.unsharded == (1000 + 802 + 800) * 4
    assert got.params == (400 + 401 + 500) * 4, "one unit of 802, so none is padded"


def test_a_list_gathers_what_it_names() -> None:
    plan = change(make(2, 2, forward_prefetch=0, backward_prefetch=0), 0, forward_prefetch=("layers.0", "layers.1"))
    assert estimate_memory(plan, SMALL, 5).unsharded == (1000 + 800 + 401 + 401) * 4


def test_bfloat16_of_one_unit_is_counted_for_that_unit() -> None:
    mixed = change(make(2, 2, 3), 1, param_dtype="bfloat16")
    assert estimate_memory(mixed, SMALL, 5).activations == 50 * 15 * (2 + 4)


@pytest.mark.parametrize(("ahead", "gathered"), [((0, 0), [800]), ((1, 0), [800, 401]), ((0, 2), [800, 401, 401])])
def test_prefetching_further_gathers_more_units_at_once(ahead: tuple[int, int], gathered: list[int]) -> None:
    plan = make(2, 2, forward_prefetch=ahead[0], backward_prefetch=ahead[1])
    assert estimate_memory(plan, SMALL, 5).unsharded == (1000 + sum(gathered)) * 4


def test_units_that_are_not_resharded_stay_gathered() -> None:
    plan = make(2, 2, reshard_after_forward=False)
    assert estimate_memory(plan, SMALL, 5).unsharded == (800 + 401 + 401 + 1000) * 4


def test_resharding_to_small_groups_keeps_more_than_resharding_to_all() -> None:
    all_ranks, pairs = (estimate_memory(make(2, 8, reshard_after_forward=r), SMALL, 5) for r in (True, 2))
    assert pairs.unsharded > all_ranks.unsharded


def test_activations_and_logits_grow_with_tokens_and_nothing_else_does() -> None:
    one, two = (estimate_memory(make(2, 2), SMALL, seq_len) for seq_len in (5, 10))
    assert (two.activations, two.logits) == (2 * one.activations, 2 * one.logits)
    assert dataclasses.replace(two, activations=0, logits=0) == dataclasses.replace(one, activations=0, logits=0)
    assert estimate_memory(make(2, 2, micro=2), SMALL, 5) == two


def test_the_8b_on_8_ranks_is_plausible() -> None:
    got = estimate_memory(make(32, 8, **BF16), LLAMA_8B, seq_len=8192)
    assert sum(module.parameters for module in LLAMA_8B.modules.values()) == 8_030_261_248
    assert got.params / GIB == pytest.approx(3.74, abs=0.005)
    assert (got.grads, got.optimizer) == (got.params, 2 * got.params)
    assert got.activations / GIB == pytest.approx(32 * 1152 / 1024, abs=0.01), "36 GiB: 1,152 MiB a block"
    assert got.logits / GIB == pytest.approx(7.83, abs=0.01), "8,192 tokens x 128,256 ids x 8 bytes"
    assert got.unsharded / GIB == pytest.approx(2.36, abs=0.01), "head, embedding and one block, in bfloat16"
    full = estimate_memory(make(32, 8, activation_checkpoint="full", **BF16), LLAMA_8B, seq_len=8192)
    assert full.activations / GIB == pytest.approx((32 * 64 + 1152) / 1024, abs=0.01)
    assert full.total < 40 * GIB < got.total < 79 * GIB
