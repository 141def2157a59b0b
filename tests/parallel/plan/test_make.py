"""make_plan: keys of a config become the settings of a plan and its units."""

import operator
from typing import Any

from meshwright.parallel.config import CompileConfig, Float8Config
from meshwright.parallel.plan.schema import ContextPlan, MeshPlan, Plan
from meshwright.parallel.plan.strategy import STRATEGIES, describe_strategy
from tests.support.plans import BLOCK, MODEL, TIED, check_facts, make_model, plan_of
from tests.support.tables import try_each

SELECTIVE = {"activation_checkpoint": "selective"}
BUDGET = {"activation_checkpoint": "budget", "activation_budget": 0.25}
HALF = {**SELECTIVE, "selective_policy": "half_matmul"}
FULL = {"activation_checkpoint": "full"}
FIRST_FULL = ["full", "none", "none", "none", "none"]
SUMS = ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce")
KEPT = (*MODEL.attention_ops, *SUMS)
BLOCKS = [f"layers.{i}" for i in range(4)]
SPLIT = {pattern: style for part in MODEL.styles.values() for pattern, style in part.items()}
GATHERED = {pattern: style for pattern, style in SPLIT.items() if style != "loss"}
GATHERED["head.output"] = "gathered_logits"
TENSORWISE = {"float8": Float8Config("tensorwise", min_dim=32)}
LONG = {"seq_len": 4096}


def on_blocks(value: Any, other: Any) -> list[Any]:
    """A setting of the units embed, layers.0 to layers.3, head."""
    return [other, *[value] * 4, other]


def joined(*sizes: int) -> list[str]:
    """The names of units of so many neighboring blocks of five."""
    names, units = [f"layers.{i}" for i in range(5)], []
    for size in sizes:
        units.append("+".join(names[:size]))
        del names[:size]
    return units


