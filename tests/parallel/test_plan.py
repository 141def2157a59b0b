"""make_plan and check_plan: what is asked becomes what is done, or one report of every mistake."""

import dataclasses
from typing import Any

import pytest

from parallel.config import CompileConfig, ParallelConfig
from parallel.plan import MeshPlan, ModelUnits, Plan, PlanError, check_plan, make_plan

BLOCKS = ("layers.0", "layers.1")
MODEL = ModelUnits(
    units=[("tok_embeddings",), *((block,) for block in BLOCKS), ("head",)],
    compiled=frozenset({*BLOCKS, "head"}),
    checkpointed=frozenset(BLOCKS),
)
TIED = dataclasses.replace(MODEL, units=[*((block,) for block in BLOCKS), ("tok_embeddings", "head")])


def plan_of(world_size: int = 8, micro: int | str = 1, global_batch: int = -1, model: ModelUnits = MODEL, **keys: Any) -> Plan:
    return make_plan(ParallelConfig(**keys), model, world_size, micro, global_batch)


def report_of(**asked: Any) -> str:
    with pytest.raises(PlanError) as error:
        plan_of(**asked)
    return str(error.value)


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
    ],
)
def test_dp_shard_takes_what_the_other_degrees_leave(world_size: int, keys: dict[str, int], mesh: tuple[int, ...]) -> None:
    plan = plan_of(world_size, **keys)
    assert dataclasses.astuple(plan.mesh) == mesh
    assert plan.mesh.world_size == plan.mesh.data_parallel == world_size


def test_auto_is_the_documented_simple_default() -> None:
    for unit in plan_of().units[:-1]:
        assert unit.reshard_after_forward is True
        assert (unit.forward_prefetch, unit.backward_prefetch, unit.activation_checkpoint) == (1, 1, "none")


def test_a_key_given_a_value_reaches_every_unit_it_applies_to() -> None:
    plan = plan_of(reshard_after_forward=4, forward_prefetch=3, backward_prefetch=0, activation_checkpoint="full",
                   param_dtype="bfloat16", reduce_dtype="bfloat16")  # fmt: skip
    for unit in plan.units:
        assert (unit.forward_prefetch, unit.backward_prefetch) == (3, 0)
        assert (unit.param_dtype, unit.reduce_dtype) == ("bfloat16", "bfloat16")
    assert [unit.reshard_after_forward for unit in plan.units] == [4, 4, 4, False]
    assert [unit.activation_checkpoint for unit in plan.units] == ["none", "full", "full", "none"]


@pytest.mark.parametrize("reshard", ["auto", True, False, 2])
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_the_last_unit_is_never_resharded_after_its_forward(model: ModelUnits, reshard: bool | int | str) -> None:
    *others, last = plan_of(model=model, reshard_after_forward=reshard).units
    assert last.reshard_after_forward is False
    assert {unit.reshard_after_forward for unit in others} == {True if reshard == "auto" else reshard}


def test_units_are_those_of_the_model_in_its_order() -> None:
    assert [unit.modules for unit in plan_of(model=TIED).units] == [("layers.0",), ("layers.1",), ("tok_embeddings", "head")]
    assert plan_of(model=TIED).units[-1].name == "tok_embeddings+head"


def test_units_are_compiled_where_the_model_says_so_and_compiling_is_on() -> None:
    assert [unit.compiled for unit in plan_of().units] == [False, True, True, True]
    assert plan_of(model=TIED).units[-1].compiled, "the head of a tied unit is compiled"
    assert not any(unit.compiled for unit in plan_of(compile=CompileConfig(enabled=False)).units)


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


