"""models/hf.py compared with transformers: names, configs, logits and gradients are equal; unsupported
keys are refused by name."""

import copy
import dataclasses
import json
import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from meshwright.models.config import LlamaConfig, RopeScaling
from meshwright.models.hf import config_from_hf, config_to_hf, for_every_version, hf_name
from meshwright.models.llama import Llama
from tests.support.hf_models import MAX_SEQ_LEN, ROPES, make_hf, make_tokens
from tests.support.plans import check_facts
from tests.support.tables import rows, try_each

LLAMA_31 = {  # config.json of meta-llama/Llama-3.1-8B, as transformers 4.43 wrote it
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def ours_of(hf: Any) -> Llama:
    """Return our model with the weights of `hf`, assigned by `hf_name`."""
    model = Llama(config_from_hf(hf.config.to_dict()))
    model.initialise(0)
    theirs = dict(hf.named_parameters())
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(theirs.pop(hf_name(fqn)))
    assert not theirs
    return model


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("tied", "ratio", "head_dim"), [(False, 1, 8), (True, 2, 12), (False, 4, 12), (True, 4, 8)]
)
def test_logits_and_gradients_are_those_of_transformers(
    tied: bool, ratio: int, rope: str, head_dim: int
) -> None:
    """Of sequences longer than a block of the CPU attention, and than the original length of the scaling."""
    hf = make_hf(ratio + head_dim, tied, ratio, rope, head_dim)
    model, tokens = ours_of(hf), make_tokens(seq_len=MAX_SEQ_LEN)
    ours, theirs = model(tokens), hf(tokens).logits
    assert theirs.std() > 0.5, "the logits are too small for a comparison"
    assert (ours - theirs).abs().max() < 1e-4
    targets = tokens.roll(-1, 1)
    model(tokens, targets).backward()
    F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    expected = dict(hf.named_parameters())
    for fqn, parameter in model.named_parameters():
        gradient = expected[hf_name(fqn)].grad
        assert (parameter.grad - gradient).norm() < 1e-5 * gradient.norm(), fqn


def test_every_parameter_has_one_name() -> None:
    hf = make_hf(num_hidden_layers=12)
    names = {hf_name(fqn): fqn for fqn, _ in Llama(config_from_hf(hf.config.to_dict())).named_parameters()}
    assert names.keys() == dict(hf.named_parameters()).keys()
    assert len(names) == len(list(Llama(config_from_hf(hf.config.to_dict())).named_parameters()))
    with pytest.raises(KeyError):
        hf_name("layers.0.experts.3.w1.weight")


def test_the_released_llama_is_the_shipped_config() -> None:
    config = config_from_hf(LLAMA_31)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config == LlamaConfig(4096, 32, 32, 8, 14336, 128256, 131072, 500000.0, scaling, 1e-5, False)


@pytest.mark.parametrize("rope", ROPES)
def test_both_forms_of_the_rotary_embedding_are_read(rope: str) -> None:
    """The forms of transformers 5 and 4, and the older key `type`."""
    new = make_hf(rope=rope).config.to_dict()
    assert new["rope_parameters"]
    scaling = dict(new["rope_parameters"])
    theta = scaling.pop("rope_theta")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": theta, "rope_scaling": None if rope == "default" else scaling}
    oldest = copy.deepcopy(old)
    if rope != "default":
        oldest["rope_scaling"]["type"] = oldest["rope_scaling"].pop("rope_type")
    configs = [config_from_hf(each) for each in (new, old, oldest, new | old)]
    assert configs == [configs[0]] * 4
    assert (configs[0].rope_scaling.kind if configs[0].rope_scaling else "default") == rope
    assert configs[0].rope_theta == ROPES[rope]["rope_theta"]


