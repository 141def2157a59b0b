"""tools/import_accelerate: every accelerate key is mapped, dropped with a reason or refused, and the result
plans and trains."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from meshwright.parallel.plan.schema import Plan
from meshwright.tools.import_accelerate.__main__ import main, make_parser
from meshwright.train.config_parser import known_keys, load_config, parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER, TINY, read_metrics, run, write_text

Tool = Callable[..., CompletedProcess[str]]
Importer = Callable[..., dict[str, Any]]


def accelerate(version: int = 1, machines: int = 1, processes: int = 8, top: str = "", **fsdp: Any) -> str:
    """An accelerate config with FSDP; `fsdp` are keys of fsdp_config without their prefix."""
    section = yaml.safe_dump(
        {"fsdp_config": {"fsdp_version": version} | {f"fsdp_{k}": v for k, v in fsdp.items()}}
    )
    return f"distributed_type: FSDP\nnum_processes: {processes}\nnum_machines: {machines}\n{section}{top}"


@pytest.fixture
def imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importer:
    """Return a function from a config's text to the tool's JSON document, through a real file."""

    def call(text: str) -> dict[str, Any]:
        path = tmp_path / "theirs.yaml"
        path.write_text(text, encoding="utf-8")
        capsys.readouterr()
        main([str(path), "--json"])
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def plans(imports: Importer, tmp_path: Path) -> Callable[..., Plan]:
    """Return a function from a config's text to the plan of the imported config for 8 processes, read from a
    file as train.main would."""

    def call(text: str) -> Plan:
        path = tmp_path / "ours.yaml"
        path.write_text(yaml.safe_dump(imports(text)["config"]), encoding="utf-8")
        return plan_run(parse_config([f"--config={path}"]).job, 8)

    return call


def degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp


def of_kind(done: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the items of a kind: mapped or dropped."""
    return [item for item in done["items"] if item["verdict"]["kind"] == kind]


def refusal(imports: Importer, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        imports(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "number", "machines", "expected", "reshard"),
    [
        ("FULL_SHARD", 1, 2, (1, 8, 1), True),
        ("SHARD_GRAD_OP", 2, 2, (1, 8, 1), False),
        ("NO_SHARD", 3, 2, (8, 1, 1), None),
        ("HYBRID_SHARD", 4, 2, (2, 4, 1), True),
        ("HYBRID_SHARD", 4, 1, (1, 8, 1), True),
        ("HYBRID_SHARD_ZERO2", 5, 4, (4, 2, 1), False),
    ],
)
def test_version_1_strategies(
    plans: Callable[..., Plan],
    imports: Importer,
    strategy: str,
    number: int,
    machines: int,
    expected: tuple[int, ...],
    reshard: bool | None,
) -> None:
    """A strategy under either key, by name in any case or by number, gives the same config, and its plan is
    the expected one."""
    text = accelerate(machines=machines, sharding_strategy=strategy)
    config = imports(text)["config"]
    for key in ("sharding_strategy", "reshard_after_forward"):
        for value in (strategy, strategy.lower(), str(number), number):
            if key == "sharding_strategy" or str(value) != "1":  # a truth value there
                assert imports(accelerate(machines=machines, **{key: value}))["config"] == config, (
                    key,
                    value,
                )
    plan = plans(text)
    assert degrees(plan) == expected
    if reshard is not None:
        assert {unit.reshard_after_forward for unit in plan.units[:-1]} == {reshard}


def test_hybrid_shard_on_one_machine_says_what_happens(imports: Importer) -> None:
    done = imports(accelerate(sharding_strategy="HYBRID_SHARD"))
    assert done["config"]["parallel"]["strategy"] == "hybrid_shard"
    assert any("nothing to replicate" in note for note in done["notes"])


def test_version_1_prefers_the_strategy_and_warns(imports: Importer, plans: Callable[..., Plan]) -> None:
    text = accelerate(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward="FULL_SHARD")
    assert {unit.reshard_after_forward for unit in plans(text).units} == {False}
    done = imports(text)
    assert any(
        n.startswith("warning: fsdp_sharding_strategy=SHARD_GRAD_OP")
        and "fsdp_reshard_after_forward=FULL_SHARD" in n
        and "delete one of them" in n
        for n in done["notes"]
    )
    assert "fsdp_config.fsdp_reshard_after_forward" in [entry["key"] for entry in of_kind(done, "dropped")]


