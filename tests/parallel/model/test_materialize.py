"""Values of a sharded model: its own initialisers, the same on every mesh; or given tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.tools.bench.own_model.models import MADE, MODELS, WITHOUT_STYLES, encoder, hf_llama, on_meta
from tests.support.own_models import EACH
from tests.support.worlds import run_ranks


def shard(made: MADE, **keys: Any) -> mw.ShardedModel:
    model, example = made
    size = dist.get_world_size()
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **keys)
    plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(size, size, 12))
    return mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="mean_of_ranks")


def whole(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def materialized(name: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    sharded = shard(on_meta(MODELS[name]), **keys)
    mw.materialize(sharded, seed=3)
    return whole(sharded.model)


@pytest.mark.parametrize("name", EACH)
def test_the_same_values_on_every_mesh(name: str) -> None:
    (alone,) = run_ranks(1, materialized, name, {})
    meshes: list[dict[str, Any]] = [{}, {"dp_replicate": 2}]
    for keys in [*meshes, *([] if name in WITHOUT_STYLES else [{"tp": 2}])]:
        for values in run_ranks(2, materialized, name, keys):
            assert values.keys() == alone.keys()
            assert all(torch.equal(values[key], alone[key]) for key in alone), keys
    assert all(value.isfinite().all() for value in alone.values())


def test_the_initialisers_are_those_of_the_modules() -> None:
    (values,) = run_ranks(1, materialized, "torch's TransformerEncoder", {})
    attention = values["encoder.layers.0.self_attn.in_proj_weight"]
    bound = (6 / (32 + 96)) ** 0.5  # xavier_uniform of nn.MultiheadAttention
    assert 0.9 * bound < attention.abs().max() <= bound
    assert not values["encoder.layers.0.self_attn.out_proj.bias"].any(), "set by the module around it"
    (llama,) = run_ranks(1, materialized, "transformers' Llama", {})
    rope = next(value for name, value in llama.items() if name.endswith("rotary_emb.inv_freq"))
    assert torch.equal(rope, hf_llama()[0].model.rotary_emb.inv_freq), "a buffer that no checkpoint has"


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(nn.Module):
    """Has a value only in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.scale
        return scaled


def forget() -> str:
    with torch.device("meta"):
        model = Forgotten()
    sharded = shard((model, (torch.zeros(2, 8),)))  # type: ignore[arg-type]
    try:
        mw.materialize(sharded, seed=0)
    except mw.PlanError as error:
        message = str(error)
    mw.load_weights(sharded, whole(Forgotten()) if dist.get_rank() == 0 else None, from_rank0=True)
    values = whole(sharded.model)
    assert values["blocks.1.scale"].eq(1).all()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, values)
    assert all(torch.equal(gathered[0][name], gathered[1][name]) for name in values)
    return message


def test_a_value_that_nobody_wrote_is_refused_and_can_be_sent_from_rank_0() -> None:
    for message in run_ranks(2, forget):
        assert message.startswith("blocks.0.scale has no value: no initialiser of Scaled wrote it")
        assert "load_weights" in message


def loaded(change: str) -> str:
    model, example = on_meta(encoder)
    sharded = shard((model, example))
    tensors = whole(encoder()[0])
    if change == "missing":
        del tensors["head.bias"]
    elif change == "unknown":
        tensors["head.bios"] = tensors["head.bias"]
    elif change == "shape":
        tensors["head.bias"] = torch.zeros(3)
    try:
        mw.load_weights(sharded, tensors)
    except mw.PlanError as error:
        return str(error)
    assert all(torch.equal(value, tensors[name]) for name, value in whole(model).items())
    return ""


def test_given_tensors_must_be_those_of_the_model() -> None:
    results = {change: run_ranks(1, loaded, change)[0] for change in ("", "missing", "unknown", "shape")}
    assert results == {
        "": "",
        "missing": "load_weights: there is no value for head.bias. Did you mean head.weight?",
        "unknown": "load_weights: the model has no head.bios. Did you mean head.bias?",
        "shape": "load_weights: head.bias has the shape (3,), but the model's is (96,)",
    }


def tied() -> bool:
    sharded = shard(on_meta(hf_llama, tie_word_embeddings=True))
    mw.materialize(sharded, seed=0)
    model: Any = sharded.model
    return model.lm_head.weight is model.model.embed_tokens.weight


def test_shared_weights_stay_shared() -> None:
    assert run_ranks(2, tied) == [True, True]
