"""Wrong configs and plan files, as users write them: each error is one line with rule, value, place, fix."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_dict, plan_to_yaml
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import run
from tests.support.tables import try_each


def config_arguments(*arguments: str) -> list[str]:
    """The debug model, which has 8 heads, 4 kv heads and 6 layers, at 256 tokens and 8 sequences a step."""
    return ["--config=llama_debug", *arguments]


# Arguments, processes, and texts that the line must contain: key and value, rule, fix.
CONFIGS: list[tuple[list[str], int, list[str]]] = [
    # degrees
    (
        ["--parallel.dp_shard=3"],
        8,
        ["dp_replicate=1 x dp_shard=3 x tp=1 is 3 processes", "this run has 8", "use 3 processes"],
    ),
    (
        ["--parallel.dp_shard=8"],
        4,
        ["dp_shard=8", "8 processes", "this run has 4", "dp_shard=-1"],
    ),
    (
        ["--parallel.dp_replicate=2", "--parallel.dp_shard=2", "--parallel.tp=4"],
        8,
        ["16 processes", "this run has 8"],
    ),
    (["--parallel.dp_replicate=0"], 8, ["parallel.dp_replicate=0", "must be at least 1"]),
    (["--parallel.dp_shard=-3"], 8, ["parallel.dp_shard=-3", "must be at least 1", "-1: all that is left"]),
    (["--parallel.tp=0"], 8, ["parallel.tp=0", "must be at least 1"]),
    (["--parallel.tp=-1"], 8, ["parallel.tp=-1", "must be at least 1"]),
    # strategies
    (["--parallel.strategy=fsdp"], 8, ["parallel.strategy=fsdp", "is not one of full_shard"]),
    (
        ["--parallel.strategy=hybrid_shards"],
        8,
        ["parallel.strategy=hybrid_shards", "Did you mean hybrid_shard?"],
    ),
    (
        ["--parallel.strategy=ddp", "--parallel.dp_shard=8"],
        8,
        ["parallel.dp_shard=8 contradicts", "strategy=ddp", "means 1"],
    ),
    (
        ["--parallel.strategy=full_shard", "--parallel.reshard_after_forward=false"],
        8,
        ["parallel.reshard_after_forward=false contradicts", "means true", "remove one of them"],
    ),
    (
        ["--parallel.strategy=hybrid_shard", "--parallel.dp_replicate=2"],
        8,
        ["dp_replicate=2 contradicts", "means 1 here"],
    ),
    # resharding, units, prefetch
    (
        ["--parallel.reshard_after_forward=3"],
        8,
        ["parallel.reshard_after_forward=3", "divide dp_shard=8", "true, false, 2, 4"],
    ),
    (
        ["--parallel.reshard_after_forward=2", "--parallel.strategy=ddp"],
        8,
        ["reshard_after_forward=2", "dp_shard=1", "true, false"],
    ),
    (["--parallel.forward_prefetch=-1"], 8, ["parallel.forward_prefetch=-1", "0 (none)"]),
    (["--parallel.backward_prefetch=-2"], 8, ["parallel.backward_prefetch=-2", "0 (none)"]),
    (["--parallel.unit_min_params=-5"], 8, ["parallel.unit_min_params=-5", "0 (a unit per block)"]),
    # tensor parallelism
    (["--parallel.tp=8"], 8, ["parallel.tp=8 must divide model.n_kv_heads=4", "Use 1, 2 or 4."]),
    (
        ["--parallel.tp=2", "--train.seq_len=255"],
        8,
        ["parallel.tp=2 must divide train.seq_len=255", "Use 1."],
    ),
    (
        ["--parallel.tp=4", "--model.vocab_size=266"],
        8,
        ["parallel.tp=4 must divide model.vocab_size=266", "Use 1 or 2."],
    ),
    (
        ["--parallel.tp=2", "--model.ffn_dim=511"],
        8,
        ["parallel.tp=2 must divide model.ffn_dim=511", "Use 1."],
    ),
    (
        ["--parallel.tp_modules=[qkv]"],
        8,
        ["parallel.tp_modules: qkv", "Use embedding, attention, feed_forward, head."],
    ),
    (
        ["--parallel.tp=2", "--parallel.tp_modules=[attention,head]", "--model.tie_embeddings=true"],
        8,
        ["parallel.tp_modules=['attention', 'head']", "embedding and head share a weight", "both or neither"],
    ),
    # dtypes
    (
        ["--parallel.param_dtype=float16"],
        8,
        ["parallel.param_dtype=float16", "gradient scaler", "use bfloat16"],
    ),
    (["--parallel.param_dtype=bf16"], 8, ["parallel.param_dtype=bf16", "float32, bfloat16"]),
    (["--parallel.reduce_dtype=float64"], 8, ["parallel.reduce_dtype=float64", "float32, bfloat16"]),
    # activation checkpointing
    (
        ["--parallel.activation_checkpoint=some"],
        8,
        ["parallel.activation_checkpoint", "some", "selective", "budget"],
    ),
    (
        ["--parallel.activation_checkpoint=budget", "--parallel.activation_budget=2"],
        8,
        ["parallel.activation_budget=2.0", "between 0 (recompute all) and 1"],
    ),
    (
        ["--parallel.activation_checkpoint=budget", "--parallel.compile.enabled=false"],
        8,
        ["parallel.activation_checkpoint=budget", "compiling is off", "full, selective"],
    ),
    (
        ["--parallel.activation_checkpoint=budget", "--parallel.compile.backend=eager"],
        8,
        ["parallel.activation_checkpoint=budget", "inductor", "not eager"],
    ),
    (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=every:0"],
        8,
        ["parallel.selective_policy=every:0", "every:N with N at least 1"],
    ),
    (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=aten.matmull"],
        8,
        ["parallel.selective_policy=aten.matmull", "not an operator", "Use matmul"],
    ),
    (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=everything"],
        8,
        ["parallel.selective_policy=everything", "not an operator", "half_matmul, attention, every:N"],
    ),
    # compiling
    (
        ["--parallel.compile.backend=nvfuser"],
        8,
        ["parallel.compile.backend=nvfuser", "not a backend of this torch"],
    ),
    (["--parallel.compile.mode=fastest"], 8, ["parallel.compile.mode=fastest", "is not one of default"]),
    (
        ["--parallel.compile.mode=max-autotune", "--parallel.compile.backend=eager"],
        8,
        ["parallel.compile.mode=max-autotune", "for backend inductor, not eager", "use default"],
    ),
    (
        ["--parallel.compile.on_recompile=shout"],
        8,
        ["parallel.compile.on_recompile", "shout", "warn", "ignore"],
    ),
    # batch
    (["--train.global_batch_size=12"], 8, ["train.global_batch_size=12", "1 x 8", "nearest is 16", "-1"]),
    (["--train.micro_batch_size=3"], 8, ["train.global_batch_size=8", "3 x 8", "nearest is 24"]),
    (["--train.micro_batch_size=0"], 8, ["train.micro_batch_size=0", "must be at least 1"]),
    (["--train.micro_batch_size=many"], 8, ["train.micro_batch_size: must be an integer or auto"]),
    # keys, types and files
    (
        ["--parallel.plan=auto"],
        8,
        ["parallel.plan=auto", "tools.plan", "--save FILE", "--parallel.plan=FILE"],
    ),
    (["--parallel.plan=nowhere.yaml"], 8, ["parallel.plan=nowhere.yaml", "no such file", "Use manual"]),
    (
        ["--parallel.dp_shrad=2"],
        8,
        ["unknown key parallel.dp_shrad", "the command line", "Did you mean parallel.dp_shard?"],
    ),
    (["--parallel.tp=two"], 8, ["parallel.tp", "two", "auto or an integer"]),
    (["--parallel.tp=true"], 8, ["parallel.tp", "integer"]),
    (
        ["--parallel.reshard_after_forward=sometimes"],
        8,
        ["parallel.reshard_after_forward", "sometimes", "integer"],
    ),
    (["--parallel.cpu_offload=maybe"], 8, ["parallel.cpu_offload", "maybe", "true or false"]),
    (["--parallel.tp_modules=attention"], 8, ["parallel.tp_modules", "attention", "a list"]),
    (["--parallel.compile=inductor"], 8, ["parallel.compile is a section", "--parallel.compile.NAME=value"]),
    (["--train.seq_len=2048"], 8, ["train.seq_len=2048", "model.max_seq_len=1024"]),
    (["--model.n_kv_heads=3"], 8, ["model.n_kv_heads=3", "must divide model.n_heads=8"]),
]


def test_a_wrong_config_is_one_clear_line() -> None:
    def check(arguments: list[str], processes: int, words: list[str]) -> None:
        with pytest.raises((PlanError, ConfigError)) as error:
            plan_run(parse_config(config_arguments(*arguments)).job, processes, gpus_per_node=8)
        check_line(str(error.value), words)

    try_each(CONFIGS, check)


def check_line(report: str, words: list[str]) -> None:
    assert [word for word in words if word not in report] == [], report
    assert "\n" not in report, "one mistake, one line"


Edit = Callable[[dict[str, Any]], object]


def at(*place: str | int, value: Any) -> Edit:
    def apply(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return apply


def cut(name: str, **keys: Any) -> Edit:
    """Take one block out of its range and change its settings."""

    def apply(data: dict[str, Any]) -> None:
        blocks = data["units"][1]
        i = int(name.split(".")[1])
        low = {**blocks, "unit": f"layers.[0-{i - 1}]"}
        high = {**blocks, "unit": f"layers.[{i + 1}-5]"}
        data["units"][1:2] = [low, {**blocks, "unit": name, **keys}, high]

    return apply


BLOCKS, EMBEDDING, HEAD = ("units", 1), ("units", 0), ("units", 2)
SHAPE = ["--model.n_layers=5"]
# An edit of the file, additional arguments, processes, and texts that the line must contain next to the path.
PLAN_FILES: list[tuple[Edit, list[str], int, list[str]]] = [
    # for another model or number of processes
    (
        lambda data: None,
        [],
        4,
        ["mesh is for 8 processes", "this run has 4", "start 8, or make a new plan"],
    ),
    (
        lambda data: None,
        SHAPE,
        8,
        ["(8, the model has 7", "head", "make a new plan for this model"],
    ),
    (
        lambda data: None,
        ["--model.tie_embeddings=true"],
        8,
        ["tok_embeddings and head share a parameter", "put them in one unit"],
    ),
    (lambda data: None, ["--train.seq_len=255"], 8, ["mesh: tp=2 must divide train.seq_len=255", "Use 1."]),
    (at("mesh", "tp", value=8), [], 32, ["mesh: tp=8 must divide model.n_kv_heads=4", "Use 1, 2 or 4."]),
    # mesh and batch
    (at("mesh", "dp_shard", value=8), [], 8, ["mesh is for 16 processes", "this run has 8"]),
    (at("mesh", "dp_shard", value=0), [], 8, ["mesh: dp_shard=0 must be at least 1"]),
    (at("mesh", "dp_shard", value="four"), [], 8, ["mesh.dp_shard='four' must be an integer"]),
    (at("mesh", "ep", value=2), [], 8, ["unknown key mesh.ep. Known: dp_replicate, dp_shard, tp, cp"]),
    (at("mesh", "cp", value=2), [], 16, ["context: cores=[] must be this model's attention cores"]),
    (at("context", "exchange", value="ring"), [], 8, ["exchange=ring is not one of heads, gather"]),
    (at("micro_batch_size", value=0), [], 8, ["micro_batch_size=0 must be an integer >= 1"]),
    (lambda data: data.pop("accumulation"), [], 8, ["accumulation is missing"]),
    # units
    (
        cut("layers.2", unit="layers.22"),
        [],
        8,
        ["unit layers.22: this model has no module layers.22", "Did you mean layers.2?"],
    ),
    (
        lambda data: data["units"].pop(1),
        [],
        8,
        ["layers.0, layers.1, layers.2 ... is in no unit", "add it to one"],
    ),
    (at(*BLOCKS, "unit", value="layers.[0-6]"), [], 8, ["unit layers.6", "no module layers.6"]),
    (at(*EMBEDDING, "unit", value="tok_embeddings+layers.0"), [], 8, ["module layers.0 is in 2 units"]),
    (
        lambda data: data["units"].reverse(),
        [],
        8,
        ["is listed after", "list units in the order of the forward"],
    ),
    (at(*BLOCKS, "unit", value=5), [], 8, ["each entry needs a key 'unit' with a name"]),
    (
        at(*BLOCKS, "shard", value=True),
        [],
        8,
        ["unit layers.[0-5]: unknown key shard.", "reshard_after_forward"],
    ),
    (
        at("modules", value=["tok_embeddings"]),
        [],
        8,
        ["modules are not those of this model (1, the model has 8"],
    ),
    # resharding and dtypes
    (
        at(*BLOCKS, "reshard_after_forward", value=2),
        [],
        8,
        ["units layers.0 to layers.5 (6): reshard_after_forward=2", "tp=2"],
    ),
    (
        at(*BLOCKS, "reshard_after_forward", value="yes"),
        [],
        8,
        ["reshard_after_forward='yes'", "true or false or an integer"],
    ),
    (at(*HEAD, "reduce_dtype", value="half"), [], 8, ["unit head: reduce_dtype=half", "float32, bfloat16"]),
    (
        at(*HEAD, "param_dtype", value="bfloat16"),
        [],
        8,
        [
            "unit layers.5 returns float32, but unit head computes in bfloat16",
            "output_dtype=bfloat16 on layers.5",
        ],
    ),
    (
        at(*HEAD, "output_dtype", value="bfloat16"),
        [],
        8,
        ["unit head: output_dtype=bfloat16 would round the loss", "use same"],
    ),
    # activation checkpointing and compiling
    (
        at(*HEAD, "activation_checkpoint", value="full"),
        [],
        8,
        ["unit head: activation_checkpoint=full is for blocks", "use none"],
    ),
    (
        at(*BLOCKS, "activation_checkpoint", value="half"),
        [],
        8,
        ["activation_checkpoint=half", "none, full, selective, budget"],
    ),
    (
        at(*BLOCKS, "activation_checkpoint", value="selective"),
        [],
        8,
        ["(6): saved_ops=[] keeps nothing", "use activation_checkpoint=full"],
    ),
    (
        cut("layers.1", activation_checkpoint="selective", saved_ops=["matmul"]),
        [],
        8,
        ["unit layers.1: saved_ops: 'matmul'", "aten.mm"],
    ),
    (cut("layers.1", saved_ops=["aten.mm"]), [], 8, ["unit layers.1: saved_ops=['aten.mm']", "use []"]),
    (
        cut("layers.1", activation_checkpoint="budget", activation_budget=7),
        [],
        8,
        ["unit layers.1: activation_budget=7.0", "between 0"],
    ),
    (cut("layers.1", activation_budget=0.5), [], 8, ["unit layers.1: activation_budget=0.5", "use 1.0"]),
    (
        at("compile", "enabled", value=False),
        [],
        8,
        ["compiled=true contradicts compile.enabled=false", "change one"],
    ),
    (at("compile", "mode", value="quick"), [], 8, ["compile.mode=quick is not one of default"]),
    (at(*EMBEDDING, "compiled", value=True), [], 8, ["unit tok_embeddings: compiled=true", "use false"]),
    # prefetch
    (
        cut("layers.2", forward_prefetch=["layers.9"]),
        [],
        8,
        ["unit layers.2: forward_prefetch names layers.9", "not a unit of this plan"],
    ),
    (
        cut("layers.2", forward_prefetch=["layers.2"]),
        [],
        8,
        ["unit layers.2: forward_prefetch names the unit itself", "remove it"],
    ),
    (
        cut("layers.2", forward_prefetch=["layers.1"]),
        [],
        8,
        ["names layers.1, which the forward needs earlier", "list later units"],
    ),
    (
        cut("layers.2", forward_prefetch=["layers.4", "layers.3"]),
        [],
        8,
        ["not in the order", "layers.3, layers.4"],
    ),
    (
        cut("layers.2", backward_prefetch=["layers.1", "layers.1"]),
        [],
        8,
        ["unit layers.2: backward_prefetch names layers.1 twice"],
    ),
    (
        cut("layers.2", backward_prefetch=["head"]),
        [],
        8,
        ["names head, which the backward needs earlier", "list later units"],
    ),
    (cut("layers.2", backward_prefetch=-1), [], 8, ["unit layers.2: backward_prefetch=-1", "0 (none)"]),
    (
        lambda data: (
            data["mesh"].update(dp_replicate=4, dp_shard=1),
            cut("layers.2", forward_prefetch=["layers.3"])(data),
        ),
        [],
        8,
        ["unit layers.2: forward_prefetch names layers.3, which dp_shard=1 leaves unsharded", "use 0"],
    ),
    (
        lambda data: (
            cut("layers.3", backward_prefetch=["layers.2"])(data),
            data["units"][1].update(reshard_after_forward=False),
        ),
        [],
        8,
        ["unit layers.3: backward_prefetch names layers.2, which stays gathered", "remove it"],
    ),
    # tensor parallelism
    (at("tensor", "styles", value={}), [], 8, ["tensor: tp > 1 needs the styles", "make a new plan"]),
    (
        at("tensor", "styles", "layers.*.attention.wq", value="colwide"),
        [],
        8,
        ["layers.*.attention.wq: colwide", "Did you mean colwise?"],
    ),
    (
        at("tensor", "styles", "layers.*.attention.wq", value="rowwise"),
        [],
        8,
        ["tensor: part attention", "layers.*.attention.wq is rowwise, must be colwise"],
    ),
    (
        at("tensor", "styles", "layers.*.attention.wk2", value="colwise"),
        [],
        8,
        ["layers.*.attention.wk2", "Did you mean layers.*.attention."],
    ),
    # config keys that contradict the file
    (
        lambda data: None,
        ["--parallel.tp=4"],
        8,
        ["parallel.tp=4", "has 2", "remove the key, or edit the file"],
    ),
    (
        lambda data: None,
        ["--parallel.strategy=full_shard"],
        8,
        ["parallel.strategy=full_shard is decided by"],
    ),
    (
        lambda data: None,
        ["--parallel.param_dtype=bfloat16"],
        8,
        ["parallel.param_dtype=bfloat16", "has float32"],
    ),
    (
        lambda data: None,
        ["--parallel.compile.backend=eager"],
        8,
        ["parallel.compile.backend=eager", "has inductor"],
    ),
    (
        lambda data: None,
        ["--train.global_batch_size=16"],
        8,
        ["train.global_batch_size=16", "has 8", "change one of them"],
    ),
]


@cache
def debug_plan() -> Plan:
    return plan_run(parse_config(config_arguments("--parallel.tp=2")).job, 8)


def write_plan(folder: Path, edit: Edit) -> Path:
    """Write the debug model's plan on 8 processes with tp=2, after an edit by hand."""
    data = plan_to_dict(debug_plan())
    assert [unit["unit"] for unit in data["units"]] == ["tok_embeddings", "layers.[0-5]", "head"]
    edit(data)
    path = folder / "edited.yaml"
    path.write_text(yaml.dump(data, Dumper=_NoAliases, sort_keys=False))
    return path


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_a_wrong_plan_file_is_one_clear_line(tmp_path: Path) -> None:
    def check(edit: Edit, arguments: list[str], processes: int, words: list[str]) -> None:
        path = write_plan(tmp_path, edit)
        with pytest.raises(PlanError) as error:
            plan_run(parse_config(config_arguments(f"--parallel.plan={path}", *arguments)).job, processes)
        check_line(str(error.value), [str(path), *words])

    try_each(PLAN_FILES, check)