def test_version_1_with_a_strategy_under_the_new_key_says_what_accelerate_launch_does(
    imports: Importer,
) -> None:
    done = imports(accelerate(machines=2, reshard_after_forward="HYBRID_SHARD"))
    assert any("accelerate launch 1.15 does FULL_SHARD" in note for note in done["notes"])
    assert not any(
        "FULL_SHARD" in note for note in imports(accelerate(reshard_after_forward="FULL_SHARD"))["notes"]
    )


@pytest.mark.parametrize(
    ("value", "reshard"),
    [(True, True), (False, False), ("false", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", False)],
)
def test_version_2_resharding(plans: Callable[..., Plan], value: Any, reshard: bool) -> None:
    plan = plans(accelerate(version=2, reshard_after_forward=value, sharding_strategy="FULL_SHARD"))
    assert degrees(plan) == (1, 8, 1)
    assert {unit.reshard_after_forward for unit in plan.units[:-1]} == {reshard}


def test_version_2_ignores_the_strategy_beside_resharding_and_says_what_is_lost(imports: Importer) -> None:
    done = imports(
        accelerate(version=2, machines=2, reshard_after_forward=True, sharding_strategy="HYBRID_SHARD")
    )
    assert done["config"]["parallel"] == {"reshard_after_forward": True, "compile": {"enabled": False}}
    assert any("which is not HYBRID_SHARD" in note for note in done["notes"])


def test_version_2_keeps_a_strategy_that_stands_alone(imports: Importer, plans: Callable[..., Plan]) -> None:
    text = accelerate(version=2, machines=2, sharding_strategy="HYBRID_SHARD")
    assert degrees(plans(text)) == (2, 4, 1)
    assert any("accelerate 1.15 ignores fsdp_sharding_strategy" in note for note in imports(text)["notes"])


def sizes(**degrees: int) -> str:
    return yaml.safe_dump(
        {"parallelism_config": {f"parallelism_config_{axis}_size": n for axis, n in degrees.items()}}
    )


def test_parallelism_config(plans: Callable[..., Plan]) -> None:
    top = sizes(dp_replicate=2, dp_shard=2, tp=2, cp=1)
    plan = plans(accelerate(version=2, reshard_after_forward=False, top=top))
    assert degrees(plan) == (2, 2, 2)
    assert not plan.units[0].reshard_after_forward


def test_context_parallelism(plans: Callable[..., Plan]) -> None:
    plan = plans(accelerate(version=2, top=sizes(dp_shard=4, cp=2)))
    assert (plan.mesh.dp_shard, plan.mesh.cp, plan.mesh.data_parallel) == (4, 2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp_shard": 4, "sp": 2}, "sp_size=2: sequence parallelism by DeepSpeed"),
        ({"dp_shard": 4}, "dp_shard=4 x tp=1 is 4 processes, but this run has 8"),
    ],
)
def test_parallelism_that_is_refused(imports: Importer, given: dict[str, int], message: str) -> None:
    assert message in refusal(imports, accelerate(version=2, top=sizes(**given)))


@pytest.mark.parametrize(
    ("key", "value", "path", "expected"),
    [
        ("backward_prefetch", "BACKWARD_PRE", "parallel.backward_prefetch", 1),
        ("backward_prefetch", 1, "parallel.backward_prefetch", 1),
        ("backward_prefetch", "BACKWARD_POST", "parallel.backward_prefetch", 0),
        ("backward_prefetch", "NO_PREFETCH", "parallel.backward_prefetch", 0),
        ("forward_prefetch", True, "parallel.forward_prefetch", 1),
        ("forward_prefetch", "false", "parallel.forward_prefetch", 0),
        ("activation_checkpointing", True, "parallel.activation_checkpoint", "full"),
        ("activation_checkpointing", False, "parallel.activation_checkpoint", "none"),
        ("offload_params", True, "parallel.cpu_offload", True),
        ("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "parallel.unit_min_params", 0),
        ("auto_wrap_policy", "NO_WRAP", "parallel.unit_min_params", 0),
        ("auto_wrap_policy", "SIZE_BASED_WRAP", "parallel.unit_min_params", 100_000_000),
    ],
)
def test_fsdp_keys(imports: Importer, key: str, value: Any, path: str, expected: Any) -> None:
    section, name = path.split(".")
    assert imports(accelerate(**{key: value}))["config"][section][name] == expected


def test_a_size_joins_blocks_into_units(plans: Callable[..., Plan]) -> None:
    plan = plans(accelerate(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1_000_000))
    assert ("layers.0", "layers.1") in [unit.modules for unit in plan.units]


@pytest.mark.parametrize(
    "name", ["state_dict_type", "sync_module_states", "use_orig_params", "cpu_ram_efficient_loading"]
)
def test_keys_without_a_counterpart_are_dropped_with_a_reason(imports: Importer, name: str) -> None:
    done = imports(accelerate(**{name: True}))
    (entry,) = [entry for entry in of_kind(done, "dropped") if entry["key"] == f"fsdp_config.fsdp_{name}"]
    assert len(entry["verdict"]["why"]) > 20


def test_a_key_that_only_the_documentation_has_is_dropped_with_the_right_name(imports: Importer) -> None:
    done = imports(accelerate(backward_prefetch_policy="BACKWARD_PRE"))
    (why,) = [
        entry["verdict"]["why"]
        for entry in of_kind(done, "dropped")
        if entry["key"].endswith("prefetch_policy")
    ]
    assert "the key is fsdp_backward_prefetch" in why
    assert "backward_prefetch" not in done["config"]["parallel"]


def test_a_key_of_a_section_may_lack_its_prefix(imports: Importer) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {offload_params: true}\ndynamo_config: "
        "{backend: EAGER}\n"
    )
    parallel = imports(text)["config"]["parallel"]
    assert parallel["cpu_offload"] is True
    assert parallel["compile"]["backend"] == "eager"


def test_a_key_in_two_spellings_is_refused(imports: Importer) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {offload_params: true, "
        "fsdp_offload_params: true}\n"
    )
    assert "the same key as fsdp_config.offload_params" in refusal(imports, text)


@pytest.mark.parametrize(
    ("kind", "precision", "expected"),
    [
        ("FSDP", "'no'", ("float32", "float32")),
        ("FSDP", "no", ("float32", "float32")),  # YAML reads a bare no as false
        ("FSDP", "bf16", ("bfloat16", "bfloat16")),
        ("MULTI_GPU", "bf16", ("bfloat16", "float32")),
    ],
)
def test_precision(imports: Importer, kind: str, precision: str, expected: tuple[str, str]) -> None:
    done = imports(f"distributed_type: {kind}\nnum_processes: 8\nmixed_precision: {precision}\n")
    assert (done["config"]["parallel"]["param_dtype"], done["config"]["parallel"]["reduce_dtype"]) == expected


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ("mixed_precision: fp16\n", "float16 needs a gradient scaler"),
        ("fp16: true\n", "float16 needs a gradient scaler"),
        ("mixed_precision: fp8\n", "float8 is not in this version"),
        (
            "fp8_config: {backend: AO, fp8_format: HYBRID}\n",
            "'fp8_format': 'HYBRID'}: float8 is not in this version",
        ),
        (
            "deepspeed_config: {zero_stage: 3}\n",
            "DeepSpeed is not supported: for ZeRO 2 use parallel.strategy shard_grad_op",
        ),
        ("megatron_lm_config: {megatron_lm_tp_degree: 2}\n", "Megatron-LM is not supported"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "only LOCAL_MACHINE is supported"),
        ("tpu_use_cluster: true\n", "TPUs are not supported"),
        (
            "dynamo_config: {dynamo_backend: TENSORRT}\n",
            "dynamo_backend=TENSORRT: the backend is not supported",
        ),
        (
            "dynamo_config: {dynamo_backend: EAGER, dynamo_mode: max-autotune}\n",
            "parallel.compile.mode=max-autotune is for backend inductor",
        ),
        ("offload_paramz: 1\n", "unknown key"),
        ("mixed_precison: bf16\n", "Did you mean mixed_precision?"),
        ("fsdp_offload_params: true\n", "Did you mean fsdp_config.fsdp_offload_params?"),
        ("use_cpu: maybe\n", "use_cpu=maybe: it must be true or false"),
        ("gradient_accumulation_steps: 1.5\n", "gradient_accumulation_steps=1.5: it must be an integer"),
        ("dynamo_config: inductor\n", "it is a section and needs a mapping"),
        (
            "gradient_accumulation_kwargs: {num_steps: 4}\n",
            "num_steps=4: set gradient_accumulation_steps instead",
        ),
    ],
)
def test_what_is_refused(imports: Importer, top: str, message: str) -> None:
    assert message in refusal(imports, accelerate(top=top))


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        ({"sharding_strategy": "FULL_SHRAD"}, "Did you mean FULL_SHARD?"),
        ({"sharding_strategy": 6}, "must be one of FULL_SHARD"),
        (
            {"transformer_layer_cls_to_wrap": "GPTJBlock,LlamaDecoderLayer"},
            "GPTJBlock is not supported: the model is a Llama, its block is LlamaDecoderLayer",
        ),
        ({"activation_checkpointing_offload": True}, "not in this version: set it to false"),
        ({"ignored_modules": "lm_head"}, "ignored_modules=lm_head: every parameter belongs to an FSDP unit"),
        ({"backward_prefetch": "BACKWARD_PREE"}, "Did you mean BACKWARD_PRE?"),
        ({"offload_params": [1]}, "it must be true or false"),
        ({"min_num_params": "1e8"}, "min_num_params=100000000.0: it must be an integer of at least 0"),
        ({"versoin": 2}, "Did you mean fsdp_config.fsdp_version?"),
    ],
)
def test_fsdp_values_that_are_refused(imports: Importer, fsdp: dict[str, Any], message: str) -> None:
    assert message in refusal(imports, accelerate(auto_wrap_policy="SIZE_BASED_WRAP", **fsdp))


