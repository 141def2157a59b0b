"""From config to plan and memory: plans match the model, and mistakes are reported with a fix."""

import dataclasses
from pathlib import Path

import pytest
import torch

from meshwright.models.llama import Llama
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import Config, GroupConfig
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import predict_memory, run_workload, with_newton_schulz_dtype
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER
from tests.support.plans import check_facts
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
    for config in (config_of(*EAGER), config_of("--model.tie_embeddings=true", *EAGER)):
        memory = predict_memory(config.job, plan_run(config.job, 8)).memory
        assert memory.params == model_of(config.model).parameters * 4 / 8


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
    ("--parallel.reshard_after_forward=1", "has true"),
    ("--parallel.activation_checkpoint=none", "has full"),
    ("--parallel.activation_budget=0.25", "has 1.0"),
    ("--parallel.cpu_offload=true", "has false"),
    ("--parallel.compile.backend=eager", "has inductor"),
    ("--parallel.compile.on_recompile=error", "has warn"),
    ("--parallel.strategy=full_shard", "is decided by"),
    ("--parallel.loss_parallel=false", "is decided by"),
    ("--parallel.selective_policy=attention", "is decided by"),
    ("--train.micro_batch_size=1", "has 2"),
    ("--train.global_batch_size=16", "has 8"),
]


def test_a_key_that_a_plan_file_overrules_is_refused_instead_of_ignored(plan_file: Path) -> None:
    def check(key: str, words: str) -> None:
        with pytest.raises(PlanError) as error:
            plan_run(config_of(f"--parallel.plan={plan_file}", key).job, 8)
        report = str(error.value)
        assert "\n" not in report
        name, value = key.removeprefix("--").split("=")
        check_facts(report, f"{name}= ... {value.strip('[]')} ... {words} ... {plan_file}")

    try_each(CONTRADICTING, check)


def test_keys_and_the_plan_files_own_mistakes_come_in_one_report(plan_file: Path, tmp_path: Path) -> None:
    edited = tmp_path / "plan.yaml"
    edited.write_text(plan_file.read_text().replace("attention: cpu", "attention: flush"))
    with pytest.raises(PlanError) as error:
        plan_run(config_of(f"--parallel.plan={edited}", "--parallel.tp=1").job, 4)
    contradiction, mesh, kernel = str(error.value).splitlines()
    assert contradiction.endswith("remove the key, or edit the file")
    assert "this run has 4" in mesh
    assert kernel.startswith(f"plan file {edited}: attention=flush")


def test_a_missing_plan_file_is_named_with_what_may_stand_there() -> None:
    config = config_of()
    for name in ("Manual", "", "nowhere/plan.yaml", "~nobody_at_all/plan.yaml", "."):
        with pytest.raises(PlanError) as error:
            plan_run(dataclasses.replace(config, parallel=ParallelConfig(plan=name)).job, 8)
        check_facts(str(error.value), f"parallel.plan={name}: ... manual, auto")
    with pytest.raises(
        PlanError, match=r"parallel\.plan=auto.*tools\.plan .*--save FILE.*--parallel\.plan=FILE"
    ):
        plan_run(config_of("--parallel.plan=auto").job, 8)


PARTS = "--parallel.tp_modules=[feed_forward,head]"
SHORT = "--train.seq_len=100"
# Keys on 48 processes, and the facts of each line of the error; none if there is a plan.
TP: list[tuple[list[str], list[str]]] = [
    (["--parallel.tp=16"], ["parallel.tp=16 ... model.n_kv_heads=8 ... 1, 2, 4 or 8"]),
    (["--parallel.tp=16", PARTS], []),
    (["--parallel.tp=16", PARTS, SHORT], ["parallel.tp=16 ... train.seq_len=100 ... 1, 2 or 4"]),
    (["--parallel.tp=16", PARTS, SHORT, "--parallel.sequence_parallel=false"], []),
    (["--parallel.tp=3"], ["n_heads=32", "n_kv_heads=8", "ffn_dim=14336", "seq_len=8192"]),
    (
        ["--parallel.tp=4", "--model.vocab_size=1006", "--parallel.tp_modules=[embedding]"],
        ["parallel.tp=4 ... model.vocab_size=1006 ... 1 or 2 ... pad it to 1024"],
    ),
]


def test_tp_divides_heads_kv_heads_ffn_vocabulary_and_tokens() -> None:
    def check(keys: list[str], facts: list[str]) -> None:
        config = config_of(*keys)
        if facts:
            with pytest.raises(PlanError) as error:
                plan_run(config.job, 48)
            for line, of_line in zip(str(error.value).splitlines(), facts, strict=True):
                check_facts(line, of_line)
        else:
            assert plan_run(config.job, 48).mesh.tp == config.parallel.tp

    try_each(TP, check)


def test_frozen_parameters_need_no_gradients_and_no_moments() -> None:
    config = config_of(*EAGER, "--train.freeze=[layers.*, tok_embeddings.*]")
    plan = plan_run(config.job, 8)
    free, frozen = predict_memory(config_of(*EAGER).job, plan).memory, predict_memory(config.job, plan).memory
    head = model_of(config.model).units.modules["head"]
    assert frozen.params == free.params
    assert frozen.grads == -(-head // 8) * 4
    assert frozen.optimizer == 2 * frozen.grads


def test_muon_updates_the_trained_matrices_of_blocks_and_adamw_the_rest() -> None:
    config = config_of(*EAGER, "--model.n_layers=4", "--optim.name=muon", "--train.freeze=[layers.0.*]")
    optim = dataclasses.replace(config.optim, groups={"layers.1.*.w1*": GroupConfig(kind="other")})
    config = dataclasses.replace(config, optim=optim)
    plan = plan_run(config.job, 8)
    muon = run_workload(config.job, plan).muon
    block = model_of(config.model).units.modules["layers.2"]
    dim, kv_dim, ffn = 4096, 1024, 14336
    matrices = [(dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, dim), (ffn, dim), (dim, ffn), (ffn, dim)]
    assert len(muon.blocks) == 3, "the first is frozen"
    assert (sorted(muon.blocks[1]), len(muon.blocks[0])) == (sorted(matrices), 6)
    assert muon.shares["layers.2"] == sum(rows * columns for rows, columns in matrices) / block
    assert muon.shares["layers.1"] == pytest.approx((block - 2 * dim - ffn * dim) / block)
    assert muon.shares.keys() == {f"layers.{i}" for i in range(1, 4)}
    assert muon.dtype == "bfloat16", "as its units"
    for kernel, dtype in (("cpu", "float32"), ("efficient", "bfloat16")):
        wide = config_of("--parallel.param_dtype=float32", f"--parallel.attention={kernel}").job
        job = with_newton_schulz_dtype(wide, plan_run(wide, 8))
        assert job.optim.muon.newton_schulz_dtype == dtype


def test_a_freeze_that_matches_nothing_is_found_in_planning() -> None:
    config = config_of("--train.freeze=[nonsense.*]")
    with pytest.raises(ConfigError, match="nonsense"):
        predict_memory(config.job, plan_run(config.job, 8))
