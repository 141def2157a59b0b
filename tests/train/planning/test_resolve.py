"""From config to plan and memory: plans match the model, and mistakes are reported with a fix."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from meshwright.models.llama import Llama
from meshwright.models.size import count_parameters
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.suggest import Devices, check_fits
from tests.support.launch import EAGER
from tests.support.tables import try_each


def config_of(*arguments: str) -> Config:
    return parse_config(["--config=llama_8b", *arguments])


@pytest.mark.parametrize("tied", ["false", "true"])
def test_every_module_of_a_plan_is_one_of_the_model_and_every_parameter_is_in_one(tied: str) -> None:
    keys = ["--model.n_layers=3", "--model.dim=64", "--model.ffn_dim=64"]
    config = config_of(*keys, f"--model.tie_embeddings={tied}", "--parallel.activation_checkpoint=full")
    plan = plan_run(config.job, 8)
    with torch.device("meta"):
        model = Llama(config.model)
    planned = {
        id(p) for unit in plan.units for name in unit.modules for p in model.get_submodule(name).parameters()
    }
    assert planned == {id(p) for p in model.parameters()}
    assert [unit.name for unit in plan.units if unit.activation_checkpoint == "full"] == [
        f"layers.{i}" for i in range(3)
    ]
    assert [unit.name for unit in plan.units if not unit.compiled] == (
        [] if tied == "true" else ["tok_embeddings"]
    )


def test_predicted_shards_are_those_of_all_parameters_counted_once() -> None:
    for config in (config_of(), config_of("--model.n_layers=2", "--model.tie_embeddings=true", *EAGER)):
        memory = predict_memory(config.job, plan_run(config.job, 8)).memory
        assert memory.params == count_parameters(config.model).total * 4 / 8
    assert (
        predict_memory(config_of().job, plan_run(config_of().job, 8)).memory.activations > 32 * 1089 * 2**20
    ), "1,089 MiB for each block"


def test_a_plan_file_decides_alone(tmp_path: Path) -> None:
    plan = plan_run(config_of("--parallel.activation_checkpoint=full", "--train.micro_batch_size=2").job, 8)
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    assert plan_run(config_of(f"--parallel.plan={tmp_path / 'plan.yaml'}").job, 8) == plan


def test_a_plan_file_of_another_model_or_world_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(plan_to_yaml(plan_run(config_of().job, 8)))
    with pytest.raises(
        PlanError,
        match=f"plan file {file}: the plan's mesh .* 8 processes.* this run has 4: start 8, or make a new",
    ):
        plan_run(config_of(f"--parallel.plan={file}").job, 4)
    with pytest.raises(PlanError, match=r"34, the model has 4; first difference: .*make a new plan"):
        plan_run(config_of(f"--parallel.plan={file}", "--model.n_layers=2").job, 8)


AGREEING = [
    ("--parallel.dp_shard=-1",),
    ("--parallel.dp_shard=4", "--parallel.dp_replicate=1", "--parallel.tp=2"),
    ("--parallel.reshard_after_forward=true", "--parallel.forward_prefetch=2"),
    ("--parallel.activation_checkpoint=full", "--parallel.reduce_dtype=float32"),
    ("--parallel.compile.mode=reduce-overhead", "--parallel.sequence_parallel=false"),
    ("--train.micro_batch_size=2", "--train.global_batch_size=8"),
]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the 8B that differs from the defaults in most keys."""
    keys = [
        "--parallel.tp=2",
        "--parallel.activation_checkpoint=full",
        "--parallel.forward_prefetch=2",
        "--parallel.compile.mode=reduce-overhead",
        "--train.micro_batch_size=2",
        "--parallel.sequence_parallel=false",
    ]
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(plan_to_yaml(plan_run(config_of(*keys).job, 8)))
    return path


def test_keys_that_say_the_same_as_the_plan_file_are_no_mistake(plan_file: Path) -> None:
    """Such as the keys of the config that the plan was made from."""
    alone = plan_run(config_of(f"--parallel.plan={plan_file}").job, 8)

    def check(*keys: str) -> None:
        assert plan_run(config_of(f"--parallel.plan={plan_file}", *keys).job, 8) == alone

    try_each(AGREEING, check)


CONTRADICTING = [
    ("--parallel.dp_replicate=2", "has 1"),
    ("--parallel.dp_shard=8", "has 4"),
    ("--parallel.tp=1", "has 2"),
    ("--parallel.reshard_after_forward=false", "has true"),
    ("--parallel.reshard_after_forward=1", "has true"),
    ("--parallel.forward_prefetch=0", "has 2"),
    ("--parallel.activation_checkpoint=none", "has full"),
    ("--parallel.activation_budget=0.25", "has 1.0"),
    ("--parallel.reduce_dtype=bfloat16", "has float32"),
    ("--parallel.cpu_offload=true", "has false"),
    ("--parallel.compile.backend=eager", "has inductor"),
    ("--parallel.compile.enabled=false", "has true"),
    ("--parallel.compile.on_recompile=error", "has warn"),
    ("--parallel.strategy=full_shard", "is decided by"),
    ("--parallel.tp_modules=[attention]", "is decided by"),
    ("--parallel.loss_parallel=false", "is decided by"),
    ("--parallel.selective_policy=attention", "is decided by"),
    ("--parallel.unit_min_params=1000000000", "is decided by"),
    ("--train.micro_batch_size=1", "has 2"),
    ("--train.global_batch_size=16", "has 8"),
]