def test_all_refusals_are_in_one_report(imports: Importer) -> None:
    text = accelerate(
        transformer_layer_cls_to_wrap="T5Block",
        top="mixed_precision: fp8\nmachine_rnk: 0\n",
        processes=7,
        machines=2,
    )
    report = refusal(imports, text)
    assert len(report.splitlines()) == 4
    assert "it must be a multiple of num_machines=2" in report


def test_what_must_be_there(imports: Importer) -> None:
    refused = refusal(imports, "num_processes: 8\n")
    assert "distributed_type: the key is missing: set it to one of FSDP" in refused
    assert "num_processes: the key is missing" in refusal(imports, "distributed_type: FSDP\n")


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("INDUCTOR", {"enabled": True, "backend": "inductor", "float32_matmul_precision": "high"}),
        ("aot_eager", {"enabled": True, "backend": "aot_eager", "float32_matmul_precision": "high"}),
        ("'NO'", {"enabled": False}),
    ],
)
def test_dynamo_backends(imports: Importer, backend: str, expected: dict[str, Any]) -> None:
    for spelling in (
        f"dynamo_config: {{dynamo_backend: {backend}}}\n",
        f"dynamo_config.dynamo_backend: {backend}\n",
        f"dynamo_backend: {backend}\n",
    ):
        assert imports(accelerate(top=spelling))["config"]["parallel"]["compile"] == expected


