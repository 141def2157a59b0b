"""Which parameters are matrices that may be orthogonalised, and which are stored together, is decided by the
modules that have them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.kinds import ParameterKind, kinds_of
from tests.distributed.test_muon import Model


def of(model: nn.Module, blocks: list[str], per_head: bool = False) -> dict[str, str]:
    """Return the kind of each parameter, with the sizes of what a matrix consists of."""
    kinds = kinds_of(model, blocks, per_head)
    return {name: f"{k.kind} {[*k.parts] or ''}".strip() for name, k in kinds.items()}


class Fused(nn.Module):
    """Blocks of 4 heads, of which keys and values have 2, as a config says."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
        block = nn.ModuleDict(
            {
                "qkv_proj": nn.Linear(16, 32),
                "query_key_value": nn.Linear(16, 32),
                "q_proj": nn.Linear(16, 16, bias=False),
                "k_proj": nn.Linear(16, 8, bias=False),
                "gate_up_proj": nn.Linear(16, 40, bias=False),
                "conv": nn.Conv1d(3, 5, 2),
                "positions": nn.Embedding(9, 16),
                "attention": nn.MultiheadAttention(16, 4, bias=False),
            }
        )
        block.register_parameter("decay", nn.Parameter(torch.ones(4, 4)))
        self.layers = nn.ModuleList([block])


def test_matrices_are_weights_of_linears_in_blocks_and_stored_together_by_their_names() -> None:
    expected = {
        "decay": "other",
        "qkv_proj.weight": "matrix [16, 8, 8]",
        "qkv_proj.bias": "vector",
        "query_key_value.weight": "matrix [4, 4, 4, 4, 4, 4, 4, 4]",  # in turns: head by head
        "query_key_value.bias": "vector",
        "q_proj.weight": "matrix",
        "k_proj.weight": "matrix",
        "gate_up_proj.weight": "matrix [20, 20]",
        "conv.weight": "other",
        "conv.bias": "vector",
        "positions.weight": "embedding",
        "attention.in_proj_weight": "matrix [16, 16, 16]",
        "attention.out_proj.weight": "matrix",
    }
    assert of(Fused(), ["layers.0"]) == {f"layers.0.{name}": kind for name, kind in expected.items()}


def test_with_heads_each_of_queries_keys_and_values_is_a_matrix() -> None:
    found = of(Fused(), ["layers.0"], per_head=True)
    assert found["layers.0.qkv_proj.weight"] == "matrix [4, 4, 4, 4, 4, 4, 4, 4]"
    assert found["layers.0.q_proj.weight"] == "matrix [4, 4, 4, 4]"
    assert found["layers.0.k_proj.weight"] == "matrix [4, 4]"
    assert found["layers.0.gate_up_proj.weight"] == "matrix [20, 20]"


def test_routers_experts_embeddings_and_heads_are_told_apart_from_matrices() -> None:
    found = of(Model(), ["blocks.0", "blocks.1", "blocks.2"])
    assert {name: kind for name, kind in found.items() if ".1." not in name and ".2." not in name} == {
        "embed.weight": "embedding",
        "blocks.0.norm.weight": "vector",
        "blocks.0.norm.bias": "vector",
        "blocks.0.c_attn.weight": "matrix [10, 10, 10]",
        "blocks.0.c_attn.bias": "vector",
        "blocks.0.router.weight": "router",
        "blocks.0.experts.gate_up_proj": "matrix [14, 14]",
        "blocks.0.experts.down_proj": "matrix",
        "head.weight": "head",
        "head.bias": "vector",
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_an_embedding(tied: bool) -> None:
    shape = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=97)
    found = of(
        Llama(shape if not tied else LlamaConfig(**vars(shape) | {"tie_embeddings": True})), ["layers.0"]
    )
    assert found.get("head.output.weight") == (None if tied else "head")
    assert found["tok_embeddings.weight"] == "embedding"
    assert found["layers.0.feed_forward.w1.weight"] == "matrix"


def test_matrices_are_regions_of_their_parameter() -> None:
    turned = ParameterKind("matrix", (5, 6), dim=1, parts=(4, 2))
    assert turned.matrices == [((0, 0), (5, 4)), ((0, 4), (5, 2))]
    experts = ParameterKind("matrix", (2, 6, 3), dim=1, parts=(3, 3))
    assert experts.matrices == [((e, start, 0), (1, 3, 3)) for e in range(2) for start in (0, 3)]
    assert ParameterKind("head", (5, 6)).matrices == []


def block_of(config: dict[str, object], **modules: nn.Module) -> nn.Module:
    """A model of one block, whose config is that of the block."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict(modules)])
    model.layers[0].config = SimpleNamespace(**config)
    return model


class Stacked(nn.Module):
    """Experts of 6 inputs x outputs, that do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 6, 16))
        self.down_proj = nn.Parameter(torch.ones(3, 8, 6))


def test_the_nearest_config_says_how_many_heads_and_experts_there_are_and_which_side_is_the_width() -> None:
    fused = {"query_key_value": nn.Linear(12, 18, bias=False)}
    falcon = {"num_attention_heads": 4, "num_kv_heads": 4, "multi_query": True}
    grouped = {"num_attention_heads": 4, "num_kv_heads": 1, "new_decoder_architecture": True} | {
        "multi_query": True
    }
    for config in (falcon, grouped):
        assert [*of(block_of(config, **fused), ["layers.0"]).values()] == ["matrix [3, 3, 3, 3, 3, 3]"]
    codegen = block_of(
        {"num_attention_heads": 2, "model_type": "codegen"}, qkv_proj=nn.Linear(8, 24, bias=False)
    )
    assert [*of(codegen, ["layers.0"]).values()] == ["matrix"]
    experts = kinds_of(block_of({"hidden_size": 6}, experts=Stacked()), ["layers.0"])
    assert {name.rpartition(".")[2]: (k.dim, k.parts) for name, k in experts.items()} == {
        "gate_up_proj": (2, (8, 8)),
        "down_proj": (2, ()),
    }
    router = nn.ModuleDict({"layer": nn.Linear(8, 5, bias=False)})
    assert [*of(block_of({"num_local_experts": 5}, router=router), ["layers.0"]).values()] == ["router"]


def test_a_block_of_which_every_rank_keeps_all_parameters_is_a_block() -> None:
    units = describe(Model(), (torch.arange(4),), unsharded=["blocks.1.*"])
    assert set(units.blocks) == {"blocks.0", "blocks.1", "blocks.2"}


def test_a_linear_that_is_a_block_itself_is_a_head() -> None:
    heads = nn.ModuleList(nn.Linear(4, 9, bias=False) for _ in range(2))
    assert set(of(heads, ["0", "1"]).values()) == {"head"}
