"""Every mistake in a config or a plan file is one line with rule, value, place and way out."""

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.parallel.config import CompileConfig, Float8Config, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict, plan_to_yaml
from meshwright.parallel.plan.validate import plan_file_mistakes
from tests.support.plans import MODEL, SEQ_LEN, TIED, change, check_facts, make_model, plan_of, report_of
from tests.support.tables import try_each

FULL = {"activation_checkpoint": "full"}
SELECTIVE = {"activation_checkpoint": "selective"}
BUDGET = {"activation_checkpoint": "budget"}
OFF, AOT = CompileConfig(enabled=False), CompileConfig(backend="aot_eager")

# Keys of a config, mostly on 8 processes, and the facts of the one line that refuses them.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    # degrees
    ({"dp_shard": 3}, "dp_shard=3 ... 3 processes ... this run has 8 ... use 3 processes ... dp_shard=-1"),
    ({"dp_replicate": 16}, "dp_replicate=16 ... 16 processes ... this run has 8"),
    ({"dp_shard": 8, "tp": 2}, "dp_shard=8 x tp=2 ... 16 processes ... this run has 8"),
    ({"dp_replicate": 3, "reshard_after_forward": 4}, "dp_replicate=3 ... this run has 8"),
    ({"dp_replicate": 0}, "parallel.dp_replicate=0 ... at least 1"),
    ({"dp_shard": -2}, "parallel.dp_shard=-2 ... at least 1 ... -1: all that is left"),
    ({"tp": 0, "strategy": "full_shard"}, "parallel.tp=0 ... at least 1"),
    ({"strategy": "fsdp"}, "parallel.strategy=fsdp ... full_shard, shard_grad_op"),
    # tensor parallelism
    ({"tp": 16, "world_size": 16}, "parallel.tp=16 ... divide model.n_kv_heads=8 ... 1, 2, 4 or 8"),
    ({"tp": 2, "seq_len": 63}, "parallel.tp=2 ... divide train.seq_len=63 ... Use 1."),
    ({"tp": 2, "tp_modules": ("hed", "attention", "hed")}, "parallel.tp_modules: hed ... mean head?"),
    ({"tp": 2, "tp_modules": ("xyz",)}, "tp_modules: xyz ... embedding, attention, feed_forward"),
    ({"tp": 2, "tp_modules": ("head",), "model": TIED}, "tp_modules=['head'] ... embedding and head"),
    ({"async_tp": True}, "parallel.async_tp=true ... tp=1 ... use false, or tp > 1"),
    ({"async_tp": True, "tp": 2, "sequence_parallel": False}, "async_tp=true ... sequence_parallel=true"),
    # resharding, units, prefetch
    ({"reshard_after_forward": 3}, "parallel.reshard_after_forward=3 ... dp_shard=8 ... true, false, 2, 4 "),
    ({"reshard_after_forward": 0}, "parallel.reshard_after_forward=0 ... true, false, 2, 4 "),
    ({"reshard_after_forward": 1}, "parallel.reshard_after_forward=1 ... true, false, 2, 4 "),
    ({"reshard_after_forward": 8, "dp_replicate": 2}, "=8 ... dp_shard=4 ... true, false, 2 "),
    ({"reshard_after_forward": 2, "tp": 2}, "reshard_after_forward=2 ... tp=2 ... use true or false"),
    ({"forward_prefetch": -1}, "parallel.forward_prefetch=-1 ... 0 (none)"),
    ({"backward_prefetch": -3}, "parallel.backward_prefetch=-3 ... 0 (none)"),
    ({"unit_min_params": -1}, "parallel.unit_min_params=-1 ... 0 (a unit per block)"),
    # dtypes and kernels
    ({"param_dtype": "float16"}, "parallel.param_dtype=float16 ... gradient scaler ... use bfloat16"),
    ({"reduce_dtype": "float64"}, "parallel.reduce_dtype=float64 ... float32, bfloat16"),
    ({"storage_dtype": "bfloat16"}, "parallel.storage_dtype=bfloat16 ... param_dtype=bfloat16"),
    ({"attention": "flush"}, "parallel.attention=flush ... cpu"),
    ({"loss_chunk_tokens": 3}, "parallel.loss_chunk_tokens=3 ... 0 (all ... at least 64"),
    ({"float8": Float8Config("tensorwise", ("a", "a"))}, "parallel.float8.linears: a"),
    ({"float8": Float8Config("tensorwise", (), min_dim=0)}, "parallel.float8.min_dim=0 ... at least 1"),
    ({"float8": Float8Config("tensorwise", ())}, "parallel.float8.recipe=tensorwise ... min_dim"),
    # compiling
    ({"compile": CompileConfig(backend="eager", mode="max-autotune")}, "mode=max-autotune ... default"),
    ({"compile": CompileConfig(mode="fast")}, "parallel.compile.mode=fast ... default ... max-autotune"),
    ({"compile": CompileConfig(backend="indctor")}, "parallel.compile.backend=indctor ... mean inductor?"),
    # activation checkpointing
    ({"activation_checkpoint": "half"}, "parallel.activation_checkpoint=half ... none, full, selective"),
    ({**BUDGET, "activation_budget": 1.5}, "parallel.activation_budget=1.5 ... between 0 ... and 1"),
    ({**BUDGET, "activation_budget": float("nan")}, "parallel.activation_budget=nan ... between 0"),
    ({**BUDGET, "compile": OFF}, "activation_checkpoint=budget ... full, selective ... enabled=true"),
    ({**BUDGET, "compile": AOT}, "parallel.activation_checkpoint=budget ... inductor ... not aot_eager"),
    ({**FULL, "activation_checkpoint_blocks": 5}, "activation_checkpoint_blocks=5 ... auto ... 0 to 4"),
    ({"activation_checkpoint_blocks": 2}, "activation_checkpoint_blocks=2 ... activation_checkpoint=auto"),
    ({**SELECTIVE, "selective_policy": "every:0"}, "selective_policy=every:0 ... every:N ... at least 1"),
    ({**SELECTIVE, "selective_policy": "every:x"}, "parallel.selective_policy=every:x ... every:N"),
    ({**SELECTIVE, "selective_policy": "aten.mm,aten.no"}, "aten.no ... matmul ... aten.mm/2"),
    ({**SELECTIVE, "selective_policy": "aten.mm/0"}, "parallel.selective_policy ... aten.mm/0"),
    ({**SELECTIVE, "selective_policy": " , "}, "parallel.selective_policy ... keeps nothing"),
    # batch
    ({"micro": 0}, "train.micro_batch_size=0 ... at least 1"),
    ({"micro": -1, "global_batch": 8}, "train.micro_batch_size=-1 ... at least 1"),
    ({"micro": 4, "global_batch": 40}, "train.global_batch_size=40 ... 4 x 8 ... nearest is 32 ... -1"),
    ({"global_batch": 0}, "train.global_batch_size=0 ... nearest is 8"),
    ({"global_batch": -2}, "train.global_batch_size=-2 ... nearest is 8"),
    ({"micro": "auto", "global_batch": 4}, "train.global_batch_size=4 ... 1 x 8 ... nearest is 8"),
]