def test_dynamo_options(plans: Callable[..., Plan], imports: Importer) -> None:
    options = {
        "backend": "INDUCTOR",
        "mode": "reduce-overhead",
        "use_dynamic": True,
        "use_fullgraph": False,
        "use_regional_compilation": False,
    }
    text = accelerate(top=yaml.safe_dump({"mixed_precision": "bf16", "dynamo_config": options}))
    compiled = plans(text).compile
    assert (compiled.enabled, compiled.mode, compiled.dynamic) == (True, "reduce-overhead", True)
    assert any("CUDA graphs" in note for note in imports(text)["notes"])


def test_without_dynamo_nothing_is_compiled_and_a_note_says_how(imports: Importer) -> None:
    done = imports(accelerate())
    assert done["config"]["parallel"]["compile"] == {"enabled": False}
    assert any("--parallel.compile.enabled=true" in note for note in done["notes"])


def test_distributed_data_parallel(plans: Callable[..., Plan], imports: Importer) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 8\nfsdp_config: {fsdp_offload_params: true}\n"
    plan = plans(text)
    assert degrees(plan) == (8, 1, 1)
    assert not plan.cpu_offload
    dropped = of_kind(imports(text), "dropped")
    assert any("MULTI_GPU does not read fsdp_config" in entry["verdict"]["why"] for entry in dropped)


