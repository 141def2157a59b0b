"""Every causal language model of transformers, tiny: sharded, recomputed and split it computes the same, or
it is refused; its tensor-parallel styles are known, or refused by name."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import meshwright as mw
from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.check import compare
from meshwright.parallel.model.styles import TRANSFORMERS_STYLES, find_styles
from tests.support.factories import HF_SIZES
from tests.support.hf_models import make_tokens
from tests.support.worlds import run_ranks

LARGEST = 1_000_000  # parameters: a model that is larger at our sizes has parts of other sizes, as for images
# The words and the modules that we refuse.
UNKNOWN = {
    *("all_reduce", "embedding_colwise", "local_params", "mla_kv_a_proj", "moe_identity_expert"),
    *("moe_tp_experts", "packed_colwise", "packed_rowwise", "replicate"),
}
REFUSALS = ("matches no module", "is for nn.Linear", "is for nn.Embedding", "is for a single norm")
# Dense text models whose split must be known, whatever transformers changes.
FAMILIES = {
    *("cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite"),
    *("helium", "llama", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "phi", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
}
BROKEN = {"xlstm"}  # its own initialiser fails

pytestmark = pytest.mark.slow


def make(kind: str) -> nn.Module:
    """A tiny model on the meta device. Raises whatever transformers raises if it needs other sizes."""
    config = transformers.CONFIG_MAPPING[kind](**HF_SIZES, rotary_dim=8, use_cache=False)
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(types := getattr(config, key, None), list):
            setattr(config, key, types[: HF_SIZES["num_hidden_layers"]])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name if isinstance(name, str) else name[0])(config)
    return model.eval()


@functools.cache
def made() -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Every model that can be built at our sizes; and the errors of the others, whose configs ask for other
    sizes or other packages."""
    models, errors = {}, {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            models[kind] = make(kind)
        except Exception as error:  # of any kind: it is transformers' own
            errors[kind] = f"{type(error).__name__}: {error}"
    return models, errors


def test_every_published_style_is_known_or_refused_by_name() -> None:
    known, words = set(), set()
    models, errors = made()
    for kind, model in models.items():
        published: Any = getattr(model, "tp_plan", None) or {}
        try:
            if find_styles(model, None):
                known.add(kind)
        except PlanError as error:
            refused = str(error)
            assert any(text in refused for text in (*REFUSALS, *map(repr, UNKNOWN))), refused
        words |= set(published.values())
    assert len(errors) < len(models) / 3, errors
    assert words - set(TRANSFORMERS_STYLES) <= UNKNOWN
    assert known >= FAMILIES


def compare_each(kinds: Sequence[str], keys: dict[str, Any]) -> dict[str, Any]:
    """Compare each model under a plan for 2 processes with the model on one; the message of a refusal."""
    found: dict[str, Any] = {}
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **keys)
    for kind in kinds:
        model, example = make(kind), {"input_ids": make_tokens(HF_SIZES["vocab_size"], 2, 12)}
        try:
            plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(2, 2, seq_len=12))
            found[kind] = compare(plan, model, example)
        except PlanError as error:
            found[kind] = str(error)
    return found


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({"tp": 2, "activation_checkpoint": "none"}, 36),
        ({"dp_shard": 2, "activation_checkpoint": "full"}, 66),
    ],
)
def test_every_model_that_is_not_refused_computes_the_same(keys: dict[str, Any], least: int) -> None:
    kinds = [
        kind
        for kind, model in made()[0].items()
        if sum(parameter.numel() for parameter in model.parameters()) < LARGEST and kind not in BROKEN
    ]
    found = run_ranks(2, compare_each, kinds, keys, limit_s=240)[0]
    computed = {kind: result for kind, result in found.items() if not isinstance(result, str)}
    for kind, result in computed.items():
        assert result["differences"] == [], kind
        assert result["compared"] > 10, kind
    assert len(computed) >= least
    assert computed.keys() >= FAMILIES
