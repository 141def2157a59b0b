"""Cost formulas, compared with the model on the meta device and with published sizes."""

import dataclasses
import os
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.cost import forward_flops, matmul_parameters
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.size import count_parameters
from meshwright.train.config import Config
from meshwright.train.model.build import freeze, training_flops

SMALL = LlamaConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=97, max_seq_len=128)
LLAMA_8B = LlamaConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192
)
LLAMA_70B = dataclasses.replace(LLAMA_8B, dim=8192, n_layers=80, n_heads=64, ffn_dim=28672)
LLAMA_405B = dataclasses.replace(LLAMA_8B, dim=16384, n_layers=126, n_heads=128, ffn_dim=53248)


def build_on_meta(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


@pytest.mark.parametrize(
    ("config", "published"),
    [(LLAMA_8B, 8.03e9), (LLAMA_70B, 70.55e9), (LLAMA_405B, 405.85e9)],
    ids=["8b", "70b", "405b"],
)
def test_totals_are_the_published_ones(config: LlamaConfig, published: float) -> None:
    assert count_parameters(config).total == pytest.approx(published, abs=0.005e9)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "config", [SMALL, dataclasses.replace(SMALL, n_kv_heads=4), LLAMA_8B], ids=["gqa", "mha", "8b"]
)
def test_counts_are_those_of_the_built_model(config: LlamaConfig, tied: bool) -> None:
    config = dataclasses.replace(config, tie_embeddings=tied)
    model, counts = build_on_meta(config), count_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.embedding == model.tok_embeddings.weight.numel()
    assert counts.block == sum(p.numel() for p in model.layers[0].parameters())
    assert counts.n_blocks == len(model.layers)
    tied_numel = model.head.output.weight.numel() if tied else 0
    assert counts.head == sum(p.numel() for p in model.head.parameters()) - tied_numel


def counted_flops(
    config: LlamaConfig, batch: int, seq_len: int, frozen: tuple[str, ...] = ()
) -> dict[str, int]:
    """Return the operations of one forward and backward by kind, counted by torch; attention unmasked."""
    tokens = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    model = build_on_meta(config)
    freeze(model, frozen)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize(
    ("config", "batch", "seq_len"),
    [
        (dataclasses.replace(SMALL, n_kv_heads=1), 3, 40),
        (dataclasses.replace(SMALL, n_kv_heads=4, tie_embeddings=True), 3, 40),
        (dataclasses.replace(LLAMA_8B, n_layers=2), 1, 8192),
    ],
    ids=["untied", "tied", "8b"],
)
def test_flops_are_exactly_those_that_torch_counts(config: LlamaConfig, batch: int, seq_len: int) -> None:
    """Exact equality: norms, RoPE and the backward of the embedding are not matrix products."""
    counts = counted_flops(config, batch, seq_len)
    assert counts.keys() == {"aten.mm", "aten.bmm"}
    assert counts["aten.mm"] == batch * seq_len * 6 * matmul_parameters(config)
    products, scores = forward_flops(config, seq_len)
    assert sum(counts.values()) == batch * seq_len * (3 * products + 2 * 3 * scores)


@pytest.mark.parametrize("draw", range(6))
def test_the_backward_of_a_model_with_frozen_weights_is_the_one_that_torch_counts(draw: int) -> None:
    rng = random.Random(f"{os.environ['MESHWRIGHT_TESTS_SEED']} {draw}")
    parts = ["tok_embeddings.*", *(f"layers.{i}.*" for i in range(3)), "*.w1.*", "*.wk.*"]
    first = rng.sample(parts[:4], rng.randint(1, 3)) if draw % 2 else parts[: rng.randint(1, 4)]
    frozen = tuple({*first, *rng.sample(parts[4:], rng.randint(0, 1))})
    config = dataclasses.replace(SMALL, n_kv_heads=4, tie_embeddings=rng.random() < 0.3, max_seq_len=1024)
    job = dataclasses.replace(Config(model=config).job, seq_len=40, freeze=frozen)
    full, causal = training_flops(job)
    counts = counted_flops(config, 3, 40, frozen)
    assert 3 * 40 * full == pytest.approx(sum(counts.values())), f"{frozen} {config}"
    assert full - causal == pytest.approx(counts["aten.bmm"] / 2 / (3 * 40))
    assert training_flops(dataclasses.replace(job, document_mask=True))[0] == pytest.approx(2 * causal - full)
