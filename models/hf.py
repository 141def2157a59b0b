"""Convert Hugging Face's Llama config.json and parameter names to ours and back.

Pure functions of plain data. Weights keep their layout: the model uses Hugging Face's (models/rope.py rotates
the two halves of a head together), so a parameter is the same tensor under another name. Meta's own files,
which pair neighboring channels, are not supported.

config.json is read in the form of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5
(`rope_parameters`). Defaults are those of transformers' `LlamaConfig`.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from meshwright.models.config import OTHER_KINDS, LlamaConfig, RopeScaling

ARCHITECTURE, MODEL_TYPE = "LlamaForCausalLM", "llama"
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LARGEST = 2**24  # upper bound of integers: larger than in any model, and float32 is exact up to it
INTEGER, NUMBER, BOOLEAN = f"an integer from 1 to {LARGEST:,}", "a number", "true or false"
TYPES = {  # of the optional keys, which may be absent or null
    "num_key_value_heads": INTEGER,
    "head_dim": INTEGER,
    "max_position_embeddings": INTEGER,
    "original_max_position_embeddings": INTEGER,
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    "tie_word_embeddings": BOOLEAN,
}
ROPE_TYPES = {
    "rope_theta": NUMBER,
    "factor": NUMBER,
    "low_freq_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "original_max_position_embeddings": INTEGER,
}
# Key of an unsupported feature -> the values that leave it off. An absent or null key always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of the same function
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "sliding_window": (),
    "layer_types": (),
    "quantization_config": (),
    "auto_map": (),  # custom model code
}
ROPE_KEYS = {"rope_type", "type", "partial_rotary_factor", *ROPE_TYPES}
LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
# Our parameter name -> Hugging Face's, both without `.weight`; {} is the block number.
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def hf_name(fqn: str) -> str:
    """Return Hugging Face's name of our parameter. KeyError for an unknown name."""
    layer = re.search(r"\.(\d+)\.", fqn)
    number = layer.group(1) if layer else ""
    pattern = fqn.replace(f".{number}.", ".{}.", 1) if layer else fqn
    return NAMES[pattern.removesuffix(".weight")].format(number) + ".weight"


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """Convert a config.json to our config. ValueError that lists every unsupported or invalid key."""
    problems = [*_unsupported(hf), *_wrong_types(hf, TYPES)]
    keys = {ours: _size(hf, theirs, problems) for ours, theirs in SIZES.items()}
    kv_heads = keys["n_heads"] if hf.get("num_key_value_heads") is None else hf["num_key_value_heads"]
    optional = {name: _with_default(hf, name) for name in DEFAULTS}
    theta, scaling = _read_rope(hf, problems)
    head_dim = hf.get("head_dim")
    if not problems and head_dim is not None and head_dim * keys["n_heads"] != keys["dim"]:
        problems.append(
            f"head_dim={head_dim} (only hidden_size / num_attention_heads = "
            f"{keys['dim'] / keys['n_heads']:g})"
        )
    if not problems:
        try:
            return LlamaConfig(
                **keys,
                n_kv_heads=kv_heads,
                max_seq_len=optional["max_position_embeddings"],
                rope_theta=float(theta),
                rope_scaling=scaling,
                norm_eps=float(optional["rms_norm_eps"]),
                tie_embeddings=optional["tie_word_embeddings"],
            )
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    raise ValueError(f"unsupported Llama config: {'; '.join(problems)}")


def _unsupported(hf: Mapping[str, Any]) -> list[str]:
    problems = []
    if hf.get("model_type") != MODEL_TYPE:
        problems.append(f"model_type={hf.get('model_type')} (only {MODEL_TYPE})")
    architectures = hf.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        problems.append(f"architectures={architectures} (only {ARCHITECTURE})")
    for key, neutral in NEUTRAL.items():
        value = hf.get(key)
        if value is not None and value not in neutral:
            only = " or ".join(map(str, neutral)) if neutral else "null or absent"
            problems.append(f"{key}={value} (only {only})")
    return problems


def _wrong_types(given: Mapping[str, Any], types: Mapping[str, str], where: str = "") -> list[str]:
    """List the keys whose value is not of its type. Null is allowed."""
    values = {key: given.get(key) for key in types}
    return [
        f"{where}{key}={value!r} (only {types[key]})"
        for key, value in values.items()
        if value is not None and not _is_of(types[key], value)
    ]


def _is_of(kind: str, value: Any) -> bool:
    if kind == BOOLEAN or isinstance(value, bool):
        return kind == BOOLEAN and isinstance(value, bool)
    if kind == INTEGER:
        return isinstance(value, int) and 1 <= value <= LARGEST
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # False for NaN


