"""Every mistake in a config or a plan file is one line with rule, value, place and way out."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.parallel.config import CompileConfig, Float8Config, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict
from meshwright.parallel.plan.validate import plan_file_mistakes
from tests.support.plans import MODEL, SECTIONS, SEQ_LEN, TIED, check_facts, keys_from, make_model, plan_of
from tests.support.tables import rows, try_each

# Keys of a config, on 8 processes if not said otherwise -> the facts of each line that refuses them.
KEYS = """
cp: 1 -> right
# degrees
dp_shard: 3 -> dp_shard=3 ... 3 processes ... this run has 8 ... use 3 processes ... dp_shard=-1
dp_shard: 8, tp: 2 -> dp_shard=8 x tp=2 ... 16 processes ... this run has 8
dp_replicate: 3, reshard_after_forward: 4 -> dp_replicate=3 ... this run has 8
dp_shard: 3, activation_checkpoint: selective, selective_policy: aten.no
 -> dp_shard=3 ... this run has 8 & parallel.selective_policy: 'aten.no' ... operator
dp_replicate: 0 -> parallel.dp_replicate=0 ... at least 1
dp_shard: -2 -> parallel.dp_shard=-2 ... auto, -1 (all that is left) ... at least 1
tp: 0, strategy: full_shard -> parallel.tp=0 ... at least 1
# strategies
strategy: fullshard -> parallel.strategy=fullshard ... ddp ... mean full_shard?
strategy: full_shard, dp_shard: 4 -> parallel.dp_shard=4 ... parallel.strategy=full_shard ... means 8
strategy: full_shard, reshard_after_forward: 1 -> reshard_after_forward=1 ... means true
strategy: shard_grad_op, reshard_after_forward: 0 -> reshard_after_forward=0 ... means false
strategy: ddp, dp_replicate: 1 -> parallel.dp_replicate=1 ... parallel.strategy=ddp ... means 8
strategy: hybrid_shard, dp_shard: 32, world_size: 32 -> dp_shard=32 ... means 8
strategy: hybrid_shard, world_size: 12 -> =hybrid_shard: dp_replicate= ... this run has 12
strategy: ddp, dp_shard: 8, dp_replicate: 4, attention: flush
 -> parallel.dp_replicate=4 & parallel.dp_shard=8 & parallel.attention=flush
# tensor parallelism
tp: 16, world_size: 16 -> parallel.tp=16 ... divide model.n_kv_heads=8 ... 1, 2, 4 or 8
tp: 2, seq_len: 63 -> parallel.tp=2 ... divide train.seq_len=63 ... Use 1.
tp: 2, seq_len: 63, sequence_parallel: false -> right
tp: 5, world_size: 5
 -> parallel.tp=5 ... vocab_size=96 ... 1, 2, 4 or 8 & n_heads=16 & n_kv_heads=8 & ffn_dim=48 & seq_len=64
tp: 9, world_size: 9, tp_modules: [feed_forward] -> ffn_dim=48 ... 1, 2, 4, 8 or 16 & seq_len
tp: 32, world_size: 32, tp_modules: [embedding, head] -> right
tp: 2, tp_modules: [hed, hed] -> parallel.tp_modules: hed ... mean head?
tp: 2, tp_modules: [xyz] -> tp_modules: xyz ... embedding, attention, feed_forward
tp: 2, tp_modules: [head], model: tied
 -> tp_modules splits head but not embedding, ... share a weight ... both or neither
async_tp: true -> parallel.async_tp=true ... tp=1 ... use false, or tp > 1
async_tp: true, tp: 2, sequence_parallel: false -> async_tp=true ... sequence_parallel=true
async_tp: true, tp: 2, compile: {backend: aot_eager} -> async_tp=true ... inductor ... or async_tp=false
# context parallelism
cp: 3, seq_len: 66, cp_exchange: gather -> dp_shard=2 x cp=3 x tp=1 is 6 processes ... has 8
cp: 8, tp: 2, world_size: 16, cp_exchange: heads -> n_kv_heads=8 / tp=2 ... use 1 or 2 or 4, or
cp: 8, cp_exchange: gather, seq_len: 248 -> parallel.cp=8: 2 x cp = 16 ... train.seq_len=248 ... such as 240
cp: 8, cp_exchange: gather, model: kernels, attention: math
 -> attention=math ... use cpu or flash, or cp_exchange=heads
