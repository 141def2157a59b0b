"""make_plan: a config becomes a plan, or one report of all mistakes."""

import dataclasses
import itertools
import re
from collections import Counter
from typing import Any

import pytest

from meshwright.parallel.config import CompileConfig, Float8Config
from meshwright.parallel.plan.schema import MeshPlan, ModelUnits
from tests.support.plans import BLOCK, MODEL, TIED, make_model, plan_of, report_of


@pytest.mark.parametrize(
    ("world_size", "keys", "mesh"),
    [
        (1, {}, (1, 1, 1)),
        (8, {}, (1, 8, 1)),
        (8, {"dp_shard": -1}, (1, 8, 1)),
        (8, {"dp_shard": 8}, (1, 8, 1)),
        (8, {"dp_replicate": 2}, (2, 4, 1)),
        (8, {"dp_replicate": 8}, (8, 1, 1)),
        (8, {"dp_replicate": 4, "dp_shard": 2, "tp": 1}, (4, 2, 1)),
        (6, {"dp_replicate": 3, "dp_shard": "auto"}, (3, 2, 1)),
        (8, {"tp": 2}, (1, 4, 2)),
        (8, {"tp": 2, "dp_replicate": 2}, (2, 2, 2)),
        (8, {"tp": 8}, (1, 1, 8)),
        (16, {"tp": 4, "dp_shard": -1, "dp_replicate": 2}, (2, 2, 4)),
    ],
)
def test_dp_shard_takes_what_the_other_degrees_leave(
    world_size: int, keys: dict[str, int], mesh: tuple[int, ...]
) -> None:
    plan = plan_of(world_size, **keys)
    assert dataclasses.astuple(plan.mesh) == (*mesh, 1)
    assert plan.mesh.world_size == world_size
    assert plan.mesh.data_parallel * plan.mesh.tp == world_size


def test_auto_is_the_documented_simple_default() -> None:
    plan = plan_of()
    assert (plan.mesh.tp, plan.tensor.styles, plan.cpu_offload) == (1, {}, False)
    for unit in plan.units[:-1]:
        assert unit.reshard_after_forward is True
        assert (unit.forward_prefetch, unit.backward_prefetch, unit.activation_checkpoint) == (1, 1, "none")
        assert (unit.output_dtype, unit.saved_ops, unit.activation_budget) == ("same", (), 1.0)


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
    ("policy", "modes"),
    [
        ("matmul", ["selective"] * 4),
        ("attention", ["selective"] * 4),
        ("every:1", ["full"] * 4),
        ("every:2", ["none", "full", "none", "full"]),
        ("every:3", ["none", "none", "full", "none"]),
        ("aten.mm,aten.silu/2", ["selective"] * 4),
    ],
)
def test_a_selective_policy_reaches_the_blocks_it_names(policy: str, modes: list[str]) -> None:
    units = plan_of(activation_checkpoint="selective", selective_policy=policy).units
    assert [unit.activation_checkpoint for unit in units] == ["none", *modes, "none"]
    assert all(bool(unit.saved_ops) == (unit.activation_checkpoint == "selective") for unit in units)


def test_every_nth_counts_units_where_blocks_are_joined() -> None:
    plan = plan_of(activation_checkpoint="selective", selective_policy="every:2", unit_min_params=2 * BLOCK)
    modes = [unit.activation_checkpoint for unit in plan.units]
    assert modes == ["none", "none", "full", "none"]


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

SPLIT = {
    "embed": "vocab",
    "layers.*.norm": "sequence",
    "layers.*.wq": "colwise",
    "layers.*.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.w1": "colwise",
    "layers.*.w2": "rowwise",
    "head.norm": "sequence",
    "head.output": "logits",
    "head.loss": "loss",
}


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


