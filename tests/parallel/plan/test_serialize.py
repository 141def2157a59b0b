"""A plan file reads back to the same plan and stays short; the printed table shows every setting."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.schema import (
    ACTIVATION_CHECKPOINTS,
    DTYPES,
    REDUCE_GRADIENTS,
    Float8Plan,
    MeshPlan,
    Plan,
    TensorPlan,
    UnitPlan,
)
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict, plan_to_table, plan_to_yaml
from tests.support.plans import change, check_facts, make_model, plan_of
from tests.support.tables import try_each


def make(n_layers: int = 4, tied: bool = False, **keys: Any) -> Plan:
    return plan_of(8, 2, 64, model=make_model(n_layers, tied), **keys)


def reread(plan: Plan, folder: Path) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(plan_to_yaml(plan))
    return load_plan(path)


def entries(plan: Plan) -> list[str]:
    return [entry["unit"] for entry in plan_to_dict(plan)["units"]]


def test_like_neighbours_are_one_entry(tmp_path: Path) -> None:
    deep = make(n_layers=126)
    assert entries(deep) == ["embed", "layers.[0-125]", "head"]
    assert len(plan_to_yaml(deep).splitlines()) == len(plan_to_yaml(make(n_layers=2)).splitlines())
    assert entries(make(tied=True)) == ["layers.[0-3]", "embed+head"]
    plan = make(n_layers=6)
    for index, names in (
        (1, ["embed", "layers.0", "layers.[1-5]", "head"]),
        (3, ["embed", "layers.[0-1]", "layers.2", "layers.[3-5]", "head"]),
        (6, ["embed", "layers.[0-4]", "layers.5", "head"]),
    ):
        other = change(plan, index, activation_checkpoint="full")
        assert entries(other) == names
        assert reread(other, tmp_path) == other
    turned = dataclasses.replace(plan, units=tuple(plan.units[i] for i in (0, 2, 1, 3, 4, 5, 6, 7)))
    assert entries(turned) == ["embed", "layers.1", "layers.0", "layers.[2-5]", "head"]
    assert reread(turned, tmp_path) == turned


def test_a_hand_edited_unit_reads_as_written(tmp_path: Path) -> None:
    data = plan_to_dict(make(n_layers=6))
    block = data["units"][1]
    data["units"][1:2] = [
        block | {"unit": "layers.[0-1]"},
        block | {"unit": "layers.2", "reshard_after_forward": False},
        block | {"unit": "layers.[3-5]"},
    ]
    path = tmp_path / "edited.yaml"
    path.write_text(json.dumps(data))  # JSON is YAML, and it repeats lists where YAML would write aliases
    assert load_plan(path) == change(make(n_layers=6), 3, reshard_after_forward=False)


def test_reshard_to_groups_of_one_is_not_joined_with_reshard_true(tmp_path: Path) -> None:
    plan = change(make(), 2, reshard_after_forward=1)
    assert repr(reread(plan, tmp_path)) == repr(plan), "repr, because True == 1"


def test_numbers_with_leading_zeros_read_back(tmp_path: Path) -> None:
    plan = make()
    units = tuple(dataclasses.replace(plan.units[1], modules=(f"block_{i:02d}",)) for i in range(8, 12))
    plan = dataclasses.replace(plan, units=units)
    assert reread(plan, tmp_path) == plan


def test_the_table_has_a_row_per_group_and_the_batch_in_words() -> None:
    table = plan_to_table(make(n_layers=32, dp_replicate=2, activation_checkpoint="full"))
    mesh, batch, kernels, head, *rows = table.splitlines()
    check_facts(mesh, "dp_replicate 2 x dp_shard 4 x tp 1 ... 8 processes")
    check_facts(batch, "64 sequences ... micro batch 2 x data parallel 8 x accumulation 4")
    check_facts(kernels, "attention cpu ... all tokens ... stored in float32")
    assert head.split()[:2] == ["unit", "dtype"]
    assert [row.split()[0] for row in rows] == ["embed", "layers.[0-31]", "head"]
    assert rows[1].split() == ["layers.[0-31]", "float32", "float32", "true", "1/1", "full", "inductor"]
    assert rows[2].split()[3:] == ["false", "1/1", "none", "inductor"]


LISTS = {"forward_prefetch": ("layers.1", "layers.2"), "backward_prefetch": ()}
SHOWN: list[tuple[Plan, str]] = [
    (make(tp=2), "sequence parallel on, loss parallel on\n"),
    (make(tp=2, sequence_parallel=False, loss_parallel=False), "sequence parallel off, loss parallel off\n"),
    (make(tp=2, tp_modules=("embedding", "head")), "not split: layers.*.norm, layers.*.wq, layers.*.wo"),
    (make(loss_chunk_tokens=4096), "4096 tokens"),
    (make(cpu_offload=True), "cpu offload ... host memory"),
    (make(activation_checkpoint="selective", selective_policy="aten.mm,aten.silu"), "selective (2 ops kept)"),
    (make(activation_checkpoint="budget", activation_budget=0.3), "budget 0.3"),
    (change(make(), 1, **LISTS), "[layers.1 layers.2]/[]"),
    (change(make(param_dtype="bfloat16"), 5, output_dtype="float32"), "bfloat16 -> float32"),
    (make(reduce_gradients="last_micro_batch", reshard_after_backward=False), "float32 once ... true/false"),
]


def test_the_table_shows_what_differs_from_the_defaults() -> None:
    def check(plan: Plan, facts: str) -> None:
        check_facts(plan_to_table(plan), facts)
        with pytest.raises(AssertionError):
            check_facts(plan_to_table(make()), facts)

    try_each(SHOWN, check)


NAMES = st.sampled_from(
    ["embed", "blocks.{}", "encoder.layers.{}", "h{}.attn", "deep.3.layers.{}.ffn", "stage{}"]
)
AHEAD = st.integers(0, 3) | st.lists(st.sampled_from(["blocks.1", "a+b", "yes", "1"]), max_size=3).map(tuple)
UNIT_SETTINGS = st.builds(
    UnitPlan,
    modules=st.just(()),
    reshard_after_forward=st.booleans() | st.sampled_from([1, 2, 4, 8]),
    reduce_gradients=st.sampled_from(REDUCE_GRADIENTS),
    forward_prefetch=AHEAD,
    backward_prefetch=AHEAD,
    activation_checkpoint=st.sampled_from(ACTIVATION_CHECKPOINTS),
    saved_ops=st.lists(st.sampled_from(["aten.mm", "aten.mm/2", "null", "[x]: #"]), max_size=2).map(tuple),
    activation_budget=st.floats(0, 1) | st.sampled_from([1e-5, 5e-324, 1e16]),
    compiled=st.booleans(),
    param_dtype=st.sampled_from(DTYPES),
    reduce_dtype=st.sampled_from(DTYPES),
    output_dtype=st.sampled_from(["same", *DTYPES]),
)
KEYS = st.text("abc.*~0 :-#[]{}'\"é", max_size=8)
WORDS = st.text("abc.*~0 :-#[]{}'\"\n\té", max_size=8)  # characters that YAML might misread


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Ranges of numbered units with few different settings, so that many groups are possible; some units have
    two modules."""
    unit_settings = draw(st.lists(UNIT_SETTINGS, min_size=1, max_size=3))
    runs = draw(
        st.lists(
            st.tuples(NAMES, st.integers(0, 12), st.integers(1, 5), st.booleans()), min_size=1, max_size=5
        )
    )
    units = []
    for pattern, start, length, paired in runs:
        for i in range(start, start + length):
            modules = (pattern.format(i), "other.module") if paired else (pattern.format(i),)
            units.append(dataclasses.replace(draw(st.sampled_from(unit_settings)), modules=modules))
    counts = st.integers(1, 64)
    config = CompileConfig(
        draw(st.booleans()),
        draw(WORDS),
        draw(WORDS),
        draw(st.booleans()),
        draw(st.sampled_from(["warn", "error", "ignore"])),
        draw(st.sampled_from(["highest", "high", "medium"])),
        draw(st.none() | WORDS),
    )
    units = list({unit.modules: unit for unit in units}.values())  # a module is in one unit only
    modules = tuple(dict.fromkeys(module for unit in units for module in unit.modules))
    tensor = TensorPlan(draw(st.booleans()), draw(st.dictionaries(KEYS, WORDS, max_size=3)))
    mesh = MeshPlan(draw(counts), draw(counts), draw(counts))
    float8 = Float8Plan(draw(WORDS), tuple(draw(st.lists(WORDS, max_size=3))), draw(st.booleans()))
    kernels = (draw(WORDS), draw(WORDS), draw(counts), draw(st.booleans()), draw(st.booleans()), float8)
    return Plan(
        mesh, draw(counts), draw(counts), tensor, draw(st.booleans()), *kernels, config, modules, tuple(units)
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_any_plan_reads_back_exactly(plan: Plan, tmp_path: Path) -> None:
    assert repr(reread(plan, tmp_path)) == repr(plan)
