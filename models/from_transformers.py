"""Models of transformers, as factories for `model.factory`."""

import logging
from typing import Any

from torch import nn

# tests/distributed/test_transformers.py passes with it and with 5.24
OLDEST = (5, 20)
WHY_OLDEST = (
    "5.0 leaves tied weights untied on the meta device, and splits norms of heads without summing their "
    "gradients: pip install -e '.[hf]'"
)
CHANGING = ("dynamic", "longrope")  # types of RoPE
REWRITTEN = ("rope_theta", "rope_scaling")  # old keys, which transformers turns into rope_parameters


def causal_lm(folder: str = "", attn_implementation: str | None = None, **config: Any) -> nn.Module:
    """Return transformers' own causal language model, unpatched, with its own initial weights.

    Args:
        folder: a Hugging Face folder whose config.json describes the model; its weights are not read here,
            but by checkpoint.init_from
        attn_implementation: of transformers; None: torch's attention, if the model supports it
        config: the keys of config.json, such as model_type="qwen3" and hidden_size; with `folder` those that
            differ. The cache of keys and values is off

    Raises ValueError for a type or a key that transformers does not know, OSError for a folder that it cannot
    read, and ImportError without transformers (pip install -e '.[hf]').
    """
    for noisy in ("torchao", "torch.utils._pytree"):  # hints on the import of torchao by transformers
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        from transformers import AutoModelForCausalLM, __version__
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install -e '.[hf]'") from error
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
        raise ImportError(f"transformers {__version__} is older than {OLDEST[0]}.{OLDEST[1]}: {WHY_OLDEST}")
    shape = _read_shape(folder, config) if folder else _make_shape(config)
    if (kind := (getattr(shape, "rope_parameters", None) or {}).get("rope_type")) in CHANGING:
        raise ValueError(
            f"rope_parameters.rope_type={kind} changes its frequencies with the largest position of a batch, "
            "which no plan knows: use default, linear, llama3 or yarn"
        )
    shape.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(shape, attn_implementation=attn_implementation)
    return model


def _read_shape(folder: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    shape, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **changes)
    if unknown:
        raise ValueError(f"{folder}/config.json has no key {', '.join(unknown)}")
    return shape


def _make_shape(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if "model_type" not in config:
        raise ValueError("it needs folder, a Hugging Face folder, or model_type, such as qwen3")
    kind, keys = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    defaults = AutoConfig.for_model(kind)
    if unknown := [key for key in keys if not hasattr(defaults, key) and key not in REWRITTEN]:
        raise ValueError(f"a config of {kind} has no key {', '.join(unknown)}")
    return AutoConfig.for_model(kind, **keys)