def test_accumulation_is_kept(plans: Callable[..., Plan]) -> None:
    plan = plans(accelerate(version=2, top="gradient_accumulation_steps: 4\n" + sizes(dp_shard=4, tp=2)))
    assert (plan.accumulation, plan.global_batch_size) == (4, 16)


SYNC = (
    "sync_each_batch: {}\n",
    "gradient_accumulation_kwargs: {{sync_each_batch: {}}}\n",
    "gradient_accumulation_kwargs.sync_each_batch: {}\n",
)
ACCUMULATE = "gradient_accumulation_steps: 4\n"


def sync_verdicts(done: dict[str, Any]) -> list[dict[str, Any]]:
    return [item["verdict"] for item in done["items"] if item["key"].endswith("sync_each_batch")]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("spelling", SYNC)
@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", "every_micro_batch"), ("'no'", "last_micro_batch"), ("false", "last_micro_batch")],
)
def test_sync_each_batch_says_when_gradients_are_reduced(
    plans: Callable[..., Plan], imports: Importer, version: int, spelling: str, value: str, expected: str
) -> None:
    text = accelerate(version=version, top=ACCUMULATE + spelling.format(value))
    assert {unit.reduce_gradients for unit in plans(text).units} == {expected}
    assert len(sync_verdicts(imports(text))) == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("precision", "dtype", "size"), [("bf16", "bfloat16", 2), ("BF16", "bfloat16", 2), ("no", "float32", 4)]
)
def test_accumulation_reduces_gradients_when_accelerate_does(
    plans: Callable[..., Plan], imports: Importer, version: int, precision: str, dtype: str, size: int
) -> None:
    """Without sync_each_batch: in the last micro batch. A note says what that costs and which key changes
    it."""
    text = accelerate(version=version, top=f"{ACCUMULATE}mixed_precision: {precision}\n")
    units = plans(text).units
    assert {unit.reduce_gradients for unit in units} == {"last_micro_batch"}
    assert {unit.reduce_dtype for unit in units} == {dtype}
    (note,) = [note for note in imports(text)["notes"] if "as accelerate does by default (with" in note]
    assert f"every rank sums whole gradients ({dtype}, {size} bytes per parameter)" in note
    assert "--parallel.reduce_gradients=every_micro_batch keeps shards only" in note


@pytest.mark.parametrize(
    ("kind", "steps", "why"),
    [
        ("FSDP", "", "a step has one micro batch"),
        ("FSDP", "gradient_accumulation_steps: 1\n", "a step has one micro batch"),
        ("MULTI_GPU", "", "a step has one micro batch"),
        ("MULTI_GPU", ACCUMULATE, "DistributedDataParallel always all-reduces gradients once per step"),
        ("'NO'", ACCUMULATE, "one process has no gradients to reduce"),
    ],
)
def test_sync_each_batch_without_effect_is_dropped(
    imports: Importer, kind: str, steps: str, why: str
) -> None:
    text = f"distributed_type: {kind}\nnum_processes: 8\n{steps}"
    assert not sync_verdicts(imports(text))
    assert "reduce_gradients" not in imports(text)["config"]["parallel"]
    for value in ("true", "false"):
        done = imports(f"{text}sync_each_batch: {value}\n")
        (verdict,) = sync_verdicts(done)
        assert verdict["kind"] == "dropped"
        assert why in verdict["why"]
        assert "reduce_gradients" not in done["config"]["parallel"]


@pytest.mark.parametrize("spelling", SYNC)
@pytest.mark.parametrize("value", ["3.5", "maybe", "[true]"])
@pytest.mark.parametrize("steps", ["", ACCUMULATE])
def test_a_wrong_sync_each_batch_is_refused(imports: Importer, spelling: str, value: str, steps: str) -> None:
    report = refusal(imports, accelerate(top=steps + spelling.format(value)))
    assert "sync_each_batch=" in report
    assert report.endswith(": it must be true or false")


