"""Strategy names resolve to degrees and resharding, and a contradicting key is an error."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.plan.strategy import STRATEGIES, describe_strategy
from tests.support.plans import plan_of, report_of

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
def test_degrees_and_resharding_on_one_node_and_on_four(name: str) -> None:
    *degrees, reshard = MEANINGS[name]
    for world_size, mesh in zip((8, 32), degrees, strict=True):
        plan = plan_of(world_size, strategy=name)
        assert dataclasses.astuple(plan.mesh) == (*mesh, 1, 1)
        assert {unit.reshard_after_forward for unit in plan.units[:-1]} == {reshard}
        assert plan.units[-1].reshard_after_forward is False


@pytest.mark.parametrize("name", MEANINGS)
def test_a_strategy_is_a_shorthand_for_keys(name: str) -> None:
    (replicate, shard), reshard = MEANINGS[name][1:]
    assert plan_of(32, strategy=name) == plan_of(
        32, dp_replicate=replicate, dp_shard=shard, reshard_after_forward=reshard
    )


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("full_shard", (1, 16, 2)),
        ("no_shard", (16, 1, 2)),
        ("hybrid_shard", (4, 4, 2)),
        ("hybrid_shard_zero2", (4, 4, 2)),
    ],
)
def test_tp_takes_its_processes_from_the_shards_of_a_node(name: str, mesh: tuple[int, ...]) -> None:
    assert dataclasses.astuple(plan_of(32, strategy=name, tp=2).mesh) == (*mesh, 1)


@pytest.mark.parametrize("name", MEANINGS)
def test_one_process_can_run_any_strategy(name: str) -> None:
    assert dataclasses.astuple(plan_of(1, strategy=name).mesh) == (1, 1, 1, 1)


AGREEING: list[tuple[str, dict[str, Any]]] = [
    ("full_shard", {"dp_shard": 32, "dp_replicate": 1, "reshard_after_forward": True}),
    ("full_shard", {"dp_shard": -1}),
    ("hybrid_shard", {"dp_shard": 8, "dp_replicate": 4}),
    ("hybrid_shard", {"dp_shard": -1, "dp_replicate": 4}),
    ("hybrid_shard_zero2", {"reshard_after_forward": False}),
    ("no_shard", {"dp_replicate": 32, "dp_shard": 1}),
    ("no_shard", {"reshard_after_forward": False}),
    ("ddp", {"tp": 1}),
]


@pytest.mark.parametrize(("name", "keys"), AGREEING, ids=str)
def test_keys_that_agree_are_no_mistake(name: str, keys: dict[str, Any]) -> None:
    assert plan_of(32, strategy=name, **keys).mesh == plan_of(32, strategy=name).mesh


CONTRADICTING: list[tuple[str, dict[str, Any], str]] = [
    (
        "full_shard",
        {"dp_replicate": 2},
        "parallel.dp_replicate=2 contradicts parallel.strategy=full_shard, which means 1",
    ),
    (
        "full_shard",
        {"dp_shard": 8},
        "parallel.dp_shard=8 contradicts parallel.strategy=full_shard, which means 32",
    ),
    (
        "full_shard",
        {"reshard_after_forward": False},
        "reshard_after_forward=false contradicts parallel.strategy=full_shard, which means true",
    ),
    ("full_shard", {"reshard_after_forward": 1}, "parallel.reshard_after_forward=1 contradicts"),
    ("full_shard", {"reshard_after_forward": 8}, "parallel.reshard_after_forward=8 contradicts"),
    ("shard_grad_op", {"reshard_after_forward": True}, "which means false"),
    ("shard_grad_op", {"reshard_after_forward": 0}, "parallel.reshard_after_forward=0 contradicts"),
    (
        "no_shard",
        {"dp_shard": 32},
        "parallel.dp_shard=32 contradicts parallel.strategy=no_shard, which means 1",
    ),
    ("ddp", {"dp_replicate": 1}, "parallel.dp_replicate=1 contradicts parallel.strategy=ddp, which means 32"),
    ("hybrid_shard", {"dp_shard": 32}, "which means 8"),
    ("hybrid_shard", {"dp_replicate": 1}, "which means 4"),
    ("hybrid_shard_zero2", {"reshard_after_forward": True}, "which means false"),
]


@pytest.mark.parametrize(("name", "keys", "words"), CONTRADICTING, ids=str)
def test_keys_that_contradict_are_named_with_what_the_strategy_means(
    name: str, keys: dict[str, Any], words: str
) -> None:
    report = report_of(32, strategy=name, **keys)
    assert words in report
    assert report.endswith(": remove one of them")
    assert "\n" not in report


def test_every_contradiction_is_in_one_report() -> None:
    report = report_of(32, strategy="ddp", dp_shard=8, dp_replicate=4, param_dtype="float16")
    assert [line.split()[0] for line in report.splitlines()] == [
        "parallel.dp_replicate=4",
        "parallel.dp_shard=8",
        "parallel.param_dtype=float16",
    ]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    report = report_of(strategy="fullshard")
    assert report.startswith(
        "parallel.strategy=fullshard is not one of full_shard, shard_grad_op, no_shard, ddp, hybrid_shard"
    )
    assert report.endswith("Did you mean full_shard?")


@pytest.mark.parametrize(("world_size", "tp"), [(12, 1), (20, 1), (32, 3)])
def test_nodes_or_tp_that_do_not_divide_the_run_are_named_with_the_strategy(world_size: int, tp: int) -> None:
    report = report_of(world_size, strategy="hybrid_shard", tp=tp)
    assert "parallel.strategy=hybrid_shard: dp_replicate=" in report
    assert f"this run has {world_size}" in report


@pytest.mark.parametrize("name", MEANINGS)
def test_what_it_means_is_said_in_a_line_with_its_degrees(name: str) -> None:
    line = describe_strategy(name, plan_of(32, strategy=name).mesh)
    replicate, shard = MEANINGS[name][1]
    assert line.startswith(f"strategy {name}: ")
    assert STRATEGIES[name].meaning in line
    assert f"dp_replicate {replicate}, dp_shard {shard}" in line
    assert "\n" not in line


def test_a_hybrid_on_one_node_is_said_to_replicate_nothing() -> None:
    assert "one node: nothing is replicated" in describe_strategy(
        "hybrid_shard", plan_of(8, strategy="hybrid_shard").mesh
    )
    assert "one node" not in describe_strategy("full_shard", plan_of(8, strategy="full_shard").mesh)