TP_MISTAKES = [
    ({"tp": 16, "world_size": 16}, ["parallel.tp=16 must divide model.n_kv_heads=8. Use 1, 2, 4 or 8."]),
    (
        {"tp": 5, "world_size": 5},
        [
            "parallel.tp=5 must divide model.vocab_size=96. Use 1, 2, 4 or 8.",
            "parallel.tp=5 must divide model.n_heads=16. Use 1, 2, 4 or 8.",
            "parallel.tp=5 must divide model.n_kv_heads=8. Use 1, 2, 4 or 8.",
            "parallel.tp=5 must divide model.ffn_dim=48. Use 1, 2, 4 or 8.",
            "parallel.tp=5 must divide train.seq_len=64. Use 1, 2, 4 or 8.",
        ],
    ),
    ({"tp": 32, "world_size": 32, "tp_modules": ("embedding", "head")}, []),
    (
        {"tp": 9, "world_size": 9, "tp_modules": ("feed_forward",)},
        [
            "parallel.tp=9 must divide model.ffn_dim=48. Use 1, 2, 4, 8 or 16.",
            "parallel.tp=9 must divide train.seq_len=64. Use 1, 2, 4, 8 or 16.",
        ],
    ),
    ({"tp": 3, "world_size": 3, "tp_modules": ("feed_forward",), "sequence_parallel": False}, []),
    ({"tp": 2, "world_size": 2, "seq_len": 63}, ["parallel.tp=2 must divide train.seq_len=63. Use 1."]),
    ({"tp": 2, "world_size": 2, "seq_len": 63, "sequence_parallel": False}, []),
    (
        {"tp": 2, "world_size": 2, "tp_modules": ("atention", "head", "embedding")},
        ["parallel.tp_modules: atention is not a part of this model. Did you mean attention?"],
    ),
    (
        {"tp": 2, "world_size": 2, "tp_modules": ("xyz",)},
        [
            "parallel.tp_modules: xyz is not a part of this model. Use embedding, attention, "
            "feed_forward, head."
        ],
    ),
    (
        {"tp": 2, "world_size": 2, "tp_modules": ("head",), "model": TIED},
        [
            "parallel.tp_modules=['head']: embedding and head share a weight in this model: list both or "
            "neither"
        ],
    ),
]


@pytest.mark.parametrize(
    ("requested", "lines"), TP_MISTAKES, ids=lambda v: "" if isinstance(v, list) else str(v)[:60]
)
def test_all_that_the_tp_degree_must_divide_is_in_one_report(
    requested: dict[str, Any], lines: list[str]
) -> None:
    if lines:
        assert report_of(**requested).splitlines() == lines
    else:
        assert plan_of(**requested).mesh.tp == requested["tp"]


