"""A plan file reads back to the same plan and stays short; a malformed file is refused with the place of the
mistake."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.mistakes import file_line
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
from meshwright.parallel.plan.validate import validate
from tests.support.plans import BLOCK, MODEL, SEQ_LEN, change, make_model, plan_of


def make(n_layers: int = 4, tied: bool = False, **keys: Any) -> Plan:
    return plan_of(8, 2, 64, model=make_model(n_layers, tied), **keys)


def reread(plan: Plan, folder: Path) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(plan_to_yaml(plan))
    return load_plan(path)


def entries(plan: Plan) -> list[str]:
    return [entry["unit"] for entry in plan_to_dict(plan)["units"]]


@pytest.mark.parametrize(
    "plan",
    [
        make(),
        make(tied=True),
        make(n_layers=1),
        make(
            n_layers=126,
            dp_replicate=2,
            reshard_after_forward=2,
            activation_checkpoint="full",
            param_dtype="bfloat16",
        ),
        make(
            reshard_after_forward=False,
            forward_prefetch=0,
            compile=CompileConfig(False, "aot_eager", "default"),
        ),
        make(tp=2, sequence_parallel=False, loss_parallel=False, cpu_offload=True),
        make(tp=4, tp_modules=("attention",), activation_checkpoint="selective"),
        make(activation_checkpoint="budget", activation_budget=0.1, unit_min_params=2 * BLOCK),
        make(
            activation_checkpoint="selective",
            selective_policy="every:2",
            compile=CompileConfig(cache_dir="/x y"),
        ),
        change(make(), 2, forward_prefetch=("layers.2", "head"), backward_prefetch=()),
    ],
    ids=["plain", "tied", "one-layer", "405b", "off", "tp", "tp-part", "budget", "every", "lists"],
)
def test_a_plan_reads_back_exactly(plan: Plan, tmp_path: Path) -> None:
    again = reread(plan, tmp_path)
    assert repr(again) == repr(plan), "repr, because True == 1"
    assert again == plan


def test_like_blocks_are_one_entry() -> None:
    assert entries(make(n_layers=126)) == ["embed", "layers.[0-125]", "head"]
    assert len(plan_to_yaml(make(n_layers=126)).splitlines()) == len(
        plan_to_yaml(make(n_layers=2)).splitlines()
    )


def test_two_modules_of_a_tied_unit_stand_in_one_name() -> None:
    assert entries(make(tied=True)) == ["layers.[0-3]", "embed+head"]


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (1, ["embed", "layers.0", "layers.[1-5]", "head"]),
        (3, ["embed", "layers.[0-1]", "layers.2", "layers.[3-5]", "head"]),
        (6, ["embed", "layers.[0-4]", "layers.5", "head"]),
    ],
)
def test_a_unit_treated_otherwise_splits_the_range(index: int, names: list[str], tmp_path: Path) -> None:
    plan = change(make(n_layers=6), index, activation_checkpoint="full")
    assert entries(plan) == names
    assert reread(plan, tmp_path) == plan


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
    plan = load_plan(path)
    assert plan == change(make(n_layers=6), 3, reshard_after_forward=False)
    assert entries(plan) == ["embed", "layers.[0-1]", "layers.2", "layers.[3-5]", "head"]


def test_older_files_reduce_and_free_in_every_micro_batch(tmp_path: Path) -> None:
    data = plan_to_dict(make(n_layers=2))
    for unit in data["units"]:
        del unit["reduce_gradients"], unit["reshard_after_backward"]
    path = tmp_path / "old.yaml"
    path.write_text(json.dumps(data))
    assert load_plan(path) == make(n_layers=2)


def test_units_out_of_order_are_not_joined(tmp_path: Path) -> None:
    plan = make(n_layers=4)
    shuffled = dataclasses.replace(plan, units=tuple(plan.units[i] for i in (0, 2, 1, 3, 4, 5)))
    assert entries(shuffled) == ["embed", "layers.1", "layers.0", "layers.[2-3]", "head"]
    assert reread(shuffled, tmp_path) == shuffled


def test_reshard_to_groups_of_one_is_not_joined_with_reshard_true(tmp_path: Path) -> None:
    plan = change(make(), 2, reshard_after_forward=1)
    assert repr(reread(plan, tmp_path)) == repr(plan)


def test_numbers_with_leading_zeros_read_back(tmp_path: Path) -> None:
    plan = make()
    units = tuple(dataclasses.replace(plan.units[1], modules=(f"block_{i:02d}",)) for i in range(8, 12))
    plan = dataclasses.replace(plan, units=units)
    assert reread(plan, tmp_path) == plan


def edit(*place: str | int, value: Any = ...) -> Callable[[dict[str, Any]], None]:
    """Set the value at a place of the plan's data, or delete it."""

    def apply(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        if value is ...:
            del data[place[-1]]
        else:
            data[place[-1]] = value

    return apply


def write_mistaken(plan: Plan, mistake: Callable[[Any], None], folder: Path) -> Path:
    data = plan_to_dict(plan)
    mistake(data)
    path = folder / "bad.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


MALFORMED = [
    (edit("mesh"), ["mesh is missing"]),
    (edit("units"), ["units is missing"]),
    (edit("unitz", value=[]), ["unknown key unitz. Did you mean units?"]),
    (edit("mesh", value=8), ["mesh=8 must be a mapping"]),
    (edit("mesh", "dp_shard"), ["mesh.dp_shard is missing"]),
    (edit("mesh", "pp", value=2), ["unknown key mesh.pp. Known: dp_replicate, dp_shard, tp, cp."]),
    (edit("mesh", "dp_shard", value="8"), ["mesh.dp_shard='8' must be an integer"]),
    (edit("mesh", "tp", value=True), ["mesh.tp=True must be an integer"]),
    (edit("mesh", "tp", value=1.0), ["mesh.tp=1.0 must be an integer"]),
    (edit("micro_batch_size", value=0), ["micro_batch_size=0 must be an integer >= 1"]),
    (edit("micro_batch_size", value="auto"), ["micro_batch_size='auto' must be an integer"]),
    (edit("accumulation", value=True), ["accumulation=True must be an integer"]),
    (edit("compile", value=None), ["compile=None must be a mapping"]),
    (edit("compile", "enabled", value="yes"), ["compile.enabled='yes' must be true or false"]),
    (edit("compile", "backend", value=3), ["compile.backend=3 must be a string"]),
    (edit("units", value={}), ["units={} must be a list"]),
    (edit("units", 1, value="layers.0"), ["units", "'unit'", "'layers.0'"]),
    (edit("units", 1, "unit"), ["units", "'unit'"]),
    (edit("units", 1, "unit", value=7), ["units", "'unit'"]),
    (edit("units", 1, "compiled"), ["unit layers.[0-3]", "compiled is missing"]),
    (
        edit("units", 1, "compilde", value=True),
        ["unit layers.[0-3]", "unknown key compilde. Did you mean compiled?"],
    ),
    (
        edit("units", 1, "forward_prefetch", value="layers.1"),
        ["unit layers.[0-3]", "forward_prefetch='layers.1' must be an integer or a list"],
    ),
    (
        edit("units", 1, "backward_prefetch", value=[1]),
        ["unit layers.[0-3]", "backward_prefetch=[1]: [0] must be a string"],
    ),
    (
        edit("units", 1, "forward_prefetch", value=True),
        ["forward_prefetch=True must be an integer or a list"],
    ),
    (edit("units", 1, "forward_prefetch", value=10**30), ["unit layers.[0-3]", "forward_prefetch=1000"]),
    (edit("units", 1, "param_dtype", value=16), ["unit layers.[0-3]", "param_dtype=16 must be a string"]),
    (
        edit("units", 1, "reduce_dtype", value=None),
        ["unit layers.[0-3]", "reduce_dtype=None must be a string"],
    ),
    (
        edit("units", 1, "saved_ops", value="aten.mm"),
        ["unit layers.[0-3]", "saved_ops='aten.mm' must be a list"],
    ),
    (
        edit("units", 1, "activation_budget", value="half"),
        ["unit layers.[0-3]", "activation_budget='half' must be a number"],
    ),
    (
        edit("units", 1, "modules", value=3),
        ["unit layers.[0-3]", "unknown key modules", "lists its modules"],
    ),
    (
        edit("units", 1, "reshard_after_forward", value="true"),
        ["unit layers.[0-3]", "reshard_after_forward='true' must be true or false or an integer"],
    ),
    (edit("units", 1, "reshard_after_forward", value=None), ["reshard_after_forward=None"]),
    (edit("units", 1, "unit", value="layers.[3-0]"), ["layers.[3-0]", "range", "low to high"]),
    (
        edit("units", 1, "unit", value="layers.[0-99999999]"),
        ["layers.[0-99999999]", "range of 1 to 10000 units"],
    ),
    (edit("modules"), ["modules is missing"]),
    (edit("modules", value="embed"), ["modules='embed' must be a list"]),
    (edit("modules", 0, value=3), ["modules[0]=3 must be a string"]),
    (edit("tensor"), ["tensor is missing"]),
    (edit("tensor", value=[]), ["tensor=[] must be a mapping"]),
    (
        edit("tensor", "styles", value=["colwise"]),
        ["tensor.styles=['colwise'] must be a mapping"],
    ),
    (
        edit("tensor", "styles", value={"head": 1}),
        ["tensor.styles.head=1 must be a string"],
    ),
    (edit("tensor", "sequence_parallel", value=1), ["tensor.sequence_parallel=1 must be true or false"]),
    (edit("cpu_offload", value="no way"), ["cpu_offload='no way' must be true or false"]),
    (
        edit("compile", "on_recompile", value="shout"),
        ["compile.on_recompile='shout' must be one of warn, error, ignore"],
    ),
    (edit("compile", "cache_dir", value=1), ["compile.cache_dir=1 must be a string or null"]),
    (edit(1, value=2), ["unknown key 1. Known: mesh, "]),
    (edit("modules", value=["a.[0-9999]"] * 1000), ["modules", "more than 10000"]),
    (edit("units", 1, "activation_budget", value=10**400), ["activation_budget=1000", "out of range"]),
    (edit("accumulation", value=2**63), [f"accumulation={2**63} must be an integer <= {2**63 - 1}"]),
    (edit("units", 1, "activation_budget", value=True), ["activation_budget=True must be a number"]),
    (edit("units", 1, value=list(range(50_000))), ["units", "'unit'", " ... "]),
]


@pytest.mark.parametrize(
    ("mistake", "words"),
    MALFORMED,
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_malformed_plan_is_refused_with_file_and_place(
    mistake: Callable[[Any], None], words: list[str], tmp_path: Path
) -> None:
    path = write_mistaken(make(), mistake, tmp_path)
    with pytest.raises(PlanError) as error:
        load_plan(path)
    assert [word for word in ("plan file", str(path), *words) if word not in str(error.value)] == [], str(
        error.value
    )
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        (edit("units", 0, "unit", value="layers.0"), "unit layers.0: module layers.0 is in 2 units"),
        (edit("units", 0, "unit", value=f"layers.[{'9' * 100}-{'9' * 100}]"), "has no module"),
        (edit("mesh", "dp_shard", value=0), "mesh: dp_shard=0 must be at least 1"),
        (edit("mesh", "dp_shard", value=-1), "mesh: dp_shard=-1 must be at least 1"),
        (
            edit("units", 1, "reshard_after_forward", value=-4),
            "units layers.0 to layers.3 (4): reshard_after_forward=-4",
        ),
        (
            edit("units", 1, "reshard_after_forward", value=1),
            "units layers.0 to layers.3 (4): reshard_after_forward=1",
        ),
        (
            edit("units", 1, "forward_prefetch", value=-1),
            "units layers.0 to layers.3 (4): forward_prefetch=-1",
        ),
        (edit("units", 2, "param_dtype", value="half"), "unit head: param_dtype=half"),
        (edit("compile", "mode", value="max-autotune-no-cudagraphs"), "compile.mode"),
    ],
    ids=["twice", "digits", "no processes", "-1", "reshard -4", "reshard 1", "prefetch", "dtype", "mode"],
)
def test_a_plan_that_cannot_be_applied_is_refused_before_it_is(
    mistake: Callable[[Any], None], word: str, tmp_path: Path
) -> None:
    path = write_mistaken(make(compile=CompileConfig(backend="aot_eager")), mistake, tmp_path)
    lines = [file_line(mistake) for mistake in validate(load_plan(path), MODEL, 8, SEQ_LEN)]
    assert word in "\n".join(lines)


