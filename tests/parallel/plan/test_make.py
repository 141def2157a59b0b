"""make_plan: keys of a config become the settings of a plan and its units."""

import dataclasses

import pytest

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.schema import ModelUnits
from tests.support.plans import BLOCK, MODEL, TIED, make_model, plan_of


@pytest.mark.parametrize(
    ("world_size", "keys", "mesh"),
    [
        (1, {}, (1, 1, 1)),
        (8, {}, (1, 8, 1)),
        (8, {"dp_replicate": 2}, (2, 4, 1)),
        (8, {"dp_replicate": 4, "dp_shard": 2, "tp": 1}, (4, 2, 1)),
        (6, {"dp_replicate": 3, "dp_shard": "auto"}, (3, 2, 1)),
        (8, {"tp": 2, "dp_replicate": 2}, (2, 2, 2)),
        (16, {"tp": 4, "dp_shard": -1, "dp_replicate": 2}, (2, 2, 4)),
    ],
)
def test_dp_shard_takes_what_the_other_degrees_leave(
    world_size: int, keys: dict[str, int], mesh: tuple[int, ...]
) -> None:
    plan = plan_of(world_size, **keys)
    assert dataclasses.astuple(plan.mesh) == (*mesh, 1)
    assert plan.mesh.world_size == world_size


def test_auto_is_the_documented_simple_default() -> None:
    plan = plan_of()
    assert (plan.mesh.tp, plan.tensor.styles, plan.cpu_offload) == (1, {}, False)
    unit = plan.units[1]
    assert (unit.reshard_after_forward, unit.forward_prefetch, unit.backward_prefetch) == (True, 1, 1)
    assert (unit.activation_checkpoint, unit.saved_ops, unit.activation_budget) == ("none", (), 1.0)


def test_a_key_given_a_value_reaches_every_unit_it_applies_to() -> None:
    plan = plan_of(
        reshard_after_forward=4,
        forward_prefetch=3,
        backward_prefetch=0,
        activation_checkpoint="full",
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        cpu_offload=True,
    )
    for unit in plan.units:
        assert (unit.forward_prefetch, unit.backward_prefetch) == (3, 0)
        assert (unit.param_dtype, unit.reduce_dtype) == ("bfloat16", "bfloat16")
    assert [unit.reshard_after_forward for unit in plan.units] == [4, 4, 4, 4, 4, False]
    assert [unit.activation_checkpoint for unit in plan.units] == ["none", *["full"] * 4, "none"]
    assert plan.cpu_offload


@pytest.mark.parametrize("reshard", ["auto", True, False, 2])
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_the_last_unit_is_never_resharded_after_its_forward(
    model: ModelUnits, reshard: bool | int | str
) -> None:
    *others, last = plan_of(model=model, reshard_after_forward=reshard).units
    assert last.reshard_after_forward is False
    assert {unit.reshard_after_forward for unit in others} == {True if reshard == "auto" else reshard}


def test_units_are_those_of_the_model_in_its_order() -> None:
    assert [unit.name for unit in plan_of().units] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert [unit.name for unit in plan_of(model=TIED).units] == [
        *(f"layers.{i}" for i in range(4)),
        "embed+head",
    ]
    assert plan_of(model=TIED).modules == plan_of().modules == tuple(MODEL.modules), (
        "the order of the forward does not depend on tying"
    )


def test_units_are_compiled_where_the_model_says_so_and_compiling_is_on() -> None:
    assert [unit.compiled for unit in plan_of().units] == [False, *[True] * 5]
    assert plan_of(model=TIED).units[-1].compiled, "the head of a tied unit is compiled"
    assert not any(unit.compiled for unit in plan_of(compile=CompileConfig(enabled=False)).units)


