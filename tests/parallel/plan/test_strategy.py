"""Strategy names resolve to degrees and resharding, and a contradicting key is an error."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.plan.strategy import STRATEGIES, describe_strategy
from tests.support.plans import check_facts, plan_of, report_of
from tests.support.tables import try_each

# name -> degrees (replicate, shard) on one node of 8 and on four nodes, and resharding of the blocks
ZERO3, ZERO2 = True, False
MEANINGS: dict[str, tuple[tuple[int, int], tuple[int, int], bool]] = {
    "full_shard": ((1, 8), (1, 32), ZERO3),
    "shard_grad_op": ((1, 8), (1, 32), ZERO2),
    "no_shard": ((8, 1), (32, 1), ZERO3),
    "ddp": ((8, 1), (32, 1), ZERO3),
    "hybrid_shard": ((1, 8), (4, 8), ZERO3),
    "hybrid_shard_zero2": ((1, 8), (4, 8), ZERO2),
}


def test_every_name_is_here() -> None:
    assert MEANINGS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("name", MEANINGS)
def test_a_strategy_is_a_shorthand_for_keys(name: str) -> None:
    *degrees, reshard = MEANINGS[name]
    for world_size, (replicate, shard) in zip((8, 32), degrees, strict=True):
        plan = plan_of(world_size, strategy=name)
        keys = {"dp_replicate": replicate, "dp_shard": shard, "reshard_after_forward": reshard}
        assert plan == plan_of(world_size, **keys)
        assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == (replicate, shard)
        assert {unit.reshard_after_forward for unit in plan.units[:-1]} == {reshard}
    assert dataclasses.astuple(plan_of(1, strategy=name).mesh) == (1, 1, 1, 1)
    line = describe_strategy(name, plan.mesh)
    check_facts(line, f"strategy {name}: ... dp_replicate {replicate}, dp_shard {shard}")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("full_shard", (1, 16, 2)), ("no_shard", (16, 1, 2)), ("hybrid_shard", (4, 4, 2))],
)
def test_tp_takes_its_processes_from_the_shards_of_a_node(name: str, mesh: tuple[int, ...]) -> None:
    assert dataclasses.astuple(plan_of(32, strategy=name, tp=2).mesh) == (*mesh, 1)


def test_keys_that_agree_are_no_mistake() -> None:
    for name, keys in (
        ("full_shard", {"dp_shard": 32, "dp_replicate": 1, "reshard_after_forward": True}),
        ("hybrid_shard", {"dp_shard": -1, "dp_replicate": 4}),
        ("hybrid_shard_zero2", {"reshard_after_forward": False}),
        ("no_shard", {"dp_replicate": 32, "dp_shard": 1, "reshard_after_forward": False}),
    ):
        assert plan_of(32, strategy=name, **keys).mesh == plan_of(32, strategy=name).mesh


CONTRADICTING: list[tuple[str, dict[str, Any], str]] = [
    ("full_shard", {"dp_replicate": 2}, "parallel.dp_replicate=2 ... means 1"),
    ("full_shard", {"dp_shard": 8}, "parallel.dp_shard=8 ... means 32"),
    ("full_shard", {"reshard_after_forward": False}, "parallel.reshard_after_forward=false ... means true"),
    ("full_shard", {"reshard_after_forward": 1}, "parallel.reshard_after_forward=1 ... means true"),
    ("shard_grad_op", {"reshard_after_forward": 0}, "parallel.reshard_after_forward=0 ... means false"),
    ("ddp", {"dp_replicate": 1}, "parallel.dp_replicate=1 ... means 32"),
    ("hybrid_shard", {"dp_shard": 32}, "parallel.dp_shard=32 ... means 8"),
    ("hybrid_shard_zero2", {"reshard_after_forward": True}, "reshard_after_forward=true ... means false"),
]


def test_keys_that_contradict_are_named_with_what_the_strategy_means() -> None:
    def check(name: str, keys: dict[str, Any], facts: str) -> None:
        report = report_of(32, strategy=name, **keys)
        check_facts(report, f"{facts} ... parallel.strategy={name} ... remove one of them")
        assert "\n" not in report

    try_each(CONTRADICTING, check)
    lines = report_of(32, strategy="ddp", dp_shard=8, dp_replicate=4, param_dtype="float16").splitlines()
    assert [line.split()[0].split("=")[0].split(".")[1] for line in lines] == [
        "dp_replicate",
        "dp_shard",
        "param_dtype",
    ]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    check_facts(report_of(strategy="fullshard"), "parallel.strategy=fullshard ... ddp ... mean full_shard?")


@pytest.mark.parametrize(("world_size", "tp"), [(12, 1), (32, 3)])
def test_nodes_or_tp_that_do_not_divide_the_run_are_named_with_the_strategy(world_size: int, tp: int) -> None:
    report = report_of(world_size, strategy="hybrid_shard", tp=tp)
    check_facts(report, f"parallel.strategy=hybrid_shard: dp_replicate= ... this run has {world_size}")


def test_a_hybrid_on_one_node_is_said_to_replicate_nothing() -> None:
    assert "one node" in describe_strategy("hybrid_shard", plan_of(8, strategy="hybrid_shard").mesh)
    assert "one node" not in describe_strategy("full_shard", plan_of(8, strategy="full_shard").mesh)