def test_a_wrong_config_is_one_line_with_key_value_rule_and_way_out() -> None:
    def check(keys: dict[str, Any], facts: str) -> None:
        report = report_of(**keys)
        check_facts(report, facts)
        assert "\n" not in report, "one mistake, one line"

    try_each(CONFIGS, check)


def test_two_mistakes_are_two_lines_and_none_is_said_twice() -> None:
    """A mistake next to another is reported as it is alone. A strategy and compiler settings are left out,
    because these change what other keys may be."""

    def keys_of(**requested: Any) -> Counter[str]:
        lines = report_of(**requested).splitlines()
        assert len(lines) == len(set(lines)), lines
        return Counter(re.split("[=:]", line)[0] for line in lines)

    alone = [
        (keys, keys_of(**keys))
        for keys, _ in CONFIGS
        if len(keys) == 1 and keys.keys().isdisjoint(("strategy", "compile"))
    ]
    for (first, first_keys), (second, second_keys) in itertools.combinations(alone, 2):
        if first.keys().isdisjoint(second):
            assert keys_of(**first, **second) <= first_keys + second_keys, (first, second)


def test_all_that_the_tp_degree_must_divide_is_in_one_report() -> None:
    lines = report_of(5, tp=5).splitlines()
    sizes = ("vocab_size=96", "n_heads=16", "n_kv_heads=8", "ffn_dim=48", "seq_len=64")
    for line, size in zip(lines, sizes, strict=True):
        check_facts(line, f"parallel.tp=5 ... {size} ... 1, 2, 4 or 8")
    assert "1, 2, 4, 8 or 16" in report_of(9, tp=9, tp_modules=("feed_forward",))
    for keys in (
        {"tp": 32, "tp_modules": ("embedding", "head")},
        {"tp": 2, "seq_len": 63, "sequence_parallel": False},
    ):
        assert plan_of(keys["tp"], **keys).mesh.tp == keys["tp"]


