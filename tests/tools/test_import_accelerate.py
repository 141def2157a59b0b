"""tools.import_accelerate: what becomes of an accelerate config, by a table of files."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from meshwright.tools.import_accelerate import ROWS, convert, main
from meshwright.train.config_keys import known_keys
from meshwright.train.config_parser import load_config, parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run
from tests.support.plans import check_facts
from tests.support.tables import try_each

SHARDING, RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


def accelerate(machines: int = 1, kind: str = "FSDP", version: int = 1, top: str = "", **fsdp: Any) -> str:
    """An accelerate config of 8 processes; `fsdp` are keys of fsdp_config, `top` further lines."""
    section = yaml.safe_dump({"fsdp_config": {"fsdp_version": version, **fsdp}})
    return f"distributed_type: {kind}\nnum_processes: 8\nnum_machines: {machines}\n{section}{top}"


def sizes(**degrees: int) -> str:
    axes = {f"parallelism_config_{axis}_size": n for axis, n in degrees.items()}
    return yaml.safe_dump({"parallelism_config": axes})


def imported(folder: Path, text: str) -> dict[str, Any]:
    (folder / "theirs.yaml").write_text(text)
    return convert(folder / "theirs.yaml")


# Text, degrees (dp_replicate, dp_shard, tp, cp), and resharding of the blocks
MESHES: list[tuple[str, tuple[int, ...], bool]] = [
    (accelerate(2, **{SHARDING: "FULL_SHARD"}), (1, 8, 1, 1), True),
    (accelerate(2, **{SHARDING: 3}), (8, 1, 1, 1), True),
    (accelerate(2, **{SHARDING: "HYBRID_SHARD"}), (2, 4, 1, 1), True),
    (accelerate(4, **{RESHARD: "HYBRID_SHARD_ZERO2"}), (4, 2, 1, 1), False),
    (accelerate(**{SHARDING: "SHARD_GRAD_OP", RESHARD: "FULL_SHARD"}), (1, 8, 1, 1), False),
    (accelerate(version=2, **{SHARDING: "SHARD_GRAD_OP", RESHARD: True}), (1, 8, 1, 1), True),
    (accelerate(2, version=2, **{SHARDING: "HYBRID_SHARD"}), (2, 4, 1, 1), True),
    (
        accelerate(version=2, top=sizes(dp_replicate=2, dp_shard=2, tp=2), **{RESHARD: False}),
        (2, 2, 2, 1),
        False,
    ),
    (accelerate(version=2, top=sizes(dp_shard=4, cp=2)), (1, 4, 1, 2), True),
    (accelerate(kind="MULTI_GPU", fsdp_offload_params=True), (8, 1, 1, 1), True),
]


def test_degrees_and_resharding_are_those_of_accelerate(tmp_path: Path) -> None:
    def check(text: str, degrees: tuple[int, ...], reshard: bool) -> None:
        (tmp_path / "ours.yaml").write_text(yaml.safe_dump(imported(tmp_path, text)["config"]))
        plan = plan_run(parse_config([f"--config={tmp_path}/ours.yaml"]).job, 8)
        assert (plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp, plan.mesh.cp) == degrees
        assert {unit.reshard_after_forward for unit in plan.units[:-1]} == {reshard}

    try_each(MESHES, check)


# Text, and keys of the imported config
ACCUMULATE = "gradient_accumulation_steps: 4\n"
COMPILE, REDUCE = "parallel.compile", "parallel.reduce_gradients"
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    (accelerate(fsdp_backward_prefetch=1), {"parallel.backward_prefetch": 1}),
    (accelerate(fsdp_forward_prefetch=True), {"parallel.forward_prefetch": 1}),
    (accelerate(fsdp_activation_checkpointing=True), {"parallel.activation_checkpoint": "full"}),
    (accelerate(offload_params=True), {"parallel.cpu_offload": True}),  # the prefix may be missing
    (accelerate(fsdp_auto_wrap_policy="NO_WRAP"), {"parallel.unit_min_params": 0}),
    (
        accelerate(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1_000_000),
        {"parallel.unit_min_params": 1_000_000},
    ),
    (
        accelerate(top="mixed_precision: no\n"),  # YAML reads a bare no as false
        {"parallel.param_dtype": "float32", "parallel.reduce_dtype": "float32"},
    ),
    (
        accelerate(kind="MULTI_GPU", top="mixed_precision: bf16\n"),
        {"parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "float32"},
    ),
    (accelerate(), {COMPILE: {"enabled": False}}),
    (
        accelerate(top="dynamo_config: {backend: INDUCTOR, mode: reduce-overhead, use_dynamic: true}\n"),
        {f"{COMPILE}.backend": "inductor", f"{COMPILE}.mode": "reduce-overhead", f"{COMPILE}.dynamic": True},
    ),
    (accelerate(top=ACCUMULATE), {"train.global_batch_size": 32, REDUCE: "last_micro_batch"}),
    (accelerate(top=ACCUMULATE + "sync_each_batch: true\n"), {REDUCE: "every_micro_batch"}),
    (
        accelerate(version=2, top=ACCUMULATE + "gradient_accumulation_kwargs: {sync_each_batch: 'no'}\n"),
        {REDUCE: "last_micro_batch"},
    ),
    (accelerate(top="use_cpu: true\n"), {"run.device": "cpu"}),
]


def test_keys_become_settings_of_ours(tmp_path: Path) -> None:
    def check(text: str, settings: dict[str, Any]) -> None:
        config = imported(tmp_path, text)["config"]
        for key, expected in settings.items():
            value: Any = config
            for name in key.split("."):
                value = value.get(name)
            assert value == expected, key

    try_each(SETTINGS, check)


# Text, and facts of the keys and notes
NOTES: list[tuple[str, str]] = [
    (accelerate(**{SHARDING: "HYBRID_SHARD"}), "nothing to replicate"),
    (
        accelerate(**{SHARDING: "SHARD_GRAD_OP", RESHARD: "FULL_SHARD"}),
        f"{SHARDING}=SHARD_GRAD_OP ... delete one",
    ),
    (accelerate(2, **{RESHARD: "HYBRID_SHARD"}), "accelerate launch 1.15 does FULL_SHARD"),
    (accelerate(), "--parallel.compile.enabled=true"),
    (accelerate(top=ACCUMULATE), "every rank sums whole gradients ... every_micro_batch"),
    (accelerate(version=2, top=sizes(tp=8)), "parallel.tp=8 ... model.n_kv_heads=4"),
]


def test_what_will_be_otherwise_is_a_note(tmp_path: Path) -> None:
    def check(text: str, facts: str) -> None:
        result = imported(tmp_path, text)
        check_facts(" ".join([*result["items"].values(), *result["notes"]]), facts)

    try_each(NOTES, check)


# Text, and facts of the lines that refuse it
REFUSED: list[tuple[str, str]] = [
    ("", "theirs.yaml ... empty"),
    ("num_processes: 8\n", "distributed_type ... missing ... FSDP"),
    ("distributed_type: FSDP\n", "num_processes ... missing"),
    (accelerate(3), "num_processes=8 ... multiple of num_machines=3"),
    (accelerate(top=sizes(dp_shard=4)), "dp_shard=4 x tp=1 is 4 processes ... 8"),
    (accelerate(top=sizes(dp_shard=4, sp=2)), "sp_size=2 ... DeepSpeed"),
    (accelerate(top="mixed_precision: fp16\n"), "mixed_precision=fp16 ... gradient scaler ... bf16"),
    (accelerate(top="deepspeed_config: {zero_stage: 3}\n"), "DeepSpeed ... parallel.strategy shard_grad_op"),
    (accelerate(top="dynamo_config: {dynamo_backend: TENSORRT}\n"), "dynamo_backend=TENSORRT"),
    (accelerate(top="mixed_precison: bf16\n"), "mixed_precison ... mean mixed_precision?"),
    (accelerate(top="fsdp_offload_params: true\n"), "mean fsdp_config.fsdp_offload_params?"),
    (accelerate(top="use_cpu: maybe\n"), "use_cpu=maybe ... true or false"),
    (accelerate(offload_params=True, fsdp_offload_params=True), "fsdp_config.offload_params ... delete one"),
    (accelerate(fsdp_sharding_strategy=6), "fsdp_sharding_strategy=6 ... FULL_SHARD ... 1 to 5"),
    (accelerate(fsdp_transformer_layer_cls_to_wrap="T5Block,LlamaDecoderLayer"), "T5Block ... Llama"),
    (accelerate(fsdp_ignored_modules="lm_head"), "fsdp_ignored_modules=lm_head ... train.freeze"),
    (
        accelerate(3, fsdp_versoin=2, top="fp16: true\n"),
        "num_machines=3 ... mean fsdp_config.fsdp_version? ... fp16",
    ),
]


def test_what_is_refused_has_key_value_and_way_out(tmp_path: Path) -> None:
    def check(text: str, facts: str) -> None:
        with pytest.raises(ConfigError) as error:
            imported(tmp_path, text)
        check_facts(str(error.value), facts)

    try_each(REFUSED, check)


def test_what_becomes_of_each_key_is_said_once_and_every_target_exists(tmp_path: Path) -> None:
    keys = {SHARDING: "HYBRID_SHARD", "use_orig_params": True}
    items = imported(tmp_path, accelerate(2, top="machine_rank: 0\ndebug: false\ngpu_ids:\n", **keys))[
        "items"
    ]
    given = ["num_processes=8", "num_machines=2", "fsdp_config.use_orig_params=true", "gpu_ids=None"]
    assert {*given, f"fsdp_config.{SHARDING}=HYBRID_SHARD", "machine_rank=0", "debug=false"} < {*items}
    assert all(len(becomes) > 5 for becomes in items.values())
    targets = {becomes.split()[1] for _, becomes in ROWS.values() if becomes.startswith("sets ")}
    assert {"parallel.tp", "parallel.cpu_offload"} < targets < {*known_keys()}


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        (accelerate(), "torchrun --nproc-per-node 8"),
        (
            accelerate(2, top="main_process_ip: 10.0.0.1\nmain_process_port: 29501\nmachine_rank: 1\n"),
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501",
        ),
        ("distributed_type: 'NO'\nnum_processes: 4\ngpu_ids: 2\n", "CUDA_VISIBLE_DEVICES=2 python"),
    ],
)
def test_the_launch_line(tmp_path: Path, text: str, launch: str) -> None:
    assert (
        imported(tmp_path, text)["launch"]
        == f"{launch} -m train.main --config MODEL.yaml --config CONFIG.yaml"
    )


def test_as_a_command(tool: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    theirs, ours = tmp_path / "fsdp.yaml", tmp_path / "ours.yaml"
    theirs.write_text(accelerate(**{SHARDING: "NO_SHARD"}))
    done = tool("import_accelerate", str(theirs))
    ours.write_text(done.stdout)
    assert (done.returncode, load_config(ours).parallel.strategy) == (0, "no_shard")
    assert "torchrun --nproc-per-node 8" in done.stderr
    assert f"fsdp_config.{SHARDING}=NO_SHARD: decides parallel.strategy" in done.stderr
    with pytest.raises(ConfigError):
        main([str(tmp_path)])