def test_what_config_json_leaves_out_is_as_transformers_has_it() -> None:
    from transformers import LlamaConfig as HfConfig

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = {key: LLAMA_31[key] for key in (*keys, "model_type")}
    theirs = HfConfig(**{**shape, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    assert config_from_hf(shape) == config_from_hf(theirs.to_dict())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_what_we_write_transformers_reads_without_a_word(rope: str, tied: bool, tmp_path: Any) -> None:
    from transformers import AutoConfig

    read = config_from_hf(make_hf(rope=rope, tied=tied).config.to_dict())
    config = dataclasses.replace(read, norm_eps=3e-6)
    written = for_every_version({**config_to_hf(config), "eos_token_id": 7, "use_cache": False}, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert config_from_hf(written) == config
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        loaded = AutoConfig.from_pretrained(tmp_path)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert logged == []
    assert config_from_hf(loaded.to_dict()) == config
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.dtype) == (None, 7, torch.bfloat16)
    assert loaded.use_cache


# Changes of LLAMA_31 -> the facts of their refusals. Y is 10 ** 400.
REFUSED = """
model_type: mistral, architectures: [MistralForCausalLM] -> =mistral (only llama ... MistralForCausalLM
architectures: [LlamaForSequenceClassification] -> LlamaForSequenceClassification
attention_bias: true -> attention_bias=True
hidden_act: gelu -> hidden_act=gelu (only silu
attention_dropout: 0.1 -> attention_dropout=0.1
head_dim: 64 -> head_dim=64 (only hidden_size / num_attention_heads = 128
num_attention_heads: 30, num_key_value_heads: 30 -> model.dim=4096
rope_scaling: {rope_type: yarn, factor: 4.0}
 -> rope_scaling.rope_type=yarn (only default, linear or llama3; yarn: ... causal_lm
rope_scaling: {type: dynamic, factor: 2.0} -> rope_scaling.type=dynamic (only default
rope_scaling: {rope_type: linear} -> lacks factor, which rope_type=linear needs
rope_scaling: {rope_type: linear, factor: 2.0, mscale: 1.0} -> unknown key mscale
rope_scaling: {full_attention: {rope_type: default}} -> one mapping for all layers
rope_scaling: {rope_type: default, rope_theta: 1.0} -> rope_theta=500000.0 and  ... contradict
rope_parameters: {rope_type: linear, factor: 2.0} -> rope_parameters= ... rope_scaling= ... contradict
partial_rotary_factor: 0.5 -> partial_rotary_factor=0.5
quantization_config: {quant_method: fp8} -> quantization_config= ... fp8
sliding_window: 4096 -> sliding_window=4096 (only null or absent
auto_map: {AutoModel: x.py} -> auto_map=
hidden_size: null -> hidden_size=None
vocab_size: many -> vocab_size='many'
num_key_value_heads: 5 -> model.n_kv_heads=5 must divide
rope_scaling: {rope_type: linear, factor: -2.0} -> factor=-2.0 must be greater than 0
tie_word_embeddings: "false" -> tie_word_embeddings='false' (only true or false
hidden_size: 1000000000000000000000000000000 -> hidden_size=100 ... (only an integer from 1 to 16,777,216
rope_scaling: null, rope_theta: [1.0] -> rope_theta=[1.0] (only a number
rope_scaling: null, rope_theta: .inf -> rope_theta=inf (only a number
rope_scaling: {rope_type: default, rope_theta: true} -> rope_scaling.rope_theta=True (only a
rms_norm_eps: Y -> rms_norm_eps=100 ... (only a number
rope_scaling: [] -> rope_scaling=[] (only one mapping
"""


def test_what_we_do_not_have_is_refused_by_name() -> None:
    def check(change: str, facts: str) -> None:
        changed = yaml.safe_load(f"{{{change.replace('Y', str(10**400))}}}")
        with pytest.raises(ValueError, match=re.escape(facts.partition(" ... ")[0])) as error:
            config_from_hf({**LLAMA_31, **changed})
        check_facts(str(error.value), facts)

    try_each(rows(REFUSED), check)


def test_all_problems_are_in_one_error() -> None:
    wrong = {"model_type": "qwen2", "attention_bias": True, "sliding_window": 512, "vocab_size": None}
    with pytest.raises(
        ValueError, match=r"model_type=qwen2.*attention_bias=True.*sliding_window=512.*vocab_size=None"
    ):
        config_from_hf({**LLAMA_31, **wrong})


def test_neutral_values_are_no_feature() -> None:
    neutral = {"hidden_act": "swish", "sliding_window": None, "partial_rotary_factor": 1.0, "mlp_bias": None}
    assert config_from_hf({**LLAMA_31, **neutral, "head_dim": 128}) == config_from_hf(LLAMA_31)