# Plan files. An edit is of the whole plan (""), of one of its sections, or of a unit; `...` deletes a key.
Edit = tuple[str, dict[Any, Any]]


def write_edited(folder: Path, plan: Plan, *edits: Edit) -> Path:
    """Write a plan file, with an entry for each unit, after edits by hand."""
    data = plan_to_dict(plan)
    alone = [dataclasses.replace(plan, units=(unit,)) for unit in plan.units]
    data["units"] = [entry for each in alone for entry in plan_to_dict(each)["units"]]
    units = {entry["unit"]: entry for entry in data["units"]}
    for place, values in edits:
        section = units[place] if place in units else data[place] if place else data
        section.update(values)
        for key in [key for key, value in values.items() if value is ...]:
            del section[key]
    path = folder / "plan.yaml"
    path.write_text(yaml.dump(data, Dumper=_NoAliases, sort_keys=False))
    return path


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def mistakes_in(
    path: Path, model: ModelUnits = MODEL, processes: int = 8, seq_len: int = SEQ_LEN
) -> list[str]:
    """The lines that refuse a plan file; [] if it is right."""
    try:
        return plan_file_mistakes(load_plan(path), path, ParallelConfig(), model, processes, seq_len)
    except PlanError as error:
        return str(error).splitlines()


KEEPS = {"activation_checkpoint": "selective", "saved_ops": ["aten.mm"]}
FILES: list[tuple[str, dict[Any, Any], str]] = [
    # keys and types
    ("", {"mesh": ...}, "mesh is missing"),
    ("", {"units": ...}, "units is missing"),
    ("", {"unitz": []}, "unknown key unitz ... mean units?"),
    ("", {"mesh": 8}, "mesh=8 ... mapping"),
    ("", {"compile": None}, "compile=None ... mapping"),
    ("", {"units": {}}, "units={} ... list"),
    ("", {"modules": "embed"}, "modules='embed' ... list"),
    ("", {1: 2}, "unknown key 1 ... mesh"),
    ("", {"micro_batch_size": 0}, "micro_batch_size=0 ... integer >= 1"),
    ("", {"accumulation": True}, "accumulation=True ... integer"),
    ("", {"accumulation": 2**63}, f"accumulation={2**63} ... <= {2**63 - 1}"),
    ("", {"cpu_offload": "no way"}, "cpu_offload='no way' ... true or false"),
    ("", {"modules": ["a.[0-9999]"] * 1000}, "modules ... 10000"),
    ("mesh", {"dp_shard": ...}, "mesh.dp_shard is missing"),
    ("mesh", {"pp": 2}, "unknown key mesh.pp ... dp_replicate, dp_shard, tp, cp"),
    ("mesh", {"dp_shard": "8"}, "mesh.dp_shard='8' ... integer"),
    ("mesh", {"tp": 1.0}, "mesh.tp=1.0 ... integer"),
    ("compile", {"enabled": "yes"}, "compile.enabled='yes' ... true or false"),
    ("compile", {"on_recompile": "shout"}, "compile.on_recompile='shout' ... warn, error, ignore"),
    ("compile", {"cache_dir": 1}, "compile.cache_dir=1 ... a string or null"),
    ("tensor", {"styles": {"head": 1}}, "tensor.styles.head=1 ... string"),
    ("layers.2", {"unit": 7}, "units ... 'unit' ... 7"),
    ("layers.2", {"compiled": ...}, "unit layers.2 ... compiled is missing"),
    ("layers.2", {"compilde": True}, "unit layers.2 ... unknown key compilde ... mean compiled?"),
    ("layers.2", {"modules": 3}, "unit layers.2 ... modules ... remove it ... first+second"),
    ("layers.2", {"forward_prefetch": "layers.1"}, "unit layers.2 ... ='layers.1' ... a list"),
    ("layers.2", {"backward_prefetch": [1]}, "unit layers.2 ... backward_prefetch=[1]: [0] ... string"),
    ("layers.2", {"param_dtype": 16}, "unit layers.2 ... param_dtype=16 ... string"),
    ("layers.2", {"reshard_after_forward": "true"}, "reshard_after_forward='true' ... true or false"),
    ("layers.2", {"activation_budget": True}, "activation_budget=True ... number"),
    ("layers.2", {"activation_budget": 10**400}, "activation_budget=1000 ... out of range"),
    ("layers.2", {"unit": "layers.[3-0]"}, "layers.[3-0] ... low to high"),
    ("layers.2", {"unit": "layers.[0-99999999]"}, "layers.[0-99999999] ... 10000"),
    # mesh and batch
    ("mesh", {"dp_shard": 16}, "16 processes ... this run has 8 ... start 16 ... new plan"),
    ("mesh", {"dp_shard": 0}, "mesh: dp_shard=0 ... at least 1"),
    ("mesh", {"tp": -2}, "mesh: tp=-2 ... at least 1"),
    ("context", {"exchange": "ring"}, "context: exchange=ring ... heads, gather"),
    # the modules of units
    ("layers.2", {"unit": "layers.22"}, "unit layers.22 ... no module layers.22 ... mean layers.2?"),
    ("layers.2", {"unit": "layers.1"}, "unit layers.1 ... in 2 units ... once"),
    ("layers.2", {"unit": "layers.2+layers.2"}, "unit layers.2 ... in 2 units ... once"),
    ("layers.2", {"unit": f"layers.[{'9' * 100}-{'9' * 100}]"}, "no module"),
    ("embed", {"unit": "embed+layers.0"}, "module layers.0 is in 2 units"),
    ("", {"modules": ["embed"]}, "modules ... 1, the model has 6 ... layers.0 ... make a new plan"),
    # single units
    ("layers.2", {"reshard_after_forward": 3}, "reshard_after_forward=3 ... true, false, 2, 4 "),
    ("layers.2", {"reshard_after_forward": -4}, "unit layers.2: reshard_after_forward=-4 ... dp_shard=8"),
    ("layers.2", {"reduce_gradients": "last"}, "=last ... every_micro_batch, last_micro_batch"),
    ("layers.2", {"reduce_dtype": "float16"}, "unit layers.2: reduce_dtype=float16 ... gradient scaler"),
    ("layers.2", {"output_dtype": "fp32"}, "unit layers.2: output_dtype=fp32 ... float32, bfloat16"),
    ("layers.2", {"unshard_in_backward": False}, "unit layers.2: unshard_in_backward=false ... use true"),
    ("layers.2", {"activation_checkpoint": "some"}, "activation_checkpoint=some ... none, full, selective"),
    ("layers.2", {**BUDGET, "activation_budget": -0.5}, "activation_budget=-0.5 ... between 0"),
    ("layers.2", {**BUDGET, "compiled": False}, "activation_checkpoint=budget ... compiling is off ... full"),
    ("layers.2", {"activation_budget": 0.5}, "activation_budget=0.5 ... =budget ... use 1.0"),
    ("layers.2", {**SELECTIVE}, "unit layers.2: saved_ops=[] ... activation_checkpoint=full"),
    ("layers.2", {**KEEPS, "saved_ops": ["matmul"]}, "unit layers.2: saved_ops: 'matmul' ... aten.mm/2"),
    ("layers.2", {**KEEPS, "saved_ops": ["aten.mm,aten.silu"]}, "'aten.mm,aten.silu' ... aten.mm/2"),
    ("layers.2", {"saved_ops": ["aten.mm"]}, "saved_ops=['aten.mm'] ... =selective ... []"),
    ("head", {"activation_checkpoint": "full"}, "unit head: activation_checkpoint=full ... blocks ... none"),
    ("embed", {"compiled": True}, "unit embed: compiled=true ... use false"),
    ("head", {"output_dtype": "bfloat16"}, "unit head: output_dtype=bfloat16 ... loss ... use same"),
    # prefetch lists
    ("layers.2", {"forward_prefetch": -1}, "unit layers.2: forward_prefetch=-1 ... 0 (none)"),
    ("layers.2", {"forward_prefetch": ["layers.9"]}, "forward_prefetch ... layers.9 ... mean layers."),
    ("layers.2", {"forward_prefetch": ["layers.2"]}, "forward_prefetch names the unit itself ... remove it"),
    ("layers.2", {"forward_prefetch": ["head", "head"]}, "forward_prefetch names head twice ... once"),
    ("layers.2", {"forward_prefetch": ["layers.1"]}, "names layers.1 ... earlier ... list later units"),
    ("layers.2", {"forward_prefetch": ["head", "layers.3"]}, "['head', 'layers.3'] ... use layers.3, head"),
    ("layers.2", {"backward_prefetch": ["head"]}, "names head ... earlier ... list later units"),
    ("layers.2", {"backward_prefetch": ["layers.0", "layers.1"]}, "use layers.1, layers.0"),
    ("layers.0", {"backward_prefetch": ["embed"]}, "names embed ... unshard_in_backward=false ... remove it"),
    # the dtype that the first module returns, and the compiler
    ("layers.0", {"param_dtype": "bfloat16"}, "layers.0 computes in bfloat16 ... output_dtype=bfloat16"),
    ("compile", {"enabled": False}, "units layers.0 to head (5): compiled=true ... compile.enabled=false"),
    ("compile", {"mode": "fast"}, "compile.mode=fast ... default"),
    ("compile", {"backend": "inducter"}, "compile.backend=inducter ... mean inductor?"),
    ("tensor", {"sequence_parallel": True}, "tensor: sequence_parallel=true ... tp=1 ... use false"),
    ("tensor", {"styles": {"head": "logits"}}, "tensor: tp=1 ... styles ... make a new plan"),
    ("float8", {"linears": ["layers.*.wq"]}, "float8: recipe=none ... linears"),
]