MISTAKES = [
    ({"dp_shard": 3}, ["dp_shard=3", "3 processes", "this run has 8", "start 3", "dp_shard=-1"]),
    ({"dp_shard": 16}, ["dp_shard=16", "16 processes", "this run has 8"]),
    ({"dp_replicate": 3}, ["dp_replicate=3", "this run has 8"]),
    ({"dp_replicate": 16}, ["dp_replicate=16", "16 processes", "this run has 8"]),
    ({"dp_replicate": 0}, ["parallel.dp_replicate=0", "at least 1"]),
    ({"dp_shard": 0}, ["parallel.dp_shard=0", "at least 1", "-1: all that is left"]),
    ({"dp_shard": -2}, ["parallel.dp_shard=-2", "at least 1"]),
    ({"dp_replicate": -1}, ["parallel.dp_replicate=-1", "at least 1"]),
    ({"reshard_after_forward": 3}, ["parallel.reshard_after_forward=3", "dp_shard=8", "true, false, 2, 4 "]),
    ({"reshard_after_forward": 0}, ["parallel.reshard_after_forward=0", "true, false, 2, 4 "]),
    ({"reshard_after_forward": 8, "dp_replicate": 2}, ["parallel.reshard_after_forward=8", "dp_shard=4", "true, false, 2 "]),
    ({"forward_prefetch": -1}, ["parallel.forward_prefetch=-1", "0 (none)"]),
    ({"backward_prefetch": -3}, ["parallel.backward_prefetch=-3", "0 (none)"]),
    ({"param_dtype": "float16"}, ["parallel.param_dtype=float16", "gradient scaler", "bfloat16"]),
    ({"reduce_dtype": "float16"}, ["parallel.reduce_dtype=float16", "gradient scaler", "bfloat16"]),
    ({"param_dtype": "int8"}, ["parallel.param_dtype=int8", "float32, bfloat16"]),
    ({"compile": CompileConfig(backend="aot_eager", mode="max-autotune")},
     ["parallel.compile.mode=max-autotune", "inductor", "aot_eager", "leave it at default"]),
    ({"micro": 0}, ["train.micro_batch_size=0", "at least 1"]),
    ({"micro": -1, "global_batch": 8}, ["train.micro_batch_size=-1", "at least 1"]),
    ({"global_batch": 12}, ["train.global_batch_size=12", "multiple", "1 x 8", "nearest is 16"]),
    ({"micro": 4, "global_batch": 40}, ["train.global_batch_size=40", "4 x 8", "nearest is 32", "use -1"]),
    ({"global_batch": 0}, ["train.global_batch_size=0", "nearest is 8"]),
    ({"global_batch": -2}, ["train.global_batch_size=-2", "nearest is 8"]),
    ({"micro": "auto", "global_batch": 4}, ["train.global_batch_size=4", "1 x 8", "nearest is 8"]),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "words"), MISTAKES, ids=str)
def test_a_mistake_is_reported_with_key_value_and_way_out(asked: dict[str, Any], words: list[str]) -> None:
    report = report_of(**asked)
    assert [word for word in words if word not in report] == [], report
    assert "\n" not in report, "one mistake, one line"


def test_several_mistakes_come_in_one_report() -> None:
    report = report_of(param_dtype="float16", reduce_dtype="fp32", forward_prefetch=-1, dp_shard=3, reshard_after_forward=2,
                       compile=CompileConfig(backend="eager", mode="reduce-overhead"))  # fmt: skip
    keys = ["param_dtype=float16", "reduce_dtype=fp32", "forward_prefetch=-1", "compile.mode", "dp_shard=3",
            "reshard_after_forward=2"]  # fmt: skip
    assert [key for key in keys if key not in report] == []
    assert report.count("\n") == len(keys) - 1


def test_a_wrong_batch_and_a_wrong_dtype_come_in_one_report() -> None:
    assert report_of(global_batch=12, param_dtype="float16").count("\n") == 1


def test_a_plan_fits_the_model_and_the_processes_it_was_made_for() -> None:
    check_plan(plan_of(), MODEL, 8)
    check_plan(plan_of(dp_replicate=2, model=TIED), TIED, 8)


def test_check_plan_names_another_number_of_processes() -> None:
    with pytest.raises(PlanError, match="for 8 processes, this run has 4"):
        check_plan(plan_of(), MODEL, 4)


@pytest.mark.parametrize(
    ("planned", "model", "odd"),
    [
        (MODEL, TIED, "('tok_embeddings',)"),
        (MODEL, dataclasses.replace(MODEL, units=[*MODEL.units, ("layers.2",)]), "('layers.2',)"),
        (dataclasses.replace(MODEL, units=MODEL.units[::-1]), MODEL, "in another order"),
    ],
    ids=["other-unit", "missing-unit", "order"],
)
def test_check_plan_names_the_first_unit_that_differs(planned: ModelUnits, model: ModelUnits, odd: str) -> None:
    with pytest.raises(PlanError) as error:
        check_plan(plan_of(model=planned), model, 8)
    assert f"first difference: {odd}" in str(error.value)


def test_check_plan_reports_processes_and_units_together() -> None:
    with pytest.raises(PlanError) as error:
        check_plan(plan_of(), TIED, 4)
    assert str(error.value).count("\n") == 1


def test_a_mesh_is_the_product_of_its_degrees() -> None:
    mesh = MeshPlan(dp_replicate=2, dp_shard=3, tp=4)
    assert (mesh.world_size, mesh.data_parallel) == (24, 6)
