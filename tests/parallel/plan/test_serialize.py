"""A plan file reads back to the same plan and stays short; the printed table shows every setting."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.parallel.config import Float8Config
from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict, plan_to_table, plan_to_yaml
from tests.support.plans import change, check_facts, make_model, plan_of
from tests.support.tables import try_each


def make(n_layers: int = 4, tied: bool = False, **keys: Any) -> Plan:
    return plan_of(8, 2, 64, model=make_model(n_layers, tied), **keys)


def reread(plan: Plan, folder: Path) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(plan_to_yaml(plan))
    return load_plan(path)


SIX = make(6)
TURNED = dataclasses.replace(SIX, units=tuple(SIX.units[i] for i in (0, 2, 1, 3, 4, 5, 6, 7)))
PADDED = tuple(dataclasses.replace(SIX.units[1], modules=(f"block_{i:02d}",)) for i in range(8, 12))
ROOTED = dataclasses.replace(
    SIX, modules=("", *SIX.modules), units=(*SIX.units, dataclasses.replace(SIX.units[-1], modules=("",)))
)
ENTRIES = [
    (ROOTED, "embed layers.[0-5] head (root)"),
    (make(126), "embed layers.[0-125] head"),
    (make(tied=True), "layers.[0-3] embed+head"),
    (change(SIX, 1, activation_checkpoint="full"), "embed layers.0 layers.[1-5] head"),
    (change(SIX, 3, reshard_after_forward=1), "embed layers.[0-1] layers.2 layers.[3-5] head"),
    (change(SIX, 6, forward_prefetch=("head",)), "embed layers.[0-4] layers.5 head"),
    (TURNED, "embed layers.1 layers.0 layers.[2-5] head"),
    (dataclasses.replace(SIX, units=PADDED), "block_08 block_09 block_[10-11]"),
]


def test_like_neighbors_are_one_entry_and_read_back(tmp_path: Path) -> None:
    def check(plan: Plan, names: str) -> None:
        assert [entry["unit"] for entry in plan_to_dict(plan)["units"]] == names.split()
        assert repr(reread(plan, tmp_path)) == repr(plan), "repr, because True == 1"

    try_each(ENTRIES, check)
    assert len(plan_to_yaml(make(126)).splitlines()) == len(plan_to_yaml(make(2)).splitlines())


def test_the_table_has_a_row_per_group_and_the_batch_in_words() -> None:
    table = plan_to_table(make(n_layers=32, dp_replicate=2, activation_checkpoint="full"))
    mesh, batch, kernels, shared, head, *rows = table.splitlines()
    check_facts(mesh, "dp_replicate 2 x dp_shard 4 x tp 1 ... 8 processes")
    check_facts(batch, "64 sequences ... micro batch 2 x data parallel 8 x accumulation 4")
    check_facts(kernels, "attention cpu ... all tokens ... stored in float32")
    assert shared == "all units: dtype float32, reduce float32, prefetch fwd/bwd 1/1"
    assert head.split() == ["unit", "reshard", "activation", "checkpoint", "compiled"]
    assert [row.split()[0] for row in rows] == ["embed", "layers.[0-31]", "head"]
    assert rows[1].split() == ["layers.[0-31]", "true", "full", "inductor"]
    assert rows[2].split() == ["head", "false", "none", "inductor"]


LISTS = {"forward_prefetch": ("layers.1", "layers.2"), "backward_prefetch": ()}
SHOWN: list[tuple[Plan, str]] = [
    (make(tp=2), "sequence parallel on, loss parallel on\n"),
    (make(tp=2, sequence_parallel=False, loss_parallel=False), "parallel off, loss parallel off\n"),
    (make(tp=2, tp_modules=("embedding", "head")), "not split: layers.*.norm, layers.*.wq, layers.*.wo"),
    (make(cp=2), "cp 2 x tp 1 ... 1/2 of a sequence's tokens ... attention: heads"),
    (make(loss_chunk_tokens=4096), "4096 tokens"),
    (make(cpu_offload=True), "cpu offload ... host memory"),
    (make(activation_checkpoint="selective", selective_policy="aten.mm,aten.silu"), "selective (2 ops kept)"),
    (make(activation_checkpoint="budget", activation_budget=0.3), "budget 0.3"),
    (
        make(float8=Float8Config("tensorwise", min_dim=1, all_gather=True)),
        "gathered in float8 too: layers.*.wq,",
    ),
    (dataclasses.replace(make(), unsharded=("embed.table",)), "unsharded: embed.table"),
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


WORDS = st.text("abc.*~0 :-#[]{}'\"\n\té", max_size=8)  # characters that YAML might misread
COUNTS = st.integers(1, 64)
AHEAD = COUNTS | st.lists(st.sampled_from(["blocks.1", "a+b", "yes", "1"]), max_size=3).map(tuple)
SETTINGS = {  # of a field by its name, otherwise by its type
    "reshard_after_forward": st.booleans() | COUNTS,
    "forward_prefetch": AHEAD,
    "backward_prefetch": AHEAD,
    "activation_budget": st.floats(0, 1) | st.sampled_from([1e-5, 5e-324]),
    "modules": st.just(()),
    "units": st.just(()),
    bool: st.booleans(),
    str: WORDS,
    str | None: st.none() | WORDS,
    bool | None: st.none() | st.booleans(),
    tuple[str, ...]: st.lists(WORDS, max_size=3).map(tuple),
    dict[str, str]: st.dictionaries(st.text("abc.*~0 :-#[]{}'\"é", max_size=8), WORDS, max_size=3),
}
NAMES = ["embed", "blocks.{}", "encoder.layers.{}", "h{}.attn", "deep.3.layers.{}.ffn", "stage{}"]
RUNS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 12), st.integers(1, 5), st.booleans()),
    min_size=1,
    max_size=5,
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any values for the fields of a plan or of one of its parts."""

    def of(field: Any) -> st.SearchStrategy[Any]:
        if get_origin(field.type) is Literal:
            return st.sampled_from(get_args(field.type))
        return (
            any_of(field.type)
            if dataclasses.is_dataclass(field.type)
            else SETTINGS.get(field.name, SETTINGS.get(field.type, COUNTS))
        )

    return st.builds(kind, **{field.name: of(field) for field in dataclasses.fields(kind)})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Ranges of numbered units with few different settings, so that many groups are possible; some units have
    two modules."""
    settings_of_units, units = draw(st.lists(any_of(UnitPlan), min_size=1, max_size=3)), {}
    for pattern, start, length, paired in draw(RUNS):
        for i in range(start, start + length):
            modules = (pattern.format(i), *["other.module"] * paired)
            units[modules] = dataclasses.replace(draw(st.sampled_from(settings_of_units)), modules=modules)
    modules = tuple(dict.fromkeys(module for unit in units for module in unit))
    return dataclasses.replace(draw(any_of(Plan)), modules=modules, units=tuple(units.values()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_any_plan_reads_back_exactly(plan: Plan, tmp_path: Path) -> None:
    assert repr(reread(plan, tmp_path)) == repr(plan)