MISTAKES = [
    ({"dp_shard": 3}, ["dp_shard=3", "3 processes", "this run has 8", "use 3 processes", "dp_shard=-1"]),
    ({"dp_shard": 16}, ["dp_shard=16", "16 processes", "this run has 8"]),
    ({"dp_replicate": 3}, ["dp_replicate=3", "this run has 8"]),
    ({"dp_replicate": 16}, ["dp_replicate=16", "16 processes", "this run has 8"]),
    ({"dp_shard": 8, "tp": 2}, ["dp_shard=8 x tp=2", "16 processes", "this run has 8"]),
    ({"dp_replicate": 0}, ["parallel.dp_replicate=0", "at least 1"]),
    ({"dp_shard": 0}, ["parallel.dp_shard=0", "at least 1", "-1: all that is left"]),
    ({"dp_shard": -2}, ["parallel.dp_shard=-2", "at least 1"]),
    ({"dp_replicate": -1}, ["parallel.dp_replicate=-1", "at least 1"]),
    ({"tp": 0}, ["parallel.tp=0", "at least 1"]),
    ({"tp": -1}, ["parallel.tp=-1", "at least 1"]),
    ({"tp": 0, "strategy": "full_shard"}, ["parallel.tp=0", "at least 1"]),
    ({"reshard_after_forward": 3}, ["parallel.reshard_after_forward=3", "dp_shard=8", "true, false, 2, 4 "]),
    ({"reshard_after_forward": 0}, ["parallel.reshard_after_forward=0", "true, false, 2, 4 "]),
    (
        {"reshard_after_forward": 1},
        ["parallel.reshard_after_forward=1", "true, false, 2, 4 ", "size of the groups"],
    ),
    (
        {"reshard_after_forward": 8, "dp_replicate": 2},
        ["parallel.reshard_after_forward=8", "dp_shard=4", "true, false, 2 "],
    ),
    (
        {"reshard_after_forward": 2, "tp": 2},
        ["parallel.reshard_after_forward=2 with tp=2 hangs in torch", "use true or false"],
    ),
    ({"forward_prefetch": -1}, ["parallel.forward_prefetch=-1", "0 (none)"]),
    ({"backward_prefetch": -3}, ["parallel.backward_prefetch=-3", "0 (none)"]),
    ({"unit_min_params": -1}, ["parallel.unit_min_params=-1", "0 (a unit per block)"]),
    ({"param_dtype": "float16"}, ["parallel.param_dtype=float16", "gradient scaler", "bfloat16"]),
    ({"reduce_dtype": "float16"}, ["parallel.reduce_dtype=float16", "gradient scaler", "bfloat16"]),
    ({"param_dtype": "int8"}, ["parallel.param_dtype=int8", "float32, bfloat16"]),
    (
        {"compile": CompileConfig(backend="aot_eager", mode="max-autotune")},
        ["parallel.compile.mode=max-autotune", "inductor", "aot_eager", "use default"],
    ),
    (
        {"compile": CompileConfig(mode="fast")},
        ["parallel.compile.mode=fast", "default", "reduce-overhead", "max-autotune"],
    ),
    (
        {"compile": CompileConfig(backend="indctor")},
        ["parallel.compile.backend=indctor", "Did you mean inductor?"],
    ),
    (
        {"activation_checkpoint": "budget", "activation_budget": 1.5},
        ["parallel.activation_budget=1.5", "between 0", "and 1"],
    ),
    (
        {"activation_checkpoint": "budget", "activation_budget": float("nan")},
        ["parallel.activation_budget=nan", "between 0"],
    ),
    (
        {"activation_checkpoint": "budget", "compile": CompileConfig(enabled=False)},
        ["parallel.activation_checkpoint=budget", "compiling is off", "full, selective"],
    ),
    (
        {"activation_checkpoint": "budget", "compile": CompileConfig(backend="aot_eager")},
        ["parallel.activation_checkpoint=budget", "inductor", "not aot_eager"],
    ),
    (
        {"activation_checkpoint": "selective", "selective_policy": "every:0"},
        ["parallel.selective_policy=every:0", "N at least 1"],
    ),
    (
        {"activation_checkpoint": "selective", "selective_policy": "every:x"},
        ["parallel.selective_policy=every:x", "every:N"],
    ),
    (
        {"activation_checkpoint": "selective", "selective_policy": "aten.mm,aten.nosuch"},
        ["parallel.selective_policy", "aten.nosuch is not an operator", "matmul", "aten.mm/2"],
    ),
    (
        {"activation_checkpoint": "selective", "selective_policy": "aten.mm/0"},
        ["aten.mm/0 is not an operator"],
    ),
    (
        {"activation_checkpoint": "selective", "selective_policy": " , "},
        ["parallel.selective_policy", "keeps nothing"],
    ),
    ({"micro": 0}, ["train.micro_batch_size=0", "at least 1"]),
    ({"micro": -1, "global_batch": 8}, ["train.micro_batch_size=-1", "at least 1"]),
    ({"global_batch": 12}, ["train.global_batch_size=12", "multiple", "1 x 8", "nearest is 16"]),
    ({"micro": 4, "global_batch": 40}, ["train.global_batch_size=40", "4 x 8", "nearest is 32", "-1"]),
    ({"global_batch": 0}, ["train.global_batch_size=0", "nearest is 8"]),
    ({"global_batch": -2}, ["train.global_batch_size=-2", "nearest is 8"]),
    ({"micro": "auto", "global_batch": 4}, ["train.global_batch_size=4", "1 x 8", "nearest is 8"]),
]


