"""Which modules of models of others are attention's cores, and why others are not."""

import pytest
from torch import nn

from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.attention_cores import find_cores
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