def test_a_wrong_plan_file_is_one_line_with_file_place_value_and_way_out(tmp_path: Path) -> None:
    def check(place: str, values: dict[Any, Any], facts: str) -> None:
        (line,) = mistakes_in(path := write_edited(tmp_path, plan_of(), (place, values)))
        check_facts(line, f"plan file {path}: ... {facts}")
        assert len(line) < 1000

    assert mistakes_in(write_edited(tmp_path, plan_of())) == [], "rows fail because of their edits"
    try_each(FILES, check)


STYLES = plan_of(tp=2).tensor.styles
TP_FILES: list[tuple[dict[str, str], str]] = [
    ({}, "tensor: tp > 1 ... styles ... make a new plan"),
    ({**STYLES, "layers.*.wq": "colwize"}, "tensor: layers.*.wq: colwize ... mean colwise?"),
    ({**STYLES, "layers.*.wq": "rowwise"}, "tensor: part attention ... layers.*.wq is rowwise ... colwise"),
    ({**STYLES, "layers.*.wq": "whole_colwise"}, "layers.*.wq is whole_colwise ... colwise"),
    ({**STYLES, "head.output": "gathered_logits"}, "part head ... head.output is gathered_logits ... logits"),
    ({k: v for k, v in STYLES.items() if k != "layers.*.wq"}, "part attention ... layers.*.wq is missing"),
    ({**STYLES, "layers.*.wz": "colwise"}, "tensor: layers.*.wz ... Did you mean"),
    ({**STYLES, "layers.1.wq": "whole_colwise"}, "tensor: layers.1.wq ... layers.*.wq"),
]