@pytest.mark.parametrize(("requested", "words"), MISTAKES, ids=str)
def test_a_mistake_is_reported_with_key_value_and_way_out(
    requested: dict[str, Any], words: list[str]
) -> None:
    report = report_of(**requested)
    assert [word for word in words if word not in report] == [], report
    assert "\n" not in report, "one mistake, one line"


def test_several_mistakes_come_in_one_report() -> None:
    report = report_of(
        param_dtype="float16",
        reduce_dtype="fp32",
        forward_prefetch=-1,
        dp_shard=3,
        reshard_after_forward=2,
        tp=3,
        compile=CompileConfig(backend="eager", mode="reduce-overhead"),
    )
    keys = [
        "param_dtype=float16",
        "reduce_dtype=fp32",
        "forward_prefetch=-1",
        "compile.mode",
        "dp_shard=3 x tp=3",
        "reshard_after_forward=2",
        "tp=3 must divide model.n_heads=16",
        "model.n_kv_heads=8",
        "train.seq_len=64",
    ]
    assert [key for key in keys if key not in report] == []
    assert report.count("\n") == len(keys) - 1


def test_a_wrong_batch_and_a_wrong_dtype_come_in_one_report() -> None:
    assert report_of(global_batch=12, param_dtype="float16").count("\n") == 1


def test_two_mistakes_are_two_lines_and_none_is_said_twice() -> None:
    """A mistake next to another is reported as it is alone. Pairs with a strategy or compiler settings are
    left out, because these change what other keys may be."""

    def keys(**requested: Any) -> Counter[str]:
        lines = report_of(**requested).splitlines()
        assert len(lines) == len(set(lines)), lines
        return Counter(re.split("[=:]", line)[0] for line in lines)

    interacting = ("strategy", "compile")
    alone = [
        (requested, keys(**requested))
        for requested, _ in MISTAKES
        if requested.keys().isdisjoint(interacting)
    ]
    for (first, first_keys), (second, second_keys) in itertools.combinations(alone, 2):
        if first.keys().isdisjoint(second):
            assert keys(**first, **second) <= first_keys + second_keys, (first, second)


@pytest.mark.parametrize(
    ("requested", "key"),
    [
        ({"strategy": "fsdp"}, "parallel.strategy"),
        ({"tp": 2, "tp_modules": ("hed", "attention", "hed")}, "parallel.tp_modules"),
        ({"tp": 2, "tp_modules": ("head",), "model": TIED}, "parallel.tp_modules"),
        (
            {"activation_checkpoint": "full", "activation_checkpoint_blocks": 5},
            "parallel.activation_checkpoint_blocks",
        ),
        ({"activation_checkpoint_blocks": 2}, "parallel.activation_checkpoint_blocks"),
        ({"activation_checkpoint": "half"}, "parallel.activation_checkpoint"),
        ({"storage_dtype": "bfloat16"}, "parallel.storage_dtype"),
        ({"attention": "flush"}, "parallel.attention"),
        ({"loss_chunk_tokens": 3}, "parallel.loss_chunk_tokens"),
        ({"async_tp": True}, "parallel.async_tp"),
        ({"float8": Float8Config("tensorwise", linears=("a", "a"))}, "parallel.float8.linears"),
        ({"float8": Float8Config("tensorwise", linears=(), min_dim=0)}, "parallel.float8.min_dim"),
        ({"float8": Float8Config("tensorwise", linears=())}, "parallel.float8.recipe"),
        ({"dp_replicate": 3, "reshard_after_forward": 4}, "parallel"),
        ({"tp": -1, "dp_shard": -8, "global_batch": 3}, "parallel.dp_shard parallel.tp"),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_a_mistake_is_said_once_of_the_key_that_it_is_in(requested: dict[str, Any], key: str) -> None:
    """A mistake that a plan cannot express is removed from the plan, so that it is not reported twice."""
    lines = report_of(**requested).splitlines()
    assert [re.split("[=:]", line)[0] for line in lines] == key.split(), lines


def test_a_mesh_is_the_product_of_its_degrees() -> None:
    mesh = MeshPlan(dp_replicate=2, dp_shard=3, tp=4)
    assert (mesh.world_size, mesh.data_parallel) == (24, 6)