@pytest.mark.parametrize(
    ("least", "blocks"),
    [
        (0, [1, 1, 1, 1, 1]),
        (BLOCK, [1, 1, 1, 1, 1]),
        (BLOCK + 1, [2, 2, 1]),
        (3 * BLOCK, [3, 2]),
        (10**12, [5]),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_neighbouring_blocks_join_until_a_unit_is_large_enough(
    least: int, blocks: list[int], tied: bool
) -> None:
    """The last unit of blocks may be smaller; embedding and head are not joined."""
    units = plan_of(model=make_model(5, tied), unit_min_params=least, activation_checkpoint="full").units
    assert [len(unit.modules) for unit in units if unit.activation_checkpoint == "full"] == blocks
    assert [m for unit in units for m in unit.modules if m.startswith("layers")] == [
        f"layers.{i}" for i in range(5)
    ]
    others = [unit.name for unit in units if unit.activation_checkpoint == "none"]
    assert others == (["embed+head"] if tied else ["embed", "head"])


@pytest.mark.parametrize(
    ("policy", "least", "modes"),
    [
        ("matmul", 0, ["selective"] * 4),
        ("aten.mm,aten.silu/2", 0, ["selective"] * 4),
        ("every:1", 0, ["full"] * 4),
        ("every:3", 0, ["none", "none", "full", "none"]),
        ("every:2", 2 * BLOCK, ["none", "full"]),
    ],
)
def test_a_selective_policy_reaches_the_blocks_it_names(policy: str, least: int, modes: list[str]) -> None:
    """Joined blocks count as one."""
    keys = {"activation_checkpoint": "selective", "selective_policy": policy, "unit_min_params": least}
    units = plan_of(**keys).units
    assert [unit.activation_checkpoint for unit in units] == ["none", *modes, "none"]
    assert all(bool(unit.saved_ops) == (unit.activation_checkpoint == "selective") for unit in units)


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        ("matmul", ["aten.mm"]),
        ("half_matmul", ["aten.mm/2"]),
        ("attention", []),
        ("aten.mm, aten.silu/2,", None),
    ],
)
def test_a_named_policy_keeps_attention_and_tp_sums_besides(policy: str, ops: list[str] | None) -> None:
    saved = plan_of(activation_checkpoint="selective", selective_policy=policy).units[1].saved_ops
    sums = ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce")
    assert saved == (("aten.mm", "aten.silu/2") if ops is None else (*ops, *MODEL.attention_ops, *sums))


def test_a_budget_is_for_the_blocks_alone() -> None:
    units = plan_of(activation_checkpoint="budget", activation_budget=0.25).units
    assert [(unit.activation_checkpoint, unit.activation_budget) for unit in units] == [
        ("none", 1.0),
        *[("budget", 0.25)] * 4,
        ("none", 1.0),
    ]


@pytest.mark.parametrize(
    ("micro", "global_batch", "resolved"),
    [
        (1, -1, (1, 1, 8)),
        (4, -1, (4, 1, 32)),
        (2, 64, (2, 4, 64)),
        (8, 64, (8, 1, 64)),
        ("auto", -1, (1, 1, 8)),
        ("auto", 64, (8, 1, 64)),
        ("auto", 8, (1, 1, 8)),
    ],
)
def test_micro_batch_times_accumulation_times_ranks_is_the_global_batch(
    micro: int | str, global_batch: int, resolved: tuple[int, int, int]
) -> None:
    plan = plan_of(8, micro, global_batch, dp_replicate=2)
    assert (plan.micro_batch_size, plan.accumulation, plan.global_batch_size) == resolved


def test_ranks_of_one_tp_group_see_the_same_data() -> None:
    plan = plan_of(8, "auto", 64, tp=4)
    assert (plan.mesh.data_parallel, plan.micro_batch_size, plan.global_batch_size) == (2, 32, 64)


# Tensor parallelism: the table of styles

SPLIT = {pattern: style for part in MODEL.styles.values() for pattern, style in part.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_splits_every_part_and_shares_out_the_tokens_if_asked(sequence_parallel: bool) -> None:
    tensor = plan_of(tp=2, sequence_parallel=sequence_parallel).tensor
    assert (tensor.sequence_parallel, tensor.styles) == (sequence_parallel, SPLIT)


def test_without_loss_parallel_the_logits_are_gathered() -> None:
    gathered = {**SPLIT, "head.output": "gathered_logits"}
    del gathered["head.loss"]
    assert plan_of(tp=2, loss_parallel=False).tensor.styles == gathered


@pytest.mark.parametrize("part", MODEL.styles)
def test_a_part_left_out_of_tp_modules_is_whole(part: str) -> None:
    styles = plan_of(tp=2, tp_modules=tuple(p for p in MODEL.styles if p != part)).tensor.styles
    whole = {pattern: f"whole_{style}" for pattern, style in MODEL.styles[part].items() if style != "loss"}
    others = {pattern: style for pattern, style in SPLIT.items() if pattern not in MODEL.styles[part]}
    assert styles == {**others, **whole}


def test_one_tp_rank_has_no_styles_whatever_is_asked() -> None:
    plan = plan_of(tp=1, tp_modules=("attention",), loss_parallel=False)
    assert (plan.tensor.styles, plan.tensor.sequence_parallel) == ({}, False)


@pytest.mark.parametrize(
    "parts", [(), ("attention",), ("embedding", "head"), ("embedding", "feed_forward", "head")], ids=str
)
def test_tied_parts_are_split_both_or_neither(parts: tuple[str, ...]) -> None:
    plan = plan_of(tp=2, model=TIED, tp_modules=parts)
    assert plan.tensor.styles["embed"].startswith("whole_") == plan.tensor.styles["head.output"].startswith(
        "whole_"
    )