def test_wrong_tensor_parallel_styles_are_one_line(tmp_path: Path) -> None:
    def check(styles: dict[str, str], facts: str) -> None:
        (line,) = mistakes_in(write_edited(tmp_path, plan_of(tp=2), ("tensor", {"styles": styles})))
        check_facts(line, facts)

    try_each(TP_FILES, check)


def test_a_plan_of_another_model_or_size_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = write_edited(tmp_path, plan_of())
    (line,) = mistakes_in(path, processes=4)
    check_facts(line, "8 processes ... this run has 4 ... start 8, or make a new plan")
    (line,) = mistakes_in(path, make_model(5))
    check_facts(line, "6, the model has 7 ... head instead of layers.4 ... make a new plan")
    assert len(mistakes_in(path, make_model(3), processes=4)) == 2
    (line,) = mistakes_in(path, TIED)
    check_facts(line, "embed and head share a parameter ... one unit")


def test_units_missing_out_of_order_or_split_by_hand_are_refused(tmp_path: Path) -> None:
    def report(plan: Plan, units: list[int], model: ModelUnits = MODEL) -> list[str]:
        path = tmp_path / "plan.yaml"
        path.write_text(plan_to_yaml(dataclasses.replace(plan, units=tuple(plan.units[i] for i in units))))
        return mistakes_in(path, model)

    (line,) = report(plan_of(), [0, 1, 3, 4, 5])
    check_facts(line, "units: ... layers.1 is in no unit ... add it")
    (line,) = report(plan_of(), [0, 2, 1, 3, 4, 5])
    check_facts(line, "unit layers.0 ... after layers.1 ... in the order of the forward")
    (line,) = report(plan_of(model=TIED), [0, 1, 2, 4, 3], TIED)
    check_facts(line, "unit layers.3 ... after embed+head")
    joined = change(plan_of(), 2, modules=("layers.0", "layers.1"))
    assert report(joined, [0, 2, 3, 4, 5]) == []
    assert report(change(plan_of(), 1, modules=("embed", "layers.0")), [1, 2, 3, 4, 5]) == []


