"""Models of transformers, as factories for `model.factory`."""

from typing import Any

from torch import nn


def causal_lm(folder: str = "", **config: Any) -> nn.Module:
    """Return transformers' own causal language model, unpatched, with its own initial weights.

    Args:
        folder: a Hugging Face folder whose config.json describes the model; its weights are not read here,
            but by checkpoint.init_from
        config: the keys of config.json, such as model_type="qwen3" and hidden_size; with `folder` those that
            differ. The cache of keys and values is off

    Raises ValueError for a type that transformers does not know, OSError for a folder that it cannot read,
    and ImportError without transformers (pip install -e '.[hf]').
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {"use_cache": False, **config}
    if not folder and "model_type" not in keys:
        raise ValueError("it needs folder, a Hugging Face folder, or model_type, such as qwen3")
    if folder:
        shape = AutoConfig.from_pretrained(folder, **keys)
    else:
        shape = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model: nn.Module = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    return model