# Keys, on 8 processes if not said otherwise, and what the plan then has; units.KEY is that of all units.
MADE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # degrees: dp_shard takes what the others (dp_replicate, tp) leave
    ({"world_size": 1}, {"mesh": MeshPlan(1, 1, 1)}),
    ({}, {"mesh": MeshPlan(1, 8, 1), "tensor.styles": {}, "cpu_offload": False}),
    ({"world_size": 6, "dp_replicate": 3, "dp_shard": "auto"}, {"mesh": MeshPlan(3, 2, 1)}),
    ({"world_size": 16, "tp": 4, "dp_shard": -1, "dp_replicate": 2}, {"mesh": MeshPlan(2, 2, 4)}),
    ({"cp": 2, "tp": 2}, {"mesh": MeshPlan(1, 2, 2, 2), "mesh.shards": 4, "mesh.data_parallel": 2}),
    # batch: micro batch x accumulation x data-parallel ranks; the ranks of a tp group read the same
    ({}, {"micro_batch_size": 1, "accumulation": 1, "global_batch_size": 8}),
    ({"micro": 4, "dp_replicate": 2}, {"accumulation": 1, "global_batch_size": 32}),
    ({"micro": 2, "global_batch": 64, "dp_replicate": 2}, {"accumulation": 4, "global_batch_size": 64}),
    ({"micro": "auto"}, {"micro_batch_size": 1, "global_batch_size": 8}),
    ({"micro": "auto", "global_batch": 64, "tp": 4}, {"micro_batch_size": 32, "global_batch_size": 64}),
    # keys that reach every unit; the last one, with which the backward begins, is never resharded
    ({}, {"units.forward_prefetch": [1] * 6, "units.backward_prefetch": [1] * 6}),
    (
        {"forward_prefetch": 3, "backward_prefetch": 0},
        {"units.forward_prefetch": [3] * 6, "units.backward_prefetch": [0] * 6},
    ),
    ({}, {"units.reshard_after_forward": [*[True] * 5, False]}),
    ({"reshard_after_forward": 4, "model": TIED}, {"units.reshard_after_forward": [*[4] * 4, False]}),
    ({"reshard_after_forward": False}, {"units.reshard_after_forward": [False] * 6}),
    ({"param_dtype": "bfloat16"}, {"units.param_dtype": ["bfloat16"] * 6}),
    ({"reduce_dtype": "bfloat16", "cpu_offload": True}, {"units.reduce_dtype": ["bfloat16"] * 6}),
    ({"cpu_offload": True}, {"cpu_offload": True}),
    # units are those of the model; the order of the forward does not depend on tying
    ({}, {"units.name": ["embed", *BLOCKS, "head"], "modules": ("embed", *BLOCKS, "head")}),
    ({"model": TIED}, {"units.name": [*BLOCKS, "embed+head"], "modules": ("embed", *BLOCKS, "head")}),
    ({}, {"units.compiled": [False, *[True] * 5], "units.unshard_in_backward": [False, *[True] * 5]}),
    ({"model": TIED}, {"units.compiled": [True] * 5, "units.unshard_in_backward": [True] * 5}),
    ({"compile": CompileConfig(enabled=False)}, {"units.compiled": [False] * 6}),
    # neighboring blocks are joined until a unit is large enough, embedding and head are not
    *(
        (
            {"model": make_model(5, tied), "unit_min_params": least, **FULL},
            {"units.name": [*joined(*sizes), "embed+head"] if tied else ["embed", *joined(*sizes), "head"]},
        )
        for least, sizes in [
            (BLOCK, [1] * 5),
            (BLOCK + 1, [2, 2, 1]),
            (3 * BLOCK, [3, 2]),
            (10**12, [5]),
        ]
        for tied in (False, True)
    ),
    # activation checkpointing is for blocks
    ({}, {"units.activation_checkpoint": ["none"] * 6, "units.activation_budget": [1.0] * 6}),
    (FULL, {"units.activation_checkpoint": on_blocks("full", "none")}),
    ({**FULL, "activation_checkpoint_blocks": 0}, {"units.activation_checkpoint": ["none"] * 6}),
    ({**FULL, "activation_checkpoint_blocks": 1, "model": TIED}, {"units.activation_checkpoint": FIRST_FULL}),
    ({**FULL, "activation_checkpoint_blocks": 4}, {"units.activation_checkpoint": on_blocks("full", "none")}),
    (BUDGET, {"units.activation_budget": on_blocks(0.25, 1.0)}),
    # selective policies keep attention and the sums of tp besides
    (SELECTIVE, {"units.saved_ops": on_blocks(("aten.mm", *KEPT), ())}),
    (HALF, {"units.saved_ops": on_blocks(("aten.mm/2", *KEPT), ())}),
    ({**SELECTIVE, "selective_policy": "attention"}, {"units.saved_ops": on_blocks(KEPT, ())}),
    (
        {**SELECTIVE, "selective_policy": "aten.mm, aten.silu/2,"},
        {"units.saved_ops": on_blocks(("aten.mm", "aten.silu/2"), ())},
    ),
    (
        {**SELECTIVE, "selective_policy": "every:3"},
        {"units.activation_checkpoint": ["none", *["none", "none", "full", "none"], "none"]},
    ),
    (
        {**SELECTIVE, "selective_policy": "every:2", "unit_min_params": 2 * BLOCK},
        {"units.activation_checkpoint": ["none", "none", "full", "none"], "units.saved_ops": [()] * 4},
    ),
    # tensor parallelism
    ({"tp": 2}, {"tensor.sequence_parallel": True, "tensor.styles": SPLIT}),
    ({"tp": 2, "sequence_parallel": False}, {"tensor.sequence_parallel": False, "tensor.styles": SPLIT}),
    ({"tp": 2, "loss_parallel": False}, {"tensor.styles": GATHERED}),
    ({"tp_modules": ("attention",), "loss_parallel": False}, {"tensor.sequence_parallel": False}),
    # chunks of the loss: only of logits that are split, and longer than one
    ({**LONG, "tp": 2}, {"loss_chunk_tokens": 2048}),
    ({"seq_len": 2048}, {"loss_chunk_tokens": 0}),
    ({**LONG, "tp": 2, "loss_parallel": False}, {"loss_chunk_tokens": 0}),
    # float8: linears by name, and by the size of a rank's part (wq, wo: 32, w1: 24 with tp=2)
    ({}, {"float8.linears": ()}),
    (TENSORWISE, {"float8.linears": tuple(MODEL.linears)}),
    ({"float8": Float8Config("tensorwise", ("*.wo",), 1)}, {"float8.linears": ("layers.*.wo",)}),
    ({**TENSORWISE, "tp": 2}, {"float8.linears": ("layers.*.wq", "layers.*.wo")}),
    ({**TENSORWISE, "tp": 2, "tp_modules": ("head",)}, {"float8.linears": tuple(MODEL.linears)}),
    # context parallelism: heads where they divide, of which a tp rank has 8 / tp
    ({"cp": 8}, {"context": ContextPlan("heads", MODEL.attention_cores)}),
    ({"cp": 8, "tp": 2, "world_size": 16}, {"context.exchange": "gather"}),
    ({"cp": 8, "tp": 2, "world_size": 16, "tp_modules": ("head",)}, {"context.exchange": "heads"}),
]  # fmt: skip