def test_sync_each_batch_in_two_spellings_is_refused(imports: Importer) -> None:
    top = ACCUMULATE + SYNC[0].format("true") + SYNC[1].format("false")
    report = refusal(imports, accelerate(top=top))
    assert report.endswith(
        "gradient_accumulation_kwargs.sync_each_batch=false: it is the same key as sync_each_batch: delete "
        "one of them"
    )


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        (accelerate(), "torchrun --nproc-per-node 8 -m train.main --config CONFIG.yaml"),
        (
            accelerate(
                machines=2, top="main_process_ip: 10.0.0.1\nmain_process_port: 29501\nmachine_rank: 1\n"
            ),
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501 "
            "-m train.main --config CONFIG.yaml",
        ),
        (
            accelerate(processes=2, top="gpu_ids: 2,3\n"),
            "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 -m train.main --config CONFIG.yaml",
        ),
        ("distributed_type: 'NO'\n", "python -m train.main --config CONFIG.yaml"),
    ],
)
def test_the_launch_line(imports: Importer, text: str, launch: str) -> None:
    assert imports(text)["launch"] == launch


def test_every_key_has_one_fate_and_every_target_exists(imports: Importer) -> None:
    text = accelerate(
        machines=2,
        sharding_strategy="HYBRID_SHARD",
        use_orig_params=True,
        offload_params=False,
        top="machine_rank: 0\nmixed_precision: bf16\ndynamo_config: {}\ndebug: false\n",
    )
    done = imports(text)
    theirs = [entry["key"] for entry in done["items"]]
    assert sorted(theirs) == sorted({*theirs})
    assert {"fsdp_config.fsdp_use_orig_params", "machine_rank", "dynamo_config", "num_machines"} < {*theirs}
    assert len(of_kind(done, "mapped")) + len(of_kind(done, "dropped")) == len(theirs)
    targets = {name for entry in of_kind(done, "mapped") for name in entry["verdict"]["settings"]}
    assert targets <= {*known_keys()}
    assert {*done} == {"source", "config", "items", "launch", "notes"}


def test_a_degree_that_depends_on_the_model_is_a_note(imports: Importer) -> None:
    done = imports(accelerate(version=2, top=sizes(tp=8)))
    assert any("parallel.tp=8 must divide model.n_kv_heads=4" in note for note in done["notes"])


@pytest.mark.parametrize(
    "arguments", [["titan.toml"], ["--flags", "--compile.enable"], ["--flags=x", "a.yaml"]]
)
def test_torchtitans_settings_are_no_longer_read(tool: Tool, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "titan.toml").write_text("[parallelism]\ntensor_parallel_degree = 2\n")
    done = tool("import_accelerate", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torchtitan settings are no longer read: write a config" in done.stderr
    assert "parallel.dp_shard" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "the top level must be a mapping"),
        ("", "theirs.yaml: the file is empty"),
        ("a: &x 1\nb: *x\n", "aliases"),
        ("num_processes: 1\nnum_processes: 2\n", "appears twice"),
        ("a: !!python/object/apply:os.system [echo]\n", "tags"),
        ("a: [\n", "line"),
    ],
)
def test_files_that_are_no_config(imports: Importer, content: str, message: str) -> None:
    assert message in refusal(imports, content)


def test_as_a_command(tool: Tool, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "fsdp.yaml", tmp_path / "ours.yaml"
    theirs.write_text(accelerate(sharding_strategy="NO_SHARD"))
    done = tool("import_accelerate", str(theirs))
    assert done.returncode == 0
    ours.write_text(done.stdout)
    assert load_config(ours).parallel.strategy == "no_shard"
    assert "launch:\n  torchrun --nproc-per-node 8" in done.stderr
    missing = tool("import_accelerate", str(tmp_path))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert missing.stderr.startswith("ConfigError: ")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["-h"])
    shown = capsys.readouterr().out
    for action in make_parser()._actions:
        assert all(option in shown for option in action.option_strings)
        assert action.help


@pytest.mark.parametrize("bad", [[], ["--jsn"]])
def test_bad_options_leave_with_2(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bad)
    assert "error:" in capsys.readouterr().err


def test_an_imported_config_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "fsdp.yaml", tmp_path / "ours.yaml"
    theirs.write_text(
        accelerate(processes=2, machines=2, sharding_strategy="HYBRID_SHARD", activation_checkpointing=True)
    )
    main([str(theirs)])
    ours.write_text(capsys.readouterr().out)
    done = run(
        2,
        f"--config={ours}",
        *TINY,
        *EAGER,
        "--train.steps=2",
        f"--run.dir={tmp_path / 'run'}",
        *write_text(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(read_metrics(tmp_path / "run")) == [1, 2]
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert plan["mesh"] == {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "cp": 1}