NO_PLANS: list[tuple[str, list[str]]] = [
    ("", ["mesh, micro_batch_size", "units are missing"]),
    ("- just\n- a list\n", ["top level must be a mapping"]),
    ("mesh: [1,\n", ["line 2"]),
    ("mesh: {}\nmesh: {}\n", ["'mesh' appears twice", "merge them"]),
    ("mesh: &a {tp: 1}\ntensor: *a\n", ["aliases (*a) are not allowed", "repeat the value"]),
    ("\0", ["special characters are not allowed"]),
]


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    config = parse_config(config_arguments(f"--parallel.plan={path}"))

    def check(text: str, words: list[str]) -> None:
        path.write_text(text)
        with pytest.raises(PlanError) as error:
            plan_run(config.job, 8)
        report = str(error.value)
        assert [word for word in ("plan file", str(path), *words) if word not in report] == [], report

    try_each(NO_PLANS, check)


def test_there_are_more_than_enough() -> None:
    assert len(CONFIGS) >= 40
    assert len(PLAN_FILES) >= 40


def test_an_unedited_plan_file_runs(tmp_path: Path) -> None:
    """The cases above fail because of their edit, not for another reason."""
    path = write_plan(tmp_path, lambda data: None)
    plan = plan_run(parse_config(config_arguments(f"--parallel.plan={path}")).job, 8)
    assert path.read_text() == plan_to_yaml(plan)
    for edit in (
        cut("layers.2", forward_prefetch=["layers.3", "head"]),
        cut("layers.3", reshard_after_forward=False),
    ):
        plan_run(parse_config(config_arguments(f"--parallel.plan={write_plan(tmp_path, edit)}")).job, 8)


