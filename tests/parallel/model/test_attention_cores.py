"""Which modules of models of others are attention's cores, and why others are not."""

import copy

import pytest
import torch
from torch import nn

from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.attention_cores import exchange_in_registry, find_cores, in_registry
from tests.support.factories import HF_SIZES, Positioned, mixer


def llama(**changes: object) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HF_SIZES, **changes}))


def test_those_that_the_class_names_and_those_of_transformers() -> None:
    assert find_cores(Positioned()) == (("blocks.*.core",), "")
    assert find_cores(llama()) == (("model.layers.*.self_attn",), "")


def test_a_name_without_a_module_is_a_mistake() -> None:
    model = Positioned()
    model.attention_cores = ("blocks.*.cor",)
    with pytest.raises(PlanError, match=r"blocks\.\*\.cor matches no module"):
        find_cores(model)


def test_attention_in_both_directions_is_none() -> None:
    model = llama()
    model.model.layers[1].self_attn.is_causal = False
    assert find_cores(model) == ((), "some of its attention is not causal")


def test_why_a_model_has_no_cores() -> None:
    for model, why in (
        (mixer(), "nothing says where its attention is"),
        (llama(attention_dropout=0.1), "config.attention_dropout"),
        (llama(attn_implementation="eager"), "its attention is eager"),
    ):
        cores, reason = find_cores(model)
        assert cores == ()
        assert why in reason


def test_masks_and_packed_positions_of_transformers_reach_an_exchange() -> None:
    """Of one rank, which has all tokens. The config may be another model's too, and stays as it was."""
    model = llama(initializer_range=0.3, use_cache=False)
    exchanging = copy.deepcopy(model)
    exchanging.apply(lambda module: setattr(module, "config", model.config))
    attentions = [module for module in exchanging.modules() if in_registry(module)]
    exchange_in_registry(exchanging, attentions, lambda attend, *qkv: attend(*qkv), lambda x: x)
    assert model.config._attn_implementation == "sdpa"
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    plain, packed = (
        torch.arange(12).expand(2, -1),
        torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1),
    )
    mask[:, :4] = 0
    seen = []
    for positions, given in (
        (plain, None),
        (packed, None),
        (plain, mask),
        (plain, mask[:, None, None].bool()),
    ):
        shown = slice(None) if given is None else slice(4, None)
        expected = model(ids, given, positions).logits[:, shown]
        torch.testing.assert_close(exchanging(ids, given, positions).logits[:, shown], expected)
        seen.append(expected)
    assert not torch.allclose(seen[0], seen[1]), "the documents do not see each other"
    for given in ({}, {"position_ids": plain[0]}, {"position_ids": plain, "attention_mask": {"full": None}}):
        with pytest.raises(PlanError, match=r"needs position_ids\[B, t\]"):
            exchanging(input_ids=ids, **given)