def look(plan: Plan, name: str) -> Any:
    section, _, key = name.rpartition(".")
    return (
        [getattr(unit, key) for unit in plan.units] if section == "units" else operator.attrgetter(name)(plan)
    )


def test_keys_become_settings() -> None:
    def check(keys: dict[str, Any], expected: dict[str, Any]) -> None:
        plan = plan_of(**keys)
        assert repr({name: look(plan, name) for name in expected}) == repr(expected), (
            "repr, because True == 1"
        )

    try_each(MADE, check)


def test_a_part_left_out_of_tp_modules_is_whole_and_tied_parts_are_both_or_neither() -> None:
    for part in MODEL.styles:
        styles = plan_of(tp=2, tp_modules=tuple(p for p in MODEL.styles if p != part)).tensor.styles
        whole = {name: f"whole_{style}" for name, style in MODEL.styles[part].items() if style != "loss"}
        others = {name: style for name, style in SPLIT.items() if name not in MODEL.styles[part]}
        assert styles == {**others, **whole}
    for parts in ((), ("embedding", "head")):
        styles = plan_of(tp=2, model=TIED, tp_modules=parts).tensor.styles
        assert {styles[name].startswith("whole_") for name in ("embed", "head.output")} == {not parts}


# Strategy -> (dp_replicate, dp_shard) on one node of 8 and on four, and resharding of the blocks
MEANINGS: dict[str, tuple[tuple[int, int], tuple[int, int], bool]] = {
    "full_shard": ((1, 8), (1, 32), True),
    "shard_grad_op": ((1, 8), (1, 32), False),
    "no_shard": ((8, 1), (32, 1), True),
    "ddp": ((8, 1), (32, 1), True),
    "hybrid_shard": ((1, 8), (4, 8), True),
    "hybrid_shard_zero2": ((1, 8), (4, 8), False),
}


def test_a_strategy_is_a_shorthand_for_keys_and_agrees_with_them() -> None:
    assert MEANINGS.keys() == STRATEGIES.keys()
    for name, (*degrees, reshard) in MEANINGS.items():
        for world_size, (replicate, shard) in zip((8, 32), degrees, strict=True):
            keys: dict[str, Any] = {
                "dp_replicate": replicate,
                "dp_shard": shard,
                "reshard_after_forward": reshard,
            }
            plan = plan_of(world_size, **keys)
            assert look(plan, "units.reshard_after_forward")[:-1] == [reshard] * 5
            line = describe_strategy(name, plan.mesh)
            check_facts(line, f"strategy {name}: ... dp_replicate {replicate}, dp_shard {shard}")
            assert ("one node" in line) == (name.startswith("hybrid") and world_size == 8)
            for given in ({}, {"dp_shard": -1}, keys):
                assert plan_of(world_size, strategy=name, **given) == plan, (name, given)
        assert plan_of(1, strategy=name).mesh == MeshPlan(1, 1, 1)
    for name, mesh in (("full_shard", (1, 16, 2)), ("no_shard", (16, 1, 2)), ("hybrid_shard", (4, 4, 2))):
        assert plan_of(32, strategy=name, tp=2).mesh == MeshPlan(*mesh), "tp takes its ranks from a node's"