def test_a_prefetch_list_names_only_what_is_gathered(tmp_path: Path) -> None:
    def report(plan: Plan, unit: str, model: ModelUnits = MODEL, **keys: list[str]) -> list[str]:
        return mistakes_in(write_edited(tmp_path, plan, (unit, keys)), model)

    right = {"forward_prefetch": ["layers.2", "layers.3", "head"], "backward_prefetch": ["layers.0"]}
    assert report(plan_of(), "layers.1", **right) == []
    assert report(plan_of(), "head", backward_prefetch=["layers.3", "layers.2", "layers.0"]) == []
    kept = change(plan_of(), 2, reshard_after_forward=False)
    (line,) = report(kept, "layers.2", backward_prefetch=["layers.1"])
    check_facts(
        line, "unit layers.2: backward_prefetch names layers.1 ... reshard_after_forward=false ... remove it"
    )
    assert report(kept, "layers.0", forward_prefetch=["layers.1"]) == []
    for key, name in (("forward_prefetch", "layers.3"), ("backward_prefetch", "layers.1")):
        (line,) = report(plan_of(dp_replicate=8), "layers.2", **{key: [name]})
        check_facts(line, f"unit layers.2: {key} names {name} ... dp_shard=1 ... use 0")
    tied = plan_of(model=TIED)
    assert (
        report(tied, "embed+head", TIED, forward_prefetch=["layers.0"], backward_prefetch=["layers.3"]) == []
    )
    for key in ("forward_prefetch", "backward_prefetch"):
        (line,) = report(tied, "layers.0", TIED, **{key: ["embed+head"]})
        check_facts(line, f"unit layers.0: {key} names embed+head ... earlier")


