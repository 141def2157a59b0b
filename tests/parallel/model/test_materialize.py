"""Values of a sharded model: its own initialisers, the same on every mesh; or given tensors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel.fsdp import full_tensor
from meshwright.parallel.model import constructor
from meshwright.parallel.model.constructor import construct_on_meta, tensors_by_name
from meshwright.parallel.model.materialize import Spread
from tests.support.worlds import run_ranks
from tests.support.zoo import MADE, MODELS, WITHOUT_STYLES, encoder, hf_llama, on_meta

EVERYDAY = [name for name in MODELS if not name.startswith("transformers'")] + ["transformers' Llama"]


def shard(made: MADE, **keys: Any) -> mw.ShardedModel:
    model, example = made
    size = dist.get_world_size()
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **keys)
    plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(size, size, 12))
    return mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="mean_of_ranks")


def whole(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: full_tensor(t).detach().clone() for name, t in tensors.items()}


def materialized(names: Sequence[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The values of each model on each mesh of these ranks."""
    meshes: list[dict[str, Any]] = [{}, {"dp_replicate": 2}, {"tp": 2}] if dist.get_world_size() > 1 else [{}]
    values = {}
    for name in names:
        for keys in meshes:
            if "tp" not in keys or name not in WITHOUT_STYLES:
                sharded = shard(on_meta(MODELS[name]), **keys)
                mw.materialize(sharded, seed=3)
                values[name, str(keys)] = whole(sharded.model)
    return values


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(EVERYDAY, id="everyday"),
        pytest.param(
            [name for name in MODELS if name not in EVERYDAY],
            marks=[pytest.mark.slow, pytest.mark.sampled(10)],
            id="transformers",
        ),
    ],
)
def test_the_initialisers_of_the_modules_give_the_same_values_on_every_mesh(names: list[str]) -> None:
    (alone,) = run_ranks(1, materialized, names)
    for of_rank in run_ranks(2, materialized, names):
        assert {name for name, _ in of_rank} == {*names}
        for (name, keys), values in of_rank.items():
            expected = alone[name, "{}"]
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[key], expected[key]) for key in expected), (name, keys)
    assert all(value.isfinite().all() for values in alone.values() for value in values.values())
    if names == EVERYDAY:
        check_encoder(alone["torch's TransformerEncoder", "{}"])
        llama = alone["transformers' Llama", "{}"]
        rope = next(value for name, value in llama.items() if name.endswith("rotary_emb.inv_freq"))
        assert torch.equal(rope, hf_llama()[0].model.rotary_emb.inv_freq), "a buffer that no checkpoint has"


def check_encoder(values: dict[str, Tensor]) -> None:
    attention = values["encoder.layers.0.self_attn.in_proj_weight"]
    bound = (6 / (32 + 96)) ** 0.5  # xavier_uniform of nn.MultiheadAttention
    assert 0.9 * bound < attention.abs().max() <= bound
    assert not values["encoder.layers.0.self_attn.out_proj.bias"].any(), "set by the module around it"
    blocks = [values[f"encoder.layers.{i}.linear1.weight"] for i in range(2)]
    assert not torch.equal(*blocks), "blocks start differently"


class Forgotten(nn.Module):
    """Has tied weights, and values only in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        last: Tensor = self.last(x)
        return last


class Scaled(nn.Module):
    """Has a value only in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.scale
        return scaled


def forget() -> str:
    """The refusal of a value that no initialiser wrote; then rank 0 sends all values."""
    with torch.device("meta"):
        model = Forgotten()
    sharded = shard((model, (torch.zeros(2, 8),)))  # type: ignore[arg-type]
    with pytest.raises(mw.PlanError) as refused:
        mw.materialize(sharded, seed=0)
    mw.load_weights(sharded, whole(Forgotten()) if dist.get_rank() == 0 else None, from_rank0=True)
    assert model.first.weight is model.last.weight, "shared weights stay shared"
    values = whole(sharded.model)
    assert values["blocks.1.scale"].eq(1).all()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, values)
    assert all(torch.equal(gathered[0][name], gathered[1][name]) for name in values)
    return str(refused.value)


