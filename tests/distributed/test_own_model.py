"""Models that nobody here wrote compute the same, sharded, recomputed, compiled and split, as one process;
and train and save the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import meshwright as mw
from benchmarks.own_models import MODELS, PLANS, WITHOUT_STYLES, compare_in_worker, encoder, on_meta
from tests.support.factories import HF_SIZES, VOCABULARY
from tests.support.hf_models import make_tokens
from tests.support.worlds import run_ranks

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
    (result,) = run_ranks(processes, compare_in_worker, torch.device("cpu"), name, {"": keys})[0].values()
    assert result["differences"] == []
    assert result["compared"] > 10
    assert result["largest"] < 1e-5
    assert result["graphs"] == KINDS.get(name, 1)


def train(keys: dict[str, Any], steps: int, save: Path, load: Path) -> list[float]:
    """Losses and gradient norms in turn, of some steps on data that can be learned, from the checkpoint in
    `load` on if there is one."""
    model, example = on_meta(encoder)
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **keys)
    ranks = dist.get_world_size()
    plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(ranks, ranks, seq_len=12))
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=1)
    model.eval()  # no dropout, whose masks depend on the rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = 0
    if loaded := mw.load(str(load), sharded, optimizer):
        first, extra = loaded
        assert extra == {"note": "mine"}
    seen = []
    ids = example["input_ids"].repeat(2, 1)
    for _ in range(steps):
        own = ids.tensor_split(plan.mesh.data_parallel)[sharded.data_rank].split(2)
        total = torch.zeros(())
        for batch, count in sharded.micro_batches(own, lambda batch: batch.numel()):
            logits = model(input_ids=batch)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.detach()
        norm = sharded.clip_grad_norm(0.5)
        dist.all_reduce(total, group=sharded.data_group)
        optimizer.step()
        optimizer.zero_grad()
        seen += [total.item(), norm.item()]
    mw.save(str(save), sharded, optimizer, first + steps, extra={"note": "mine"})
    return seen


def train_each(runs: list[tuple[Any, ...]]) -> list[list[float]]:
    return [train(*run) for run in runs]


@pytest.mark.sampled(3, day=2)
def test_two_ranks_train_the_same_and_each_goes_on_from_the_other(tmp_path: Path) -> None:
    nothing, one, two, following, last = (
        tmp_path / name for name in ("nothing", "1", "2", "following", "last")
    )
    keys = {"dp_replicate": 2, "activation_checkpoint": "full"}
    ((alone,),) = run_ranks(1, train_each, [({}, 4, one, nothing)])
    together, on = run_ranks(2, train_each, [(keys, 4, two, nothing), (keys, 2, following, one)])[0]
    ((again,),) = run_ranks(1, train_each, [({}, 2, last, two)])
    assert alone[-2] < alone[0] - 0.1, "it learns"
    assert together == pytest.approx(alone, rel=1e-4)
    assert on == pytest.approx(again, rel=1e-4)
    assert on[-2] < alone[-2], "it goes on"


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
    grad = model.model.layers[0].self_attn.q_proj.weight.grad.full_tensor()
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
