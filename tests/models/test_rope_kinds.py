"""Both kinds of RoPE scaling compared with transformers' functions, and refused settings."""

import math
from typing import Any

import pytest
import torch

from meshwright.models.config import LlamaConfig, RopeScaling
from meshwright.models.rope import rope_frequencies


@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize(
    "scaling", [RopeScaling("linear", 2.5), RopeScaling(), RopeScaling("llama3", 32.0, 2.0, 8.0, 512)]
)
def test_frequencies_are_those_of_transformers(scaling: RopeScaling, head_dim: int) -> None:
    from transformers import LlamaConfig as HfConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": scaling.kind, "rope_theta": 500000.0, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = HfConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    assert factor == 1.0
    torch.testing.assert_close(rope_frequencies(head_dim, 500000.0, scaling), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"kind": "yarn"}, "model.rope_scaling.kind=yarn must be llama3 or linear"),
        ({"factor": 0.0}, "model.rope_scaling.factor=0.0 must be greater than 0"),
        ({"kind": "linear", "factor": math.nan}, "model.rope_scaling.factor=nan must be greater than 0"),
        ({"low_freq_factor": 0.0}, "model.rope_scaling.low_freq_factor=0.0"),
        ({"original_max_seq_len": 0}, "model.rope_scaling.original_max_seq_len=0"),
        (
            {"high_freq_factor": 1.0},
            "model.rope_scaling.high_freq_factor=1.0 must be greater than low_freq_factor=1.0",
        ),
    ],
)
def test_what_cannot_be_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(rope_scaling=RopeScaling(**scaling))


def test_linear_scaling_has_no_use_for_the_rest() -> None:
    unused = {"low_freq_factor": 0.0, "high_freq_factor": 0.0, "original_max_seq_len": 0}
    LlamaConfig(rope_scaling=RopeScaling("linear", 2.0, **unused))