cp: 8, cp_exchange: gather, model: kernels, attention: flash -> right
# resharding, units, prefetch
reshard_after_forward: 3 -> parallel.reshard_after_forward=3 ... dp_shard=8 ... true, false, 2, 4
reshard_after_forward: 0 -> parallel.reshard_after_forward=0 ... true, false, 2, 4
reshard_after_forward: 8, dp_replicate: 2 -> =8 ... dp_shard=4 ... true, false, 2
reshard_after_forward: 2, tp: 2 -> reshard_after_forward=2 ... tp=2 ... use true or false
backward_prefetch: -3 -> parallel.backward_prefetch=-3 ... at least 0
# dtypes and kernels
param_dtype: float16 -> parallel.param_dtype='float16' ... auto, float32 or bfloat16
# values of another type, which a config made in Python can have
reshard_after_forward: 'false' -> parallel.reshard_after_forward='false' must be auto, true or false or an
tp_modules: head, cpu_offload: 1 -> parallel.tp_modules='head' ... a list & parallel.cpu_offload=1 ... true or
activation_budget: .nan -> parallel.activation_budget=nan ... at least 0 and at most 1
storage_dtype: bfloat16 -> parallel.storage_dtype=bfloat16 ... param_dtype=bfloat16
attention: flush -> parallel.attention=flush ... cpu
loss_chunk_tokens: 3 -> parallel.loss_chunk_tokens=3 ... 0 (all ... at least 64
loss_chunk_tokens: 64, tp: 2, loss_parallel: false -> loss_chunk_tokens=64 ... loss_parallel=true
# float8
float8: {recipe: tensorwise, linears: [a, a], min_dim: 1} -> float8.linears: a ... layers.*.wq, layers.*.wo
float8: {recipe: tensorwise} -> parallel.float8.recipe=tensorwise ... lower min_dim
float8: {all_gather: true} -> recipe=none ... all_gather=false
float8: {recipe: tensorwise, min_dim: 1, all_gather: true}, model: odd
 -> float8.linears: layers.*.wq has 40 ... multiples of 16
float8: {recipe: tensorwise, min_dim: 1, all_gather: true}, reshard_after_forward: 2
 -> float8.all_gather=true ... reshard_after_forward true
float8: {recipe: tensorwise, min_dim: 1, all_gather: true}, world_size: 3
 -> =true ... dp_shard=3 ... 64 outputs of layers.*.wq & dp_shard=3 ... 32
float8: {recipe: tensorwise, min_dim: 1, all_gather: true}, fused_projections: true
 -> recipe=tensorwise ... fused_projections=true ... one of the two
float8: {recipe: rowwise, min_dim: 1} -> float8.recipe=rowwise ... float32 ... param_dtype=bfloat16
float8: {recipe: rowwise, min_dim: 1, all_gather: true}, param_dtype: bfloat16
 -> float8.all_gather=true ... recipe=rowwise ... all_gather=false
# compiling
compile: {backend: eager, mode: max-autotune} -> mode=max-autotune ... default
compile: {mode: fast} -> parallel.compile.mode=fast ... default ... max-autotune
compile: {backend: indctor} -> parallel.compile.backend=indctor ... mean inductor?
# activation checkpointing
activation_checkpoint: budget, compile: {enabled: false}
 -> activation_checkpoint=budget ... full, selective ... enabled=true
activation_checkpoint: budget, compile: {backend: aot_eager}
 -> parallel.activation_checkpoint=budget ... inductor ... not aot_eager
activation_checkpoint: full, activation_checkpoint_blocks: 5
 -> activation_checkpoint_blocks=5 ... auto ... 0 to 4
activation_checkpoint_blocks: 2 -> activation_checkpoint_blocks=2 ... activation_checkpoint=auto
activation_checkpoint: selective, selective_policy: every:0
 -> selective_policy: 'every:0' ... every:N ... at least 1
activation_checkpoint: selective, selective_policy: 'aten.mm,aten.no' -> aten.no ... matmul ... aten.mm/2
activation_checkpoint: selective, selective_policy: aten.mm/0 -> parallel.selective_policy ... aten.mm/0
activation_checkpoint: selective, selective_policy: ' , ' -> parallel.selective_policy ... keeps nothing
# batch
micro: 0 -> micro_batch_size=0 ... at least 1
micro: 4, global_batch: 40 -> train.global_batch_size=40 ... 4 x 8 ... nearest is 32 ... -1
global_batch: 0 -> train.global_batch_size=0 ... nearest is 8
micro: auto, global_batch: 4 -> train.global_batch_size=4 ... 1 x 8 ... nearest is 8
"""


def mistakes_of(**keys: Any) -> list[str]:
    """The lines that refuse these keys; [] if they make a plan."""
    try:
        plan_of(**keys)
    except PlanError as error:
        return str(error).splitlines()
    return []


def check_lines(lines: list[str], facts: str) -> None:
    each = [] if facts == "right" else facts.split(" & ")
    assert len(lines) == len(each), lines
    for line, of_line in zip(lines, each, strict=True):
        check_facts(line, of_line)
        assert len(line) < 1000


def test_a_wrong_key_is_one_line_with_key_value_rule_and_way_out() -> None:
    try_each(rows(KEYS), lambda keys, facts: check_lines(mistakes_of(**keys_from(keys)), facts))


def test_a_wrong_value_is_refused_where_a_config_is_made_in_python() -> None:
    sections = {
        ParallelConfig: "parallel",
        CompileConfig: "parallel.compile",
        Float8Config: "parallel.float8",
    }
    for section, name in sections.items():
        for field in dataclasses.fields(section):
            with pytest.raises(PlanError, match=rf"^{name}\.{field.name}=Ellipsis must be "):
                section(**{field.name: ...})
    assert ParallelConfig(tp_modules=["head"]) == ParallelConfig(tp_modules=("head",))  # type: ignore[arg-type]


def test_two_mistakes_are_two_lines_and_none_is_said_twice() -> None:
    """A mistake next to another is reported as it is alone. A strategy and compiler settings are left out,
    because these change what other keys may be."""

    def keys_in(**requested: Any) -> Counter[str]:
        lines = mistakes_of(**requested)
        assert len(lines) == len(set(lines)), lines
        return Counter(re.split("[=:]", line)[0] for line in lines)

    single = [keys for text, _ in rows(KEYS) if len(keys := keys_from(text)) == 1]
    alone = [(keys, keys_in(**keys)) for keys in single if keys.keys().isdisjoint(("strategy", *SECTIONS))]
    for (first, first_keys), (second, second_keys) in itertools.combinations(alone, 2):
        if first.keys().isdisjoint(second):
            assert keys_in(**first, **second) <= first_keys + second_keys, (first, second)


# Keys of a plan if it has any | edits of its file by hand -> the facts of each line that refuses it. An edit
# is of the plan, of one of its sections, or of a unit; null deletes.
FILES = """
# keys and types
plan: {unitz: []} -> unknown key unitz ... mean units?
plan: {units: {}} -> units={} ... list
plan: {1: 2} -> unknown key 1 ... mesh
plan: {micro_batch_size: 0} -> micro_batch_size=0 ... integer of at least 1
plan: {accumulation: true} -> accumulation=True ... integer
plan: {accumulation: 9223372036854775808} -> accumulation=9223372036854775808 ... <= 9223372036854775807
mesh: {pp: 2} -> unknown key mesh.pp ... dp_replicate, dp_shard, tp, cp
mesh: {tp: 1.0} -> mesh.tp=1.0 ... integer
compile: {on_recompile: shout} -> compile.on_recompile='shout' ... warn, error or ignore
layers.2: {unit: 7} -> units ... 'unit' ... 7
layers.2: {compilde: true} -> unit layers.2 ... unknown key compilde ... mean compiled?
layers.2: {modules: 3} -> unit layers.2 ... modules ... remove it ... first+second
layers.2: {forward_prefetch: layers.1} -> unit layers.2 ... ='layers.1' ... a list
layers.2: {backward_prefetch: [1]} -> unit layers.2: backward_prefetch=[1] ... each a string
layers.2: {reshard_after_forward: 'true'} -> reshard_after_forward='true' ... true or false
layers.2: {unit: 'layers.[3-0]'} -> layers.[3-0] ... low to high
layers.2: {unit: 'layers.[0-99999999]'} -> layers.[0-99999999] ... 10000
# mesh and batch
mesh: {dp_shard: 16} -> mesh: dp_replicate=1 x dp_shard=16 ... 16 processes ... this run has 8 ... use 16
# the modules of units
layers.2: {unit: layers.22} -> unit layers.22 ... no module layers.22 ... mean layers.2?
layers.2: {unit: layers.1} -> unit layers.1 ... in 2 units ... once
layers.2: {unit: 'layers.[9999999999-9999999999]'} -> no module
embed: {unit: embed+layers.0} -> module layers.0 is in 2 units
plan: {modules: [embed]} -> modules ... 1, the model has 6 ... layers.0 ... make a new plan
# single units
layers.2: {reshard_after_forward: -4} -> unit layers.2: reshard_after_forward=-4 ... dp_shard=8
layers.2: {unshard_in_backward: false} -> unit layers.2: unshard_in_backward=false ... use true
layers.2: {activation_checkpoint: budget, compiled: false}
 -> activation_checkpoint=budget ... compiling is off ... full
layers.2: {activation_budget: 0.5} -> activation_budget=0.5 ... =budget ... use 1.0
layers.2: {activation_checkpoint: selective} -> unit layers.2: saved_ops=[] ... activation_checkpoint=full
layers.2: {activation_checkpoint: selective, saved_ops: [matmul]}
 -> unit layers.2: saved_ops: 'matmul' ... aten.mm/2
layers.2: {activation_checkpoint: selective, saved_ops: ['aten.mm,aten.silu']}
 -> 'aten.mm,aten.silu' ... aten.mm/2
layers.2: {activation_checkpoint: full, saved_ops: [aten.mm]} -> saved_ops=['aten.mm'] ... =selective ... []
head: {activation_checkpoint: full} -> unit head: activation_checkpoint=full ... blocks ... none
embed: {compiled: true} -> unit embed: compiled=true ... use false
head: {output_dtype: bfloat16} -> unit head: output_dtype=bfloat16 ... loss ... use same
# prefetch lists
layers.2: {forward_prefetch: [layers.9]} -> forward_prefetch ... layers.9 ... mean layers.
layers.2: {forward_prefetch: [layers.2]} -> forward_prefetch names the unit itself ... remove it
layers.2: {forward_prefetch: [head, head]} -> forward_prefetch names head twice ... once
layers.2: {forward_prefetch: [layers.1]} -> names layers.1 ... earlier ... list later units
layers.2: {forward_prefetch: [head, layers.3]} -> ['head', 'layers.3'] ... use layers.3, head
layers.2: {backward_prefetch: [head]} -> names head ... earlier ... list later units
layers.2: {backward_prefetch: [layers.0, layers.1]} -> use layers.1, layers.0
layers.0: {backward_prefetch: [embed]} -> names embed ... unshard_in_backward=false ... remove it
# the dtype that the first module returns, and the compiler
layers.0: {param_dtype: bfloat16} -> layers.0 computes in bfloat16 ... output_dtype=bfloat16
compile: {enabled: false} -> units layers.0 to head (5): compiled=true ... compile.enabled=false
tensor: {sequence_parallel: true} -> tensor: tp=1 ... use sequence_parallel=false
tensor: {styles: {head: logits}} -> tensor: tp=1 ... styles={}
float8: {linears: [layers.*.wq]} -> float8.recipe=none ... no linears
float8: {recipe: rowwise, linears: [wq]} -> float8.linears: wq ... layers.*.wq, layers.*.wo
float8: {recipe: tensorwise} -> recipe=tensorwise ... min_dim or tp, or use none
context: {cores: [layers.*.core]} -> context.cores=['layers.*.core'] must be [] ... cp=1
plan: {unsharded: [embed.weight]} -> unsharded=['embed.weight'] ... []
mesh: {cp: 1} -> right
cp: 2 | context: {cores: []} -> context.cores=[] ... ['layers.*.core']
# styles
tp: 2 | tensor: {styles: {}} -> tensor.styles: tp > 1 ... make a new plan
tp: 2 | tensor.styles: {layers.*.wq: colwize} -> part attention ... layers.*.wq is colwize ... colwise
tp: 2 | tensor.styles: {layers.*.wq: rowwise} -> tensor.styles: part attention ... is rowwise ... colwise
tp: 2 | tensor.styles: {layers.*.wq: whole_colwise} -> layers.*.wq is whole_colwise ... colwise
tp: 2 | tensor.styles: {head.output: gathered_logits}
 -> part head ... head.output is gathered_logits ... logits
tp: 2 | tensor.styles: {layers.*.wq: null} -> part attention ... layers.*.wq is missing
tp: 2 | tensor.styles: {layers.*.wz: colwise} -> tensor.styles: layers.*.wz ... Did you mean
tp: 2 | tensor.styles: {layers.1.wq: whole_colwise} -> tensor.styles: layers.1.wq ... layers.*.wq
tp: 2 | tensor.styles: {layers.*.norm: whole_sequence, layers.*.wq: whole_colwise, layers.*.wo: whole_rowwise}
 -> right
tp: 2 | tensor.styles: {head.output: gathered_logits, head.loss: null} -> right
tp: 2, model: tied | tensor.styles: {embed: whole_vocab}
 -> tensor.styles splits head but not embedding ... share a weight ... both or neither
# units missing, out of order, joined
layers.1: null -> units: ... layers.1 is in no unit ... add it
layers.0: {unit: layers.1}, layers.1: {unit: layers.0}
 -> unit layers.0 ... after layers.1 ... in the order of the forward
model: tied | layers.3: {unit: embed+head}, embed+head: {unit: layers.3} -> unit layers.3 ... after embed+head
layers.0: {unit: layers.0+layers.1}, layers.1: null -> right
layers.0: {unit: embed+layers.0}, embed: null -> right
# a prefetch list names only what is gathered
layers.1: {forward_prefetch: [layers.2, layers.3, head], backward_prefetch: [layers.0]},
 head: {backward_prefetch: [layers.3, layers.2, layers.0]} -> right
layers.1: {reshard_after_forward: false}, layers.0: {forward_prefetch: [layers.1]} -> right
layers.1: {reshard_after_forward: false}, layers.2: {backward_prefetch: [layers.1]}
 -> unit layers.2: backward_prefetch names layers.1 ... reshard_after_forward=false ... remove it
dp_replicate: 8 | layers.2: {forward_prefetch: [layers.3]} -> layers.3 ... dp_shard=1 ... use 0
dp_replicate: 8 | layers.2: {backward_prefetch: [layers.1]} -> layers.1 ... dp_shard=1 ... use 0
model: tied | embed+head: {forward_prefetch: [layers.0], backward_prefetch: [layers.3]} -> right
model: tied | layers.0: {forward_prefetch: [embed+head]} -> names embed+head ... earlier
model: tied | layers.0: {backward_prefetch: [embed+head]} -> names embed+head ... earlier
# blocks compute in other dtypes than their neighbors
layers.1: {param_dtype: bfloat16} -> right
embed: {param_dtype: bfloat16} -> right
layers.0: {output_dtype: bfloat16} -> right
embed: {output_dtype: bfloat16}, layers.0: {param_dtype: bfloat16} -> right
param_dtype: bfloat16 | head: {output_dtype: float32} -> right
param_dtype: bfloat16, model: tied | embed+head: {output_dtype: float32}
 -> unit embed+head: output_dtype=float32 ... use same
param_dtype: bfloat16, model: tied | embed+head: {param_dtype: float32}
 -> embed+head returns float32 ... computes in bfloat16: set the same param_dtype on both
# all mistakes come in one report, those of like units once
layers.1: {reshard_after_forward: 3, activation_budget: 0.5},
 layers.2: {reshard_after_forward: 3, activation_budget: 0.5}, compile: {mode: fast}
 -> compile.mode & units layers.1 to layers.2 (2): reshard & layers.1 to layers.2 (2): activation_budget
layers.1: {reduce_dtype: half, compiled: 1}, layers.2: {reduce_dtype: half}, mesh: {dp_shard: 0}
 -> layers.1: reduce_dtype & layers.1: compiled=1 & layers.2: reduce_dtype & mesh.dp_shard=0
compile: {mode: fast}, mesh: {dp_shard: 4} -> 4 processes & compile.mode
"""


def write_edited(folder: Path, plan: Plan, edits: Mapping[str, Any]) -> Path:
    """Write a plan file, with an entry for each unit, after edits."""
    data = plan_to_dict(plan)
    alone = [dataclasses.replace(plan, units=(unit,)) for unit in plan.units]
    units = {unit.name: plan_to_dict(each)["units"][0] for unit, each in zip(plan.units, alone, strict=True)}
    places = {"plan": data, **data, "tensor.styles": data["tensor"]["styles"], **units}
    data["units"] = [entry for name, entry in units.items() if edits.get(name, "") is not None]
    for place, values in edits.items():
        for key, value in (values or {}).items():
            places[place].pop(key, None)
            places[place] |= {} if value is None else {key: value}
    path = folder / "plan.yaml"
    path.write_text(json.dumps(data))  # JSON is YAML, and it repeats values where YAML would write aliases
    return path


def mistakes_in(
    path: Path, model: ModelUnits = MODEL, processes: int = 8, seq_len: int = SEQ_LEN
) -> list[str]:
    """The lines that refuse a plan file; [] if it is right."""
    try:
        return plan_file_mistakes(load_plan(path), path, ParallelConfig(), model, processes, seq_len)
    except PlanError as error:
        return str(error).splitlines()


def test_a_wrong_plan_file_is_one_line_with_file_place_value_and_way_out(tmp_path: Path) -> None:
    def check(edited: str, facts: str) -> None:
        text, _, edits = edited.rpartition(" | ")
        keys = keys_from(text)
        path = write_edited(tmp_path, plan_of(**keys), yaml.safe_load(f"{{{edits}}}"))
        lines = mistakes_in(path, keys.get("model", MODEL))
        check_lines(lines, facts)
        assert all(line.startswith(f"plan file {path}: ") for line in lines)

    try_each(rows(FILES), check)


def test_a_value_of_another_type_or_missing_is_named_wherever_it_is(tmp_path: Path) -> None:
    """No value of a plan may be a list of lists."""
    data = plan_to_dict(plan := plan_of(tp=2))
    keys = {place: [*values] for place, values in data.items() if isinstance(values, dict)}
    keys |= {"layers.2": [key for key in data["units"][1] if key != "unit"]}
    keys |= {"plan": [key for key in data if key not in ("units", "modules", "blocks")]}  # lists of names
    for value, problem in (([[]], r"(\[0])?=.*must be"), (None, ".* missing")):
        for place, names in keys.items():
            path = write_edited(tmp_path, plan, {place: dict.fromkeys(names, value)})
            text = "\n".join(mistakes_in(path))
            assert [name for name in names if not re.search(rf"\b{name}{problem}", text)] == []


def test_a_plan_of_another_model_or_size_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = write_edited(tmp_path, plan_of(), {})
    check_lines(
        mistakes_in(path, processes=4), "8 processes ... this run has 4 ... use 8 processes, or a plan with"
    )
    check_lines(
        mistakes_in(path, make_model(5)), "6, the model has 7 ... head instead of layers.4 ... new plan"
    )
    check_lines(mistakes_in(path, make_model(3), processes=4), "has 4 & the model has 5")
    check_lines(mistakes_in(path, TIED), "embed and head share a parameter ... one unit")


@pytest.mark.parametrize("text", ["", "- a\n", "mesh: [\n", None], ids=repr)
def test_a_file_that_holds_no_plan_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=f"plan file {path}"):
        load_plan(path)