def test_all_mistakes_come_in_one_report(tmp_path: Path) -> None:
    edit = cut("layers.2", forward_prefetch=["layers.9"], reduce_dtype="half", saved_ops=["aten.mm"])
    path = write_plan(tmp_path, edit)
    with pytest.raises(PlanError) as error:
        plan_run(parse_config(config_arguments(f"--parallel.plan={path}", "--parallel.strategy=ddp")).job, 4)
    lines = str(error.value).splitlines()
    places = [line.removeprefix(f"plan file {path}: ").split("=")[0].split(" names")[0] for line in lines]
    assert [place.split(" is for")[0] for place in places] == [
        "parallel.strategy",
        "the plan's mesh",
        "unit layers.2: reduce_dtype",
        "unit layers.2: saved_ops",
        "unit layers.2: forward_prefetch",
    ]


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (
            "train.main",
            ["--parallel.tp=8"],
            [
                "parallel: dp_replicate=1 x dp_shard=1 x tp=8 is 8 processes, but this run has 1",
                "parallel.tp=8 must divide model.n_kv_heads=4. Use 1, 2 or 4.",
            ],
        ),
        ("train.main", ["--parallel.strategy=fullshard"], ["Did you mean full_shard?"]),
        (
            "tools.plan",
            ["--gpus=8", "--parallel.dp_shard=3"],
            ["dp_shard=3 x tp=1 is 3 processes, but this run has 8"],
        ),
        (
            "tools.plan",
            ["--gpus=8", "--parallel.plan={plan}"],
            ["{plan}: unit layers.2: forward_prefetch names the unit itself"],
        ),
    ],
)
def test_the_command_line_leaves_with_2_and_without_a_traceback(
    module: str, arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    plan = str(write_plan(tmp_path, cut("layers.2", forward_prefetch=["layers.2"])))
    run_dir = [f"--run.dir={tmp_path / 'run'}"] if module == "train.main" else []
    done = run(1, *config_arguments(*(a.replace("{plan}", plan) for a in arguments)), *run_dir, module=module)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == len(words)
    assert lines[0].startswith("PlanError: ")
    assert [w for w, line in zip(words, lines, strict=True) if w.replace("{plan}", plan) not in line] == [], (
        done.stderr
    )
