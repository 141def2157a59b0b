"""From config to plan and memory: what the model publishes fits what is planned, and what does not fit says what would."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from models.cost import count_parameters
from models.llama import Llama
from parallel.plan import PlanError
from parallel.plan_file import plan_to_yaml
from train.config import Config, parse_config
from train.planning import GIB, check_fits, plan_run, predict_memory


def config_of(*arguments: str) -> Config:
    return parse_config(["--config=llama_8b", *arguments])


@pytest.mark.parametrize("tied", ["false", "true"])
def test_every_module_of_a_plan_is_one_of_the_model_and_every_parameter_is_in_one(tied: str) -> None:
    config = config_of("--model.n_layers=3", f"--model.tie_embeddings={tied}", "--parallel.activation_checkpoint=full")
    plan = plan_run(config, 8)
    with torch.device("meta"):
        model = Llama(config.model)
    planned = {id(p) for unit in plan.units for name in unit.modules for p in model.get_submodule(name).parameters()}
    assert planned == {id(p) for p in model.parameters()}
    assert [unit.name for unit in plan.units if unit.activation_checkpoint == "full"] == [f"layers.{i}" for i in range(3)]
    assert [unit.name for unit in plan.units if not unit.compiled] == ([] if tied == "true" else ["tok_embeddings"])


@pytest.mark.parametrize("tied", ["false", "true"])
def test_predicted_shards_are_those_of_all_parameters_counted_once(tied: str) -> None:
    config = config_of(f"--model.tie_embeddings={tied}")
    memory = predict_memory(config, plan_run(config, 8))
    assert memory.params == pytest.approx(count_parameters(config.model).total * 4 / 8, abs=200), "a unit's last shard is padded"
    assert memory.activations == 32 * 1152 * 2**20, "32 blocks of 1,152 MiB"


def test_a_plan_file_decides_alone(tmp_path: Path) -> None:
    plan = plan_run(config_of("--parallel.activation_checkpoint=full", "--train.micro_batch_size=2"), 8)
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    assert plan_run(config_of(f"--parallel.plan={tmp_path / 'plan.yaml'}"), 8) == plan


def test_a_plan_file_of_another_model_or_world_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan_run(config_of(), 8)))
    with pytest.raises(PlanError, match="this run has 4"):
        plan_run(config_of(f"--parallel.plan={tmp_path / 'plan.yaml'}"), 4)
    with pytest.raises(PlanError, match=r"34 against 4"):
        plan_run(config_of(f"--parallel.plan={tmp_path / 'plan.yaml'}", "--model.n_layers=2"), 8)


def test_a_plan_that_fits_is_said_to_need_what_is_predicted() -> None:
    config = config_of()
    plan = plan_run(config, 8)
    assert check_fits(config, plan, 80 * GIB, "H100") == predict_memory(config, plan)


@pytest.mark.parametrize(("gpus", "available_gib"), [(1, 79), (8, 40), (8, 24), (2, 79)])
def test_ways_out_of_a_plan_that_does_not_fit_really_fit(gpus: int, available_gib: int) -> None:
    config = config_of()
    with pytest.raises(PlanError) as error:
        check_fits(config, plan_run(config, gpus), available_gib * GIB, "this GPU")
    message = str(error.value)
    assert f"this GPU has {available_gib}.0 GiB" in message
    full = dataclasses.replace(config.parallel, activation_checkpoint="full")
    ways = [line for line in message.splitlines() if "Fits:" in line and "--config" not in line]
    assert ways
    for way in ways:
        candidate = dataclasses.replace(config, parallel=full) if "activation_checkpoint=full" in way else config
        count = re.search(r"(\d+) processes", way)
        needed = predict_memory(candidate, plan_run(candidate, int(count[1]) if count else gpus)).total / GIB
        assert f"({needed:.1f} GiB" in way
        assert needed <= available_gib
