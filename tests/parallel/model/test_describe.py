"""What is read from a model, and what is refused."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.zoo.case import ids
from meshwright.parallel.model.describe import describe, find_blocks
from meshwright.parallel.model.forward import run_on_fakes
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.planner.tracing.eager import record_call
from tests.support.zoo import MODELS, encoder, gemma, hf_llama, on_meta


class Positions(nn.Module):
    """Parameters of the model itself, a module that is never called, and a weight that is read outside of its
    module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.never_called, self.read_outside = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.positions, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.read_outside(self.first(x)) + self.positions + self.never_called.weight[0]
        for block in self.blocks:
            x = block(x)
        return x @ self.read_outside.weight.t() * self.scale


class Inner(nn.Module):
    """A parameter beside blocks, which are containers without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for (linear,) in self.blocks:
            x = linear(x)
        return x


class Experts(nn.Module):
    """Fewer blocks than each has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), x)


class TwoStacks(nn.Module):
    """Encoder and decoder, and a stem that is a list too; the encoder's first weight has a second name in a
    module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(8, 8)
        self.embed = nn.Embedding(8, 8)
        self.embed.weight = self.shared.weight
        self.stem = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))
        self.encoder = nn.Sequential(*(Experts() for _ in range(2)))
        self.decoder = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, 0.0) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(self.stem(self.embed(ids))))
        return result


def test_units_are_before_between_and_after_the_blocks_in_the_order_of_the_forward() -> None:
    model, example = on_meta(hf_llama)
    units = describe(model, example)
    blocks = [f"model.layers.{i}" for i in range(3)]
    assert list(units.units) == [
        ("model.embed_tokens",),
        *((name,) for name in blocks),
        ("model.norm", "lm_head"),
    ]
    assert units.compiled == units.checkpointed == frozenset(blocks)
    assert sum(units.modules.values()) == sum(p.numel() for p in model.parameters())
    assert units.tp_divides["model"]["config.num_key_value_heads"] == 2


def test_tied_weights_make_one_unit_and_are_split_together_or_not() -> None:
    model, example = on_meta(hf_llama, tie_word_embeddings=True)
    units = describe(model, example)
    assert units.units[-1] == ("model.embed_tokens", "model.norm", "lm_head")
    assert next(iter(units.modules)) == "model.embed_tokens"
    assert sum(units.modules.values()) == sum(p.numel() for p in model.parameters())
    assert units.styles["model"]["lm_head"] == "own_gathered"
    whole = describe(*on_meta(gemma))
    assert not {"lm_head", "model.embed_tokens"} & whole.styles["model"].keys(), "the embedding is scaled"


def test_what_no_module_holds_when_it_is_read_is_held_by_the_root() -> None:
    """Parameters of the model, of a module that is never called, and of one whose weight is read outside."""
    units = describe(Positions(), (torch.zeros(2, 8),))
    blocks = [(f"blocks.{i}",) for i in range(3)]
    assert list(units.units) == [("first",), *blocks, ("",)]
    assert list(units.modules) == ["", "first", "blocks.0", "blocks.1", "blocks.2"]
    assert units.modules[""] == 8 + 64 + 72
    assert units.unsharded == ("scale",), "a scalar cannot be sharded"
    plan = mw.make_plan(mw.ParallelConfig(), units, mw.RunShape(2, 2, 8))
    assert [unit.name for unit in plan.units if not unit.reshard_after_forward] == ["blocks.2", "(root)"]
    assert [unit.name for unit in plan.forward_order][:2] == ["(root)", "first"]
    assert validate(plan, units, 2, 8) == []
    (mistake,) = validate(dataclasses.replace(plan, units=plan.units[:-1]), units, 2, 8)
    assert "(root) is in no unit" in mistake.message


def test_a_module_that_contains_units_begins_before_them_and_ends_after_them() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Inner(), nn.Linear(8, 8))
    units = describe(model, (torch.zeros(2, 8),))
    blocks = ["1.blocks.0.0", "1.blocks.1.0"]
    assert list(units.modules) == ["0", "1", *blocks, "2"]
    assert list(units.units) == [("0",), *((name,) for name in blocks), ("1",), ("2",)]
    assert units.checkpointed == {*blocks}, "the elements of the list are not called"
    assert list(describe(model).units) == list(units.units), "without an example"


def test_blocks_are_the_outermost_lists_without_small_ones() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(8, 8), *(Experts() for _ in range(2)))) == ["1", "2"]
    assert find_blocks(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Experts()]))) == ["1.0"], "one layer"
    model = TwoStacks()
    assert find_blocks(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    units = describe(model, (torch.zeros(2, 3, dtype=torch.long),))
    assert next(iter(units.units)) == ("embed", "stem.0", "stem.1"), "shared has a called module's weight"
    assert sum(units.modules.values()) == sum(p.numel() for p in model.parameters())


def test_blocks_by_pattern_class_and_size() -> None:
    model = encoder()[0]
    layers = [f"encoder.layers.{i}" for i in range(3)]
    assert find_blocks(model) == find_blocks(model, "encoder.layers.*") == layers
    assert find_blocks(model, nn.TransformerEncoderLayer) == layers
    size = sum(p.numel() for p in model.encoder.layers[0].parameters())
    assert find_blocks(model, size) == layers


def test_units_inside_blocks_and_parameters_that_stay_whole() -> None:
    model = encoder()[0]
    units = describe(model, {"input_ids": ids()}, units=["encoder.layers.*.linear2"], unsharded=["head.bias"])
    assert units.units[1] == ("encoder.layers.0.linear2",)
    assert units.units[2] == ("encoder.layers.0",)
    assert units.compiled == frozenset(f"encoder.layers.{i}.linear2" for i in range(3))
    assert units.unsharded == ("head.bias",)


def llama(**changes: Any) -> tuple[nn.Module, Any]:
    return on_meta(hf_llama, **changes)


def checkpointing() -> tuple[nn.Module, Any]:
    model, example = llama()
    model.model.layers[0].gradient_checkpointing = True
    return model, example


def positions(width: int = 8) -> tuple[nn.Module, Any]:
    return Positions(), (torch.zeros(2, width),)


def linear() -> tuple[nn.Module, Any]:
    return nn.Linear(8, 8), (torch.zeros(2, 8),)


def embedding(**keys: Any) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Embedding(8, 8, **keys), nn.Linear(8, 8), nn.Linear(8, 8)), (ids() % 8,)


def tied_block() -> tuple[nn.Module, Any]:
    model, example = positions()
    model.positions = model.blocks[0].bias
    return model, example


def hooked() -> tuple[nn.Module, Any]:
    model, example = llama()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    return model, example


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: llama(use_cache=True), {}, "set model.config.use_cache = False"),
    (checkpointing, {}, "the model's own gradient checkpointing is on"),
    (tied_block, {}, "blocks.0 cannot be a block"),
    (positions, {"blocks": "never_called"}, "never_called is never called by the example"),
    (linear, {}, "no list of equal blocks: name them"),
    (positions, {"blocks": "block.*"}, "blocks='block.*' matches no module"),
    (lambda: positions(9), {"unsharded": ["positions"]}, "does not run on the example's"),
    (positions, {"unsharded": ["posittions"]}, "Did you mean positions?"),
    (llama, {"styles": {"model.norm": "rowwise"}}, "LlamaRMSNorm, and rowwise is for nn.Linear"),
    (llama, {"styles": {"*.q_proj": "colwize"}}, "Did you mean colwise?"),
    (llama, {"styles": {"*.q_prj": "own_colwise"}}, "matches no module"),
    (hooked, {"styles": {"*.q_proj": "own_colwise"}}, "call its hooks with a part"),
    (
        lambda: embedding(scale_grad_by_freq=True),
        {"blocks": 64, "styles": {"0": "vocab"}},
        "scale_grad_by_freq",
    ),
    (lambda: embedding(sparse=True), {"blocks": 64}, "cannot have sparse gradients"),
    (lambda: embedding(max_norm=1.0), {"blocks": 64}, "cannot have max_norm"),
]


@pytest.mark.parametrize(("made", "keys", "message"), REFUSED)
def test_refusals_name_the_module_and_a_way_out(made: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.PlanError) as raised:
        describe(*made(), **keys)
    assert message in str(raised.value)


def test_positions_made_from_all_tokens_forbid_sequence_parallelism() -> None:
    units = describe(*on_meta(hf_llama))
    shape = mw.RunShape(2, 2, 12)
    plan = mw.make_plan(mw.ParallelConfig(tp=2), units, shape)
    assert not plan.tensor.sequence_parallel
    tensor = dataclasses.replace(plan.tensor, sequence_parallel=True)
    mistakes = validate(dataclasses.replace(plan, tensor=tensor), units, 2, 12)
    assert [m.field for m in mistakes] == ["tensor.sequence_parallel"]
    assert "computes positions or masks from all tokens" in mistakes[0].message


def test_switches_that_the_model_does_not_have_are_refused() -> None:
    units = describe(*MODELS["linears with dropout"]())
    keys: dict[str, Any]
    for keys, message in (
        ({"attention": "flash"}, "parallel.attention=flash is a switch that this model does not have"),
        ({"loss_chunk_tokens": 128}, "parallel.loss_chunk_tokens=128 is a switch"),
        ({"fused_projections": True}, "parallel.fused_projections=True is a switch"),
        ({"tp": 2}, "but this model has no tensor-parallel styles"),
    ):
        with pytest.raises(mw.PlanError) as raised:
            mw.make_plan(mw.ParallelConfig(**keys), units, mw.RunShape(2, 2, 8))
        assert message in str(raised.value)


def test_a_published_split_that_is_unknown_is_refused_only_with_tp() -> None:
    """`_tp_plan` of a style that we do not have; without tp the model is planned."""
    model, example = on_meta(hf_llama)
    model._tp_plan = {"model.layers.*.mlp.down_proj": "packed_rowwise"}
    units = describe(model, example)
    assert mw.make_plan(mw.ParallelConfig(), units, mw.RunShape(2, 2, 8)).mesh.dp_shard == 2
    with pytest.raises(mw.PlanError) as raised:
        mw.make_plan(mw.ParallelConfig(tp=2), units, mw.RunShape(2, 2, 8))
    assert "tp=2, but LlamaForCausalLM._tp_plan: model.layers.*.mlp.down_proj" in str(raised.value)
    assert "no style for 'packed_rowwise'" in str(raised.value)


def test_a_published_split_of_no_block_is_refused_with_tp() -> None:
    model, example = on_meta(hf_llama)
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    model.tp_plan = model._tp_plan
    units = describe(model, example)
    with pytest.raises(mw.PlanError, match="splits lm_head and no block"):
        mw.make_plan(mw.ParallelConfig(tp=2), units, mw.RunShape(2, 2, 8))
    given = describe(model, example, styles={"lm_head": "own_gathered"})
    head = sum(p.numel() for p in model.lm_head.parameters())
    assert given.tp_share == head / sum(p.numel() for p in model.parameters())


class Grouped(nn.Module):
    """Two experts with half of the tokens each, in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        result: Tensor = nn.functional.grouped_mm(x, self.weight, offs=ends)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_have_the_shape_and_the_operations_that_a_cpu_has(dtype: torch.dtype) -> None:
    """torch's own shape function refuses float32."""
    model, x = Grouped(), torch.ones(4, 8)
    expected = model.to(dtype)(x.to(dtype))
    found = run_on_fakes(model, (x.to(dtype),))
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    recorded, _ = run_on_fakes(model, (x.to(dtype),), around=lambda call: record_call(call, ()))
    assert [op.flops.fixed for op in recorded.operations if op.kind == "matmul"] == [2 * 4 * 8 * 8]


