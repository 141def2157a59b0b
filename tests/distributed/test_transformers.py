"""Every causal language model of transformers, tiny: sharded, recomputed and split it computes the same, or
it is refused; its tensor-parallel styles are known, or refused by name."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.parallel.check.check import compare
from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.foreign_styles import TRANSFORMERS_STYLES, find_styles
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
WITH_EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3"}  # the same without tp
BROKEN = {"xlstm"}  # its own initialiser fails
PLANS: list[dict[str, Any]] = [
    {"tp": 2, "activation_checkpoint": "none"},
    {"dp_shard": 2, "activation_checkpoint": "full"},
]
PARTS = 8  # of all models, one a day
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}

pytestmark = pytest.mark.slow


def kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def make(kind: str) -> nn.Module | None:
    """A tiny model on the meta device; None if it needs other sizes or other packages."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        kind_of_config, sizes = transformers.CONFIG_MAPPING[kind], {**HF_SIZES, **EXPERTS}
        if hasattr(kind_of_config, "kv_lora_rank"):  # latent attention has no groups
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        config = kind_of_config(**sizes, rotary_dim=8, use_cache=False)
        for key in ("layer_types", "mlp_layer_types"):
            if isinstance(types := getattr(config, key, None), list):
                setattr(config, key, types[: HF_SIZES["num_hidden_layers"]])
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, name if isinstance(name, str) else name[0])(config)
    except Exception:  # of any kind: it is transformers' own
        return None
    return model.eval()


@pytest.mark.sampled(10)
def test_every_published_style_is_known_or_refused_by_name() -> None:
    known, words = set(), set()
    models = {kind: model for kind in kinds() if (model := make(kind)) is not None}
    for kind, model in models.items():
        published: Any = getattr(model, "tp_plan", None) or {}
        try:
            if find_styles(model, None):
                known.add(kind)
        except PlanError as error:
            refused = str(error)
            assert any(text in refused for text in (*REFUSALS, *map(repr, UNKNOWN))), refused
        words |= set(published.values())
    assert len(models) > 0.75 * len(kinds()), kinds() - models.keys()
    assert words - set(TRANSFORMERS_STYLES) <= UNKNOWN
    assert known >= FAMILIES


def compare_each(names: Sequence[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Compare each model under each plan for 2 processes with the model on one, by kind and plan, if the
    model can be made and the plan is not refused."""
    found = {}
    for kind in names:
        model, example = make(kind), {"input_ids": make_tokens(HF_SIZES["vocab_size"], 2, 12)}
        if model is None or sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            continue
        for number, keys in enumerate(PLANS):
            config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **keys)
            try:
                plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(2, 2, seq_len=12))
                found[kind, number] = compare(plan, model, example)
            except PlanError:
                continue
    return found


@pytest.mark.sampled(5)
def test_every_model_that_is_not_refused_computes_the_same() -> None:
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    today = {*(kinds() if seed == "all" else kinds()[int(seed) % PARTS :: PARTS])} - BROKEN
    found = run_ranks(2, compare_each, sorted(today), limit_s=600)[0]
    for of, result in found.items():
        assert result["differences"] == [], of
        assert result["compared"] > 10, of
    assert found.keys() >= {(family, number) for family in FAMILIES & today for number in range(len(PLANS))}
    assert found.keys() >= {(family, 1) for family in WITH_EXPERTS & today}