def test_a_key_that_a_plan_file_overrules_is_refused_instead_of_ignored(plan_file: Path) -> None:
    def check(key: str, words: str) -> None:
        with pytest.raises(PlanError) as error:
            plan_run(config_of(f"--parallel.plan={plan_file}", key).job, 8)
        report = str(error.value)
        assert "\n" not in report
        assert report.startswith(key.removeprefix("--").split("=")[0] + "=")
        assert words in report
        assert str(plan_file) in report

    try_each(CONTRADICTING, check)


def test_keys_and_the_plan_files_own_mistakes_come_in_one_report(plan_file: Path, tmp_path: Path) -> None:
    edited = tmp_path / "plan.yaml"
    edited.write_text(plan_file.read_text().replace("param_dtype: bfloat16", "param_dtype: float16"))
    with pytest.raises(PlanError) as error:
        plan_run(config_of(f"--parallel.plan={edited}", "--parallel.tp=1").job, 4)
    lines = str(error.value).splitlines()
    assert [line.split(": ")[-1] for line in lines[:2]] == ["remove the key, or edit the file"] * 2
    assert "this run has 4" in lines[2]
    assert lines[3].startswith(f"plan file {edited}: units tok_embeddings to head (34): param_dtype=float16")
    assert len(lines) == 4


def test_a_missing_plan_file_is_named_with_what_may_stand_there() -> None:
    config = config_of()
    for name in ("Manual", "", "nowhere/plan.yaml", "~nobody_at_all/plan.yaml", "."):
        with pytest.raises(
            PlanError, match=r"parallel.plan=.*: there is no such file. Use manual, auto, or the path"
        ):
            plan_run(dataclasses.replace(config, parallel=ParallelConfig(plan=name)).job, 8)


# Each part of the model that tensor parallelism splits


# Keys, and the lines of the error; none if there is a plan.
TP = [
    (["--parallel.tp=16"], ["parallel.tp=16 must divide model.n_kv_heads=8. Use 1, 2, 4 or 8."]),
    (["--parallel.tp=16", "--parallel.tp_modules=[feed_forward,head]"], []),
    (
        ["--parallel.tp=16", "--parallel.tp_modules=[feed_forward,head]", "--train.seq_len=100"],
        ["parallel.tp=16 must divide train.seq_len=100. Use 1, 2 or 4."],
    ),
    (
        [
            "--parallel.tp=16",
            "--parallel.tp_modules=[feed_forward,head]",
            "--train.seq_len=100",
            "--parallel.sequence_parallel=false",
        ],
        [],
    ),
    (
        ["--parallel.tp=3"],
        [
            f"parallel.tp=3 must divide {key}. Use 1, 2, 4 or 8."
            for key in ("model.n_heads=32", "model.n_kv_heads=8", "model.ffn_dim=14336", "train.seq_len=8192")
        ],
    ),
    (
        ["--parallel.tp=4", "--model.vocab_size=1006", "--parallel.tp_modules=[embedding]"],
        ["parallel.tp=4 must divide model.vocab_size=1006. Use 1 or 2. Or pad it to 1024"],
    ),
]


def test_tp_divides_heads_kv_heads_ffn_vocabulary_and_tokens() -> None:
    def check(keys: list[str], lines: list[str]) -> None:
        config, world_size = config_of(*keys), 48
        if lines:
            with pytest.raises(PlanError) as error:
                plan_run(config.job, world_size)
            assert [re.sub(": unused.*", "", line) for line in str(error.value).splitlines()] == lines
        else:
            assert plan_run(config.job, world_size).mesh.tp == config.parallel.tp

    try_each(TP, check)


def test_a_plan_that_fits_is_said_to_need_what_is_predicted() -> None:
    config = config_of()
    plan = plan_run(config.job, 8)
    assert check_fits(config.job, plan, Devices(80 * GIB, 8), "H100") == predict_memory(config.job, plan)


def test_frozen_parameters_need_no_gradients_and_no_moments() -> None:
    config = config_of(*EAGER, "--train.freeze=[layers.*, tok_embeddings.*]")
    plan = plan_run(config.job, 8)
    free, frozen = predict_memory(config_of(*EAGER).job, plan).memory, predict_memory(config.job, plan).memory
    head = count_parameters(config.model).head
    assert frozen.params == free.params
    assert frozen.grads == -(-head // 8) * 4
    assert frozen.optimizer == 2 * frozen.grads


def test_a_freeze_that_matches_nothing_is_found_in_planning() -> None:
    config = config_of("--train.freeze=[nonsense.*]")
    with pytest.raises(ConfigError, match="nonsense"):
        predict_memory(config.job, plan_run(config.job, 8))