def test_blocks_may_compute_in_other_dtypes_than_their_neighbours(tmp_path: Path) -> None:
    def report(plan: Plan, *edits: Edit, model: ModelUnits = MODEL) -> list[str]:
        return mistakes_in(write_edited(tmp_path, plan, *edits), model)

    assert report(plan_of(), ("layers.1", {"param_dtype": "bfloat16"})) == []
    assert report(plan_of(), ("embed", {"param_dtype": "bfloat16"})) == []
    assert report(plan_of(), ("layers.0", {"output_dtype": "bfloat16"})) == []
    cast = ("embed", {"output_dtype": "bfloat16"})
    assert report(plan_of(), cast, ("layers.0", {"param_dtype": "bfloat16"})) == []
    assert report(plan_of(param_dtype="bfloat16"), ("head", {"output_dtype": "float32"})) == []
    tied = plan_of(model=TIED, param_dtype="bfloat16")
    (line,) = report(tied, ("embed+head", {"output_dtype": "float32"}), model=TIED)
    check_facts(line, "unit embed+head: output_dtype=float32 ... use same")
    (line,) = report(tied, ("embed+head", {"param_dtype": "float32"}), model=TIED)
    check_facts(
        line, "embed+head returns float32 ... layers.0 computes in bfloat16 ... same param_dtype on both"
    )
    assert "output_dtype=" not in line, "a unit of several modules casts nothing"


def test_parts_are_split_by_hand_in_all_weights_and_shared_ones_together(tmp_path: Path) -> None:
    def report(changes: dict[str, str], model: ModelUnits = MODEL) -> list[str]:
        plan = plan_of(tp=2, model=model)
        styles = {k: v for k, v in {**plan.tensor.styles, **changes}.items() if v}
        return mistakes_in(write_edited(tmp_path, plan, ("tensor", {"styles": styles})), model)

    assert report({pattern: f"whole_{style}" for pattern, style in MODEL.styles["attention"].items()}) == []
    assert report({"head.output": "gathered_logits", "head.loss": ""}) == []
    (line,) = report({"embed": "whole_vocab"}, TIED)
    check_facts(line, "tensor: ... embedding and head share a weight ... both or neither")


def test_all_mistakes_come_in_one_report_and_those_of_like_units_once(tmp_path: Path) -> None:
    edits = [(f"layers.{i}", {"reshard_after_forward": 3, "reduce_dtype": "half"}) for i in range(4)]
    path = write_edited(tmp_path, plan_of(), *edits, ("compile", {"mode": "fast"}), ("mesh", {"dp_shard": 4}))
    lines = [line.removeprefix(f"plan file {path}: ") for line in mistakes_in(path)]
    assert [re.split("=| is", line)[0] for line in lines] == [
        "the plan's mesh",
        "compile.mode",
        "units layers.0 to layers.3 (4): reshard_after_forward",
        "units layers.0 to layers.3 (4): reduce_dtype",
    ]


@pytest.mark.parametrize(
    "text", ["", "- a\n", "mesh: [\n", "mesh: {}\nmesh: {}\n", "plan", "\0", None], ids=repr
)
def test_a_file_that_holds_no_plan_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=f"plan file {path}"):
        load_plan(path)
