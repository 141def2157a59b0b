"""Floating-point operations of a Llama, compared with those that torch counts."""

import dataclasses
import os
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.train.config import Config
from meshwright.train.training import freeze, training_flops

SMALL = LlamaConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=97, max_seq_len=128)
LLAMA_8B = LlamaConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192
)


def build_on_meta(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


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
    products, scores = build_on_meta(config).forward_flops(seq_len)
    assert counts["aten.mm"] == batch * seq_len * 3 * products
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