class Counting(nn.Linear):
    """Writes buffers in place and anew, keeps a tensor and a buffer that a forward makes, and reads a tensor
    that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.cached: Any = None
        self.plain = torch.ones(8)
        self.register_buffer("load", torch.zeros(8), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.load.add_(1)
        self.mean = 0.9 * self.mean + x.mean(0)
        self.table = torch.ones(8)
        self.cached = self.table + 1
        self.register_buffer("new", self.table)
        return super().forward(self.norm(x)) * self.plain


def test_buffers_that_the_forward_writes_are_refused_on_several_ranks_unless_the_model_names_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Counting())
    units = describe(model, (torch.zeros(2, 8),), blocks=nn.Linear)
    norm = ("running_mean", "running_var", "num_batches_tracked")
    assert set(units.written) == {"2.load", "2.mean", *(f"2.norm.{name}" for name in norm)}
    assert mw.make_plan(mw.ParallelConfig(), units, mw.RunShape(1, 1, 8)).mesh.world_size == 1
    with pytest.raises(mw.PlanError, match=r"the forward writes .*2\.mean"):
        mw.make_plan(mw.ParallelConfig(), units, mw.RunShape(2, 2, 8))
    plan = mw.make_plan(mw.ParallelConfig(), describe(model, blocks=nn.Linear), mw.RunShape(2, 2, 8))
    with pytest.raises(mw.PlanError, match=r"the forward writes .*2\.mean"):
        mw.check(model, plan, (torch.zeros(2, 8),))
    model.written_buffers = ("2.*",)
    assert describe(model, (torch.zeros(2, 8),), blocks=nn.Linear).written == ()


def test_describe_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Counting())
    before, plain = dict(model.named_buffers()), model[1].plain
    describe(model, (torch.zeros(2, 8),), blocks=nn.Linear)
    assert model[1].cached is None
    assert model[1].plain is plain
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {
        name: id(buffer) for name, buffer in before.items()
    }
    assert not any(buffer.any() for name, buffer in before.items() if "running_var" not in name)


class Looking(nn.Sequential):
    """Its forward looks at values, and reads a weight outside of its module."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(super().forward(x)) * self.scale
        return x @ self[2].weight if bool(x.sum() > 100) else x @ self[2].weight.t()


def test_a_forward_that_looks_at_values_is_observed_in_a_run_with_them() -> None:
    model, example = Looking(), (torch.zeros(2, 8),)
    before = torch.random.get_rng_state()
    units = describe(model, example, blocks="[01]")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert units.units == [("0",), ("1",), ("",)]
    assert units.written == ()
    for wrong, message in (
        ((torch.zeros(2, 7),), "does not run on the example's shapes"),
        (example[0], "tuple"),
    ):
        with pytest.raises(mw.PlanError, match=message):
            describe(model, wrong, blocks="[01]")
