"""Models that nobody here wrote compute the same, sharded, recomputed, compiled and split, as one process.
That they train, save and load the same: test_calling_sequence.py."""

from typing import Any

import pytest
import torch

import meshwright as mw
from tests.support.factories import HF_SIZES, VOCABULARY
from tests.support.hf_models import make_tokens
from tests.support.worlds import run_ranks
from tests.support.zoo import MODELS, PLANS, WITHOUT_STYLES, compare_plans

EVERYDAY = "torch's TransformerEncoder"
# Compiling takes the time: each model has one plan, the most difficult one that it can have on two ranks.
PLAN_OF = {
    **{name: "fsdp, full recomputation" if name in WITHOUT_STYLES else "tp" for name in MODELS},
    "transformers' Qwen2": "fsdp, selective recomputation",
    "transformers' Llama": "hsdp",
    "transformers' Qwen3": "hsdp x tp",
}
KINDS = {"transformers' Gemma 3": 2, "transformers' ViT": 2, "linears with dropout": 2}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == EVERYDAY else [pytest.mark.slow, pytest.mark.sampled(10)])
        for name in MODELS
    ],
)
def test_the_same_outputs_and_gradients_as_one_process(name: str) -> None:
    """With one graph for each kind of block. The input of ViT's first block has other strides, that of the
    first linear layer needs no gradient."""
    processes, keys = PLANS[PLAN_OF[name]]
    (result,) = run_ranks(processes, compare_plans, name, {"": keys})[0].values()
    assert result["differences"] == []
    assert result["compared"] > 10
    assert result["largest"] < 1e-5
    assert result["graphs"] == KINDS.get(name, 1)


def masked(model: Any, cp: int, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's logits of two sequences of 16 tokens, padded at the left or packed from two documents, and
    a gradient of all ranks, of a transformers model."""
    ids, mask = make_tokens(VOCABULARY, 2, 16), torch.ones(2, 16, dtype=torch.int64)
    mask[:, :6] = 0
    config = mw.ParallelConfig(cp=cp, compile=mw.CompileConfig(enabled=False))
    plan = mw.make_plan(config, mw.describe(model, {"input_ids": ids}), mw.RunShape(2, 2, seq_len=16))
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=0)
    own = sharded.token_positions(16)
    positions = torch.cat((torch.arange(8), torch.arange(8)) if not padded else (torch.arange(16),))[own]
    given = {"attention_mask": mask[:, own]} if padded else {}
    logits = model(input_ids=ids[:, own], position_ids=positions.expand(2, -1), **given).logits
    shown = logits * mask[:, own][..., None]
    shown.square().sum().backward()
    grad = mw.full_tensor(model.model.layers[0].self_attn.q_proj.weight.grad)
    return shown.detach(), grad * cp / 2  # with cp=1 both ranks have all tokens


def masked_of_two_models() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    import transformers

    found = []
    for padded in (True, False):
        config = transformers.LlamaConfig(**HF_SIZES, use_cache=False, initializer_range=0.3)
        with torch.device("meta"):
            models = [transformers.LlamaForCausalLM(config) for _ in range(2)]
        # the second model shares the config of the first, which must stay as it was
        found.append([masked(model, cp, padded) for model, cp in zip(models, (2, 1), strict=True)])
    return found


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_masks_and_packed_positions_of_transformers_mean_the_same_with_cp() -> None:
    """Documents that begin where a rank's tokens do, and padding; another model has the same config."""
    for rank, found in enumerate(run_ranks(2, masked_of_two_models)):
        for (logits, gradient), (whole, expected) in found:
            torch.testing.assert_close(logits, whole.chunk(2, dim=1)[rank], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