def test_a_value_that_nobody_wrote_is_refused_and_can_be_sent_from_rank_0() -> None:
    for message in run_ranks(2, forget):
        assert message.startswith("blocks.0.scale has no value: no initialiser of Scaled wrote it")
        assert "load_weights" in message


class Rotated(nn.Module):
    """Has buffers of every kind and a tensor as an attribute, which its constructor fills, and a weight that
    the model around it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("phases", torch.polar(torch.ones(16), torch.arange(16.0)), persistent=False)
        self.register_buffer("mask", torch.arange(16) % 2 == 0)
        self.register_buffer("order", torch.randperm(16), persistent=False)
        self.shift = torch.linspace(0, 1, 16)
        if not self.up.weight.is_meta:
            self.initialised = True  # transformers marks modules so

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, self.phases.real * self.norm(x), x)[..., self.order] + self.shift
        down: Tensor = self.down(self.up(x).relu())
        return x + down


def rotated() -> nn.Module:
    model = nn.Sequential(*(Rotated() for _ in range(3)))
    for name, parameter in model.named_parameters():
        if name.endswith("down.weight"):
            nn.init.normal_(parameter, std=0.001)
    return model


def unseeded() -> nn.Module:
    model = rotated()
    nn.init.constant_(dict(model.named_parameters())["1.norm.bias"], dist.get_rank())
    return model


def failing() -> nn.Module:
    if dist.get_rank():
        raise OSError("no disk")
    return rotated()


def on_this_mesh(**parallel: Any) -> mw.ShardedModel:
    with torch.device("meta"):
        model = rotated()
    return shard((model, (torch.zeros(2, 3, 16),)), **parallel)


def as_constructed() -> list[str]:
    """The values of a constructor, on each mesh; refusals of other initialisers, and of ranks that differ."""
    torch.manual_seed(3)
    plain = rotated()
    for parallel in ({}, {"dp_replicate": 2}):
        sharded = on_this_mesh(**parallel)
        mw.materialize(sharded, 3, build=rotated)
        for name, value in whole(sharded.model).items():
            assert torch.equal(value, tensors_by_name(plain)[name]), name
        assert torch.equal(sharded.model[2].shift, plain[2].shift)  # type: ignore[index]
        sharded = on_this_mesh(**parallel)
        mw.load_weights(sharded, plain.state_dict(), build=rotated)
        loaded = whole(sharded.model)
        assert torch.equal(loaded["2.phases"], plain[2].phases)  # type: ignore[index]
        assert torch.equal(loaded["2.down.weight"], plain[2].down.weight)  # type: ignore[index]
    refused = []
    for build, init, free in (
        (unseeded, "constructor", 1e9),
        (rotated, "modules", 1e9),
        (failing, "constructor", 1e9),
        (rotated, "constructor", 1e3),
    ):
        constructor.free_host_bytes = lambda free=free: free  # type: ignore[assignment]
        with pytest.raises(mw.PlanError) as error:
            mw.materialize(on_this_mesh(), 3, build=build, init=init)  # type: ignore[arg-type]
        refused.append(str(error.value))
    return refused


def test_values_are_those_of_the_constructor_and_other_initialisers_are_compared_with_it() -> None:
    for unlike, scaled, failed, large in run_ranks(2, as_constructed):
        assert "the constructor fails on rank 1: OSError: no disk" in failed
        assert "in host memory, of which 0.0 GiB are free" in large
        assert "gives 1.norm.bias other values on rank 1 than on rank 0" in unlike
        assert scaled.startswith("2.down.weight: its initialiser gives a mean of ")
        assert "model.init=constructor" in scaled


def test_spreads_differ_by_their_mean_or_their_deviation() -> None:
    values, others = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    changed = {"": others, "mean": values + 0.2, "deviation": 1.2 * values, "constant": torch.zeros(10_000)}
    found = [name for name, each in changed.items() if Spread.of(each).differs(Spread.of(values))]
    assert found == ["mean", "deviation", "constant"]


class Marked(nn.Module):
    """Its initialiser writes a buffer of no numbers, or forgets it."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.linear, self.forgets = nn.Linear(8, 8), forgets
        self.register_buffer("mask", torch.zeros(8, dtype=torch.bool))

    def reset_parameters(self) -> None:
        if not self.forgets:
            self.mask.copy_(torch.arange(8) % 3 == 0)

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = self.linear(x) * self.mask
        return masked


