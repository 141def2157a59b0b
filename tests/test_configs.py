"""Every shipped config loads, plans for its number of GPUs, and has the published number of parameters."""

from pathlib import Path

import pytest

from meshwright.parallel.plan.serialize import plan_to_table
from meshwright.train.config_parser import CONFIG_FOLDER, list_configs, load_config, parse_config
from meshwright.train.data.tokenizer import ByteTokenizer, check_vocabulary
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER

# config: GPUs, parameters in billions
MEANT_FOR = {
    "llama_debug": (2, 0.002537),
    "llama_1b": (1, 1.24),
    "llama_8b": (8, 8.03),
    "llama_8b_128k": (8, 8.03),
    "llama_70b": (128, 70.55),
    "llama_405b": (2048, 405.85),
    "mistral_7b": (8, 7.25),
    "qwen3_8b": (8, 8.19),
}
PUBLISHED = sorted(MEANT_FOR.keys() - {"llama_debug"})
PLANNABLE = ("dp_replicate", "dp_shard", "tp", "reshard_after_forward", "reshard_after_backward")
PLANNABLE += ("reduce_gradients", "forward_prefetch", "backward_prefetch", "activation_checkpoint")


def _path(name: str) -> Path:
    return CONFIG_FOLDER / f"{name}.yaml"


def test_the_table_is_complete() -> None:
    assert {path.stem for path in list_configs()} == MEANT_FOR.keys()


@pytest.mark.parametrize("name", MEANT_FOR)
def test_it_has_the_published_number_of_parameters(name: str) -> None:
    parameters = model_of(parse_config([f"--config={_path(name)}"]).model).parameters
    assert parameters == pytest.approx(MEANT_FOR[name][1] * 1e9, rel=0.005)


SLOW = [pytest.mark.slow, pytest.mark.sampled(8)]


def _slow_if_of_transformers(name: str) -> object:
    return pytest.param(name, marks=SLOW if name in ("qwen3_8b", "mistral_7b") else [])


def _slow_but_one(name: str) -> object:
    return pytest.param(name, marks=[] if name == "llama_1b" else SLOW)


@pytest.mark.parametrize("name", [*map(_slow_if_of_transformers, MEANT_FOR)])
def test_it_plans_for_the_gpus_it_is_meant_for(name: str) -> None:
    config, gpus = parse_config([f"--config={_path(name)}"]), MEANT_FOR[name][0]
    plan = plan_run(config.job, gpus)
    assert plan.mesh.world_size == gpus
    assert max(map(len, plan_to_table(plan).splitlines())) <= 80
    check_vocabulary(ByteTokenizer.info, model_of(config.model).vocab_size)


@pytest.mark.parametrize("name", [*map(_slow_but_one, PUBLISHED)])
def test_its_memory_is_predicted(name: str) -> None:
    """Uncompiled, which is traced faster."""
    config = parse_config([f"--config={_path(name)}", *EAGER])
    plan = plan_run(config.job, MEANT_FOR[name][0])
    assert predict_memory(config.job, plan).peak_bytes > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_plannable_keys_are_left_to_the_planner(name: str) -> None:
    config = load_config(_path(name))
    open_keys = {getattr(config.parallel, key) for key in PLANNABLE} | {config.train.micro_batch_size}
    assert open_keys == {"auto"}
    assert (config.parallel.param_dtype, config.parallel.reduce_dtype) == ("bfloat16", "float32")
