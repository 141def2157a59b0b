"""Weights of transformers' own modules come from a Hugging Face folder, each rank its slices, and go back,
bitwise, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.parallel.mesh import build_mesh
from meshwright.tools.checkpoint.__main__ import main as convert
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config_parser import config_to_yaml, parse_config
from meshwright.train.errors import CheckpointError, ConfigError
from meshwright.train.model.trained_model import model_of, texts_of
from meshwright.train.planning.resolve import plan_run
from meshwright.train.training import build_training
from tests.support.checkpoint_saves import save
from tests.support.factories import HF_SIZES, RUN
from tests.support.hf_models import make_tokens, save_hf
from tests.support.launch import EAGER
from tests.support.worlds import run_ranks

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
TP = ["--parallel.tp=2"]
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "Llama, tied": ("llama", {"tie_word_embeddings": True}, []),
    "Qwen2": ("qwen2", {}, TP),
    "Qwen3": ("qwen3", {}, TP),
    "Mistral": ("mistral", {"sliding_window": 8}, TP),
    "Gemma": ("gemma", {}, []),
    "Gemma 2": ("gemma2", WINDOWS, TP),
    "Gemma 3": ("gemma3_text", WINDOWS, TP),
    "OLMo 2": ("olmo2", {}, TP),
    "Phi": ("phi", {}, TP),
    "Phi 3": ("phi3", {}, TP),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, []),
}


def make(family: str, seed: int = 0) -> Any:
    """A model of a family with values that no initialiser gives."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes, _ = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**HF_SIZES, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def keys_of(folder: Path, *mesh: str) -> list[str]:
    factory = "meshwright.models.from_transformers:causal_lm"
    return [*RUN, *EAGER, f"--model.factory={factory}", f"--model.args.folder={folder}", *mesh]


def round_trip(cases: dict[str, tuple[list[str], Path, Path]]) -> None:
    """Load each folder, sharded, and save a checkpoint of it."""
    for keys, folder, out in cases.values():
        config = parse_config(keys)
        plan = plan_run(config.job, 2)
        mesh = build_mesh(plan.mesh, "cpu")
        training = build_training(config, plan, mesh)
        model = training.sharded.model
        weights = find_weights(str(folder), config.model)
        assert weights is not None
        load_weights(weights, model)
        texts = {"config.yaml": config_to_yaml(config), **texts_of(model_of(config.model).module)}
        saver = CheckpointSaver(config.checkpoint, out, model, training.optimizer, mesh, texts)
        assert not save(saver, 1).error


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_every_family_comes_and_goes_bitwise(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models, cases = {}, {}
    for family, (_, _, mesh) in FAMILIES.items():
        models[family] = make(family)
        folder = save_hf(tmp_path / family / "hf", models[family], shard_size="20KB")
        cases[family] = (keys_of(folder, *mesh), folder, tmp_path / family / "ours")
    run_ranks(2, round_trip, cases)
    ids = make_tokens(HF_SIZES["vocab_size"], 2, 24)
    for family, (_, _, out) in cases.items():
        convert(["export", str(out), str(tmp_path / family / "back")])
        back, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / family / "back", output_loading_info=True
        )
        assert not any(map(len, info.values())), (family, info)
        expected = models[family].state_dict()
        for name, value in back.state_dict().items():
            assert torch.equal(value, expected[name]), (family, name)
        with torch.no_grad():
            assert torch.equal(back.eval()(ids).logits, models[family](ids).logits), family


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", make("Qwen2"))
    with pytest.raises(ConfigError, match=r"describes another model: rms_norm_eps=0.5 .*causal_lm"):
        find_weights(str(folder), parse_config(keys_of(folder, "--model.args.rms_norm_eps=0.5")).model)
    with pytest.raises(ConfigError, match=r"hidden_size=64 \(saved: 32\)"):
        find_weights(str(folder), parse_config(keys_of(folder, "--model.args.hidden_size=64")).model)
    other = save_hf(tmp_path / "other", make("Llama, tied"))
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        find_weights(str(folder), parse_config(keys_of(folder)).model)
