"""make_plan: keys of a config become the settings of a plan and its units."""

import dataclasses
import operator
from typing import Any

import yaml

from meshwright.parallel.plan.schema import MeshPlan, Plan
from meshwright.parallel.plan.strategy import STRATEGIES, describe_strategy
from tests.support.plans import MODEL, TIED, check_facts, keys_from, plan_of
from tests.support.tables import rows, try_each

SPLIT = {pattern: style for part in MODEL.styles.values() for pattern, style in part.items()}
# Keys on 8 processes -> what the plan then has. units.KEY is of all units (embed, four blocks, head), mesh is
# dp_replicate, dp_shard, tp, cp.
MADE = """
# degrees: dp_shard takes what the others leave
world_size: 1 -> mesh: [1, 1, 1, 1]
tp: 1 -> mesh: [1, 8, 1, 1], tensor.styles: {}, cpu_offload: false
world_size: 6, dp_replicate: 3, dp_shard: auto -> mesh: [3, 2, 1, 1]
world_size: 16, tp: 4, dp_shard: -1, dp_replicate: 2 -> mesh: [2, 2, 4, 1]
cp: 2, tp: 2 -> mesh: [1, 2, 2, 2], mesh.shards: 4, mesh.data_parallel: 2
# batch: micro batch x accumulation x data-parallel ranks; the ranks of a tp group read the same
tp: 1 -> micro_batch_size: 1, accumulation: 1, global_batch_size: 8
micro: 4, dp_replicate: 2 -> accumulation: 1, global_batch_size: 32
micro: 2, global_batch: 64, dp_replicate: 2 -> accumulation: 4, global_batch_size: 64
micro: auto -> micro_batch_size: 1, global_batch_size: 8
micro: auto, global_batch: 64, tp: 4 -> micro_batch_size: 32, global_batch_size: 64
# keys that reach every unit; the last one, with which the backward begins, is never resharded
tp: 1 -> units.forward_prefetch: [1, 1, 1, 1, 1, 1], units.backward_prefetch: [1, 1, 1, 1, 1, 1]
forward_prefetch: 3 -> units.forward_prefetch: [3, 3, 3, 3, 3, 3]
backward_prefetch: 0 -> units.backward_prefetch: [0, 0, 0, 0, 0, 0]
tp: 1 -> units.reshard_after_forward: [true, true, true, true, true, false]
reshard_after_forward: 4, model: tied -> units.reshard_after_forward: [4, 4, 4, 4, false]
reshard_after_forward: false -> units.reshard_after_forward: [false, false, false, false, false, false]
model: tied, param_dtype: bfloat16 -> units.param_dtype: [bfloat16, bfloat16, bfloat16, bfloat16, bfloat16]
model: tied, reduce_dtype: bfloat16 -> units.reduce_dtype: [bfloat16, bfloat16, bfloat16, bfloat16, bfloat16]
cpu_offload: true -> cpu_offload: true
# units are those of the model; the order of the forward does not depend on tying
tp: 1 -> units.name: [embed, layers.0, layers.1, layers.2, layers.3, head]
model: tied -> units.name: [layers.0, layers.1, layers.2, layers.3, embed+head]
model: tied -> modules: [embed, layers.0, layers.1, layers.2, layers.3, head]
tp: 1 -> units.compiled: [false, true, true, true, true, true]
tp: 1 -> units.unshard_in_backward: [false, true, true, true, true, true]
model: tied -> units.compiled: [true, true, true, true, true]
model: tied -> units.unshard_in_backward: [true, true, true, true, true]
compile: {enabled: false} -> units.compiled: [false, false, false, false, false, false]
# neighboring blocks, of 400 parameters each, are joined until a unit is large enough
unit_min_params: 400 -> units.name: [embed, layers.0, layers.1, layers.2, layers.3, head]
unit_min_params: 401 -> units.name: [embed, layers.0+layers.1, layers.2+layers.3, head]
unit_min_params: 1200 -> units.name: [embed, layers.0+layers.1+layers.2, layers.3, head]
unit_min_params: 1201, model: tied -> units.name: [layers.0+layers.1+layers.2+layers.3, embed+head]
# activation checkpointing is for blocks
tp: 1 -> units.activation_checkpoint: [none, none, none, none, none, none]
activation_checkpoint: full -> units.activation_checkpoint: [none, full, full, full, full, none]
activation_checkpoint: full, activation_checkpoint_blocks: 0, model: tied
 -> units.activation_checkpoint: [none, none, none, none, none]
activation_checkpoint: full, activation_checkpoint_blocks: 1, model: tied
 -> units.activation_checkpoint: [full, none, none, none, none]
activation_checkpoint: full, activation_checkpoint_blocks: 4
 -> units.activation_checkpoint: [none, full, full, full, full, none]
activation_checkpoint: budget, activation_budget: 0.25
 -> units.activation_budget: [1.0, 0.25, 0.25, 0.25, 0.25, 1.0]
activation_checkpoint: selective, selective_policy: 'aten.mm, aten.silu/2,', model: tied, unit_min_params: 401
 -> units.saved_ops: [[aten.mm, aten.silu/2], [aten.mm, aten.silu/2], []]
activation_checkpoint: selective, selective_policy: every:3
 -> units.activation_checkpoint: [none, none, none, full, none, none]
activation_checkpoint: selective, selective_policy: every:2, unit_min_params: 800
 -> units.activation_checkpoint: [none, none, full, none], units.saved_ops: [[], [], [], []]
# chunks of the loss: only of logits that are split, and longer than one
seq_len: 4096, tp: 2 -> loss_chunk_tokens: 2048
seq_len: 2048 -> loss_chunk_tokens: 0
seq_len: 4096, tp: 2, loss_parallel: false -> loss_chunk_tokens: 0
# float8: linears by name, and by the size of a rank's part (wq, wo: 32, w1: 24 with tp=2)
tp: 1 -> float8.linears: []
float8: {recipe: tensorwise, min_dim: 32} -> float8.linears: [layers.*.wq, layers.*.wo, layers.*.w1]
float8: {recipe: tensorwise, linears: ['*.wo'], min_dim: 1} -> float8.linears: [layers.*.wo]
float8: {recipe: tensorwise, min_dim: 32}, tp: 2 -> float8.linears: [layers.*.wq, layers.*.wo]
float8: {recipe: tensorwise, min_dim: 32}, tp: 2, tp_modules: [head]
 -> float8.linears: [layers.*.wq, layers.*.wo, layers.*.w1]
# context parallelism: heads where they divide, of which a tp rank has 8 / tp
cp: 8 -> context: [heads, [layers.*.core]]
cp: 8, tp: 2, world_size: 16 -> context.exchange: gather
cp: 8, tp: 2, world_size: 16, tp_modules: [head] -> context.exchange: heads
"""