def mark(forgets: bool) -> Tensor:
    with torch.device("meta"):
        model = nn.Sequential(*(Marked(forgets) for _ in range(2)))
    sharded = shard((model, (torch.zeros(2, 8),)))
    mw.materialize(sharded, seed=0)
    return sharded.model[1].mask  # type: ignore[index, union-attr, return-value]


def test_a_buffer_without_numbers_is_written_or_refused() -> None:
    assert run_ranks(1, mark, False)[0].tolist() == [i % 3 == 0 for i in range(8)]
    with pytest.raises(Exception, match=r"0\.mask has no value"):
        run_ranks(1, mark, True)


class Bare(Marked):
    """No initialiser writes its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.zeros(8))


def build_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Bare(), Bare())


class Outer(nn.Sequential):
    """Its initialiser writes the parameters of its blocks."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter.data)


def fill_what_is_on_meta() -> tuple[Tensor, str]:
    """A buffer that given tensors do not have, and the refusal of a constructor that makes no values."""
    sharded = shard((build_on_meta(), (torch.zeros(2, 8),)))
    with pytest.raises(mw.PlanError) as error:
        mw.materialize(sharded, seed=0, build=build_on_meta)
    with pytest.raises(mw.PlanError, match="does not run alone: uniform_ would write a parameter of another"):
        mw.materialize(shard((Outer(Marked(), Marked()).to("meta"), (torch.zeros(2, 8),))), seed=0)
    parameters = {name: torch.ones(p.shape) for name, p in sharded.model.named_parameters()}
    sharded = shard((build_on_meta(), (torch.zeros(2, 8),)))
    mw.load_weights(sharded, parameters, build=build_on_meta)
    return sharded.model[1].mask, str(error.value)  # type: ignore[index, union-attr, return-value]


def test_initialisers_write_only_what_is_neither_given_nor_constructed() -> None:
    ((mask, refused),) = run_ranks(1, fill_what_is_on_meta)
    assert mask.tolist() == [i % 3 == 0 for i in range(8)]
    assert "leaves 0.bare on the meta device" in refused


def load_each() -> list[str]:
    """The refusals of tensors that are not those of the model; the right ones are loaded."""
    sharded = shard(on_meta(encoder))
    right = whole(encoder()[0])
    bias = right["head.bias"]
    rest = {name: tensor for name, tensor in right.items() if name != "head.bias"}
    mw.load_weights(sharded, right)
    assert all(torch.equal(value, right[name]) for name, value in whole(sharded.model).items())
    refused = []
    for wrong in (rest, {**rest, "head.bios": bias}, {**rest, "head.bias": torch.zeros(3)}, None):
        with pytest.raises(mw.PlanError) as error:
            mw.load_weights(sharded, wrong)
        refused.append(str(error.value))
    return refused


def test_given_tensors_must_be_those_of_the_model() -> None:
    assert run_ranks(1, load_each)[0] == [
        "load_weights: there is no value for head.bias. Did you mean head.weight?",
        "load_weights: the model has no head.bios. Did you mean head.bias?",
        "load_weights: head.bias has the shape (3,), but the model's is (96,)",
        "load_weights: no tensors: give them, or from_rank0=True with those of rank 0",
    ]


def tie(model: nn.Sequential) -> nn.Sequential:
    model[0].weight = model[1].weight = nn.Parameter(torch.rand(8, 4))
    return model


def test_a_parameter_that_is_tied_before_it_is_registered_stays_tied() -> None:
    model, _ = construct_on_meta(lambda: tie(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))))
    assert model[0].weight is model[1].weight