@pytest.mark.parametrize("text", ["", "- a\n", "mesh: [\n", "mesh: {}\nmesh: {}\n", "plan"], ids=repr)
def test_a_file_that_holds_no_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan file .*bad\.yaml"):
        load_plan(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan file .*none\.yaml"):
        load_plan(tmp_path / "none.yaml")


def test_the_table_has_a_row_per_group_and_the_batch_in_words() -> None:
    table = plan_to_table(make(n_layers=32, dp_replicate=2, activation_checkpoint="full"))
    mesh, batch, kernels, head, *rows = table.splitlines()
    assert kernels == "kernels: attention cpu, loss of all tokens at once; parameters stored in float32"
    assert mesh == "mesh: dp_replicate 2 x dp_shard 4 x tp 1 = 8 processes"
    assert batch == "global batch: 64 sequences = micro batch 2 x data parallel 8 x accumulation 4"
    assert head.split()[:2] == ["unit", "dtype"]
    assert [row.split()[0] for row in rows] == ["embed", "layers.[0-31]", "head"]
    assert rows[1].split() == ["layers.[0-31]", "float32", "float32", "true", "1/1", "full", "inductor"]
    assert rows[2].split()[3:] == ["false", "1/1", "none", "inductor"]
    saving = plan_to_table(make(reduce_gradients="last_micro_batch", reshard_after_backward=False))
    assert "float32 once" in saving
    assert "true/false" in saving


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make(tp=2), "tensor parallel: sequence parallel on, loss parallel on\n"),
        (
            make(tp=2, sequence_parallel=False, loss_parallel=False),
            "sequence parallel off, loss parallel off\n",
        ),
        (
            make(tp=2, tp_modules=("embedding", "feed_forward", "head")),
            "loss parallel on, not split: layers.*.norm, layers.*.wq, layers.*.wo\n",
        ),
        (
            make(loss_chunk_tokens=4096),
            "kernels: attention cpu, loss 4096 tokens at a time; parameters stored in float32\n",
        ),
        (
            make(cpu_offload=True),
            "cpu offload: sharded parameters, gradients and optimizer state in host memory\n",
        ),
        (
            make(activation_checkpoint="selective", selective_policy="aten.mm,aten.silu"),
            "selective (2 ops kept)",
        ),
        (make(activation_checkpoint="budget", activation_budget=0.3), "budget 0.3"),
        (
            change(make(), 1, forward_prefetch=("layers.1", "layers.2"), backward_prefetch=()),
            "[layers.1 layers.2]/[]",
        ),
        (change(make(param_dtype="bfloat16"), 5, output_dtype="float32"), "bfloat16 -> float32"),
    ],
    ids=["tp", "tp-off", "tp-parts", "chunked", "offload", "selective", "budget", "lists", "output"],
)
def test_the_table_says_what_is_not_plain(plan: Plan, words: str) -> None:
    assert words in plan_to_table(plan)


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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_any_plan_reads_back_exactly(plan: Plan, tmp_path: Path) -> None:
    assert repr(reread(plan, tmp_path)) == repr(plan)