def _size(hf: Mapping[str, Any], key: str, problems: list[str]) -> int:
    if _is_of(INTEGER, hf.get(key)):
        return int(hf[key])
    problems.append(f"{key}={hf[key]!r} (only {INTEGER})" if key in hf else f"{key} is missing")
    return 1


def _with_default(hf: Mapping[str, Any], key: str) -> Any:
    value = hf.get(key)
    return DEFAULTS[key] if value is None else value


def _read_rope(hf: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary embedding, from either form, or from both if they agree."""
    given = [
        (name, hf[name]) for name in ("rope_parameters", "rope_scaling") if hf.get(name) not in (None, {})
    ]
    read = [_read_form(hf, name, rope, problems) for name, rope in given]
    if not read:
        return _with_default(hf, "rope_theta"), None
    if len(read) == 2 and read[0] != read[1] and not problems:
        problems.append(f"rope_parameters={given[0][1]} and rope_scaling={given[1][1]} contradict each other")
    theta, top_level = read[-1][0], hf.get("rope_theta")
    if top_level is not None and top_level != theta:
        problems.append(f"rope_theta={top_level} and {given[-1][0]}.rope_theta={theta} contradict each other")
    return read[-1]


def _read_form(
    hf: Mapping[str, Any], where: str, rope: Any, problems: list[str]
) -> tuple[float, RopeScaling | None]:
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        problems.append(f"{where}={rope} (only one mapping for all layers)")
        return 1.0, None
    key = "rope_type" if "rope_type" in rope or "type" not in rope else "type"
    kind = rope.get(key, "default")
    theta = rope.get("rope_theta", _with_default(hf, "rope_theta"))
    if kind not in ("default", "linear", "llama3"):
        problems.append(f"{where}.{key}={kind} (only default, linear or llama3; {OTHER_KINDS})")
    elif rope.get("partial_rotary_factor") not in (None, 1):
        problems.append(f"{where}.partial_rotary_factor={rope['partial_rotary_factor']} (only 1)")
    elif wrong := _wrong_types(rope, ROPE_TYPES, f"{where}."):
        problems.extend(wrong)
    elif unknown := sorted(rope.keys() - ROPE_KEYS):
        problems.append(f"{where} has the unknown key{'s' if unknown[1:] else ''} {', '.join(unknown)}")
    elif kind != "default":
        return theta, _read_scaling(hf, where, kind, rope, problems)
    return theta, None


def _read_scaling(
    hf: Mapping[str, Any], where: str, kind: str, rope: Mapping[str, Any], problems: list[str]
) -> RopeScaling | None:
    required = LLAMA3_KEYS if kind == "llama3" else {"factor": "factor"}
    given = dict(rope)
    # transformers 5 prefers the top-level key to the nested one, transformers 4 does not
    top_level = hf.get("original_max_position_embeddings")
    nested = given.setdefault(
        "original_max_position_embeddings", top_level or hf.get("max_position_embeddings")
    )
    if kind == "llama3" and top_level not in (None, nested):
        problems.append(
            f"original_max_position_embeddings={top_level} and {where}'s {nested} contradict each other"
        )
    missing = [theirs for theirs in required.values() if given.get(theirs) is None]
    if missing:
        problems.append(f"{where} lacks {', '.join(missing)}, which rope_type={kind} needs")
        return None
    return RopeScaling(kind, **{ours: given[theirs] for ours, theirs in required.items()})


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of transformers 5 for our model, without the dtype of its weights. The ids of
    special tokens are null, because transformers' defaults for the first two are 1 and 2."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling:
        keys = LLAMA3_KEYS if config.rope_scaling.kind == "llama3" else {"factor": "factor"}
        rope["rope_type"] = config.rope_scaling.kind
        rope |= {theirs: getattr(config.rope_scaling, ours) for ours, theirs in keys.items()}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": rope,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "use_cache": True,
    }


def for_every_version(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json of transformers 5, of any model, with the keys of transformers 4 as well, and
    without those of the training: a path, and the cache, which models.from_transformers turns off. `dtype`:
    of the saved weights."""
    written = {k: v for k, v in hf.items() if k != "_name_or_path" and (k, v) != ("use_cache", False)}
    rope = hf.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope  # Gemma 3 has one for each kind of layer
    old = {"rope_theta": None, "partial_rotary_factor": None, "rope_local_base_freq": local.get("rope_theta")}
    scaling = {key: value for key, value in rope.items() if key not in old}
    written |= {key: value for key in old if (value := rope.get(key, old[key])) is not None}
    if rope:
        written["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else scaling
    return {**written, "dtype": dtype, "torch_dtype": dtype}