def look(plan: Plan, name: str) -> Any:
    """A value of the plan as plain data, of units.KEY that of each unit."""
    section, _, key = name.rpartition(".")
    units = [getattr(unit, key) for unit in plan.units] if section == "units" else None
    return plain(operator.attrgetter(name)(plan) if units is None else units)


def plain(value: Any) -> Any:
    value = dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_keys_become_settings() -> None:
    def check(keys: str, settings: str) -> None:
        plan, expected = plan_of(**keys_from(keys)), yaml.safe_load(f"{{{settings}}}")
        assert repr({name: look(plan, name) for name in expected}) == repr(expected), (
            "repr, because True == 1"
        )

    try_each(rows(MADE), check)


def test_a_named_policy_keeps_attention_and_the_sums_of_tp_besides() -> None:
    sums = ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce")
    for policy, ops in (("matmul", ["aten.mm"]), ("half_matmul", ["aten.mm/2"]), ("attention", [])):
        units = plan_of(activation_checkpoint="selective", selective_policy=policy).units
        kept = (*ops, *MODEL.attention_ops, *sums)
        assert [unit.saved_ops for unit in units] == [(), *[kept] * 4, ()]


def test_tp_splits_every_part_and_shares_out_the_tokens_if_asked() -> None:
    for sequence_parallel in (True, False):
        tensor = plan_of(tp=2, sequence_parallel=sequence_parallel).tensor
        assert (tensor.sequence_parallel, tensor.styles) == (sequence_parallel, SPLIT)
    gathered = {**SPLIT, "head.output": "gathered_logits"}
    del gathered["head.loss"]
    assert plan_of(tp=2, loss_parallel=False).tensor.styles == gathered
    alone = plan_of(tp=1, tp_modules=("attention",), loss_parallel=False).tensor
    assert (alone.sequence_parallel, alone.styles) == (False, {})


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
