"""What a Llama costs: floating-point operations and activations, by formula. No tensors are made.

Symbols: L layers, D dim, S sequence length, F ffn dim, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.llama import LlamaConfig
from models.size import WHOLE, count_parameters


def matmul_parameters(config: LlamaConfig) -> int:
    """Parameters that multiply every token: all but norms and the embedding look-up; a tied head still multiplies."""
    counts = count_parameters(config)
    norms = 2 * config.dim
    return counts.n_blocks * (counts.block - norms) + config.vocab_size * config.dim


def flops_per_token(config: LlamaConfig, seq_len: int, attention: Literal["full", "causal"]) -> float:
    """Forward and backward operations per token, recomputation not counted: 6 N + 12 L D S (PaLM, appendix B).

    N is `matmul_parameters`. "causal" counts half of attention's 12 L D S: the half above the diagonal is not
    needed. Both are in use; name the one that a utilisation was computed with.
    """
    full = 12.0 * config.n_layers * config.dim * seq_len
    return 6.0 * matmul_parameters(config) + (full if attention == "full" else full / 2)


@dataclass(frozen=True)
class BlockActivations:
    """Values of one token that a block keeps for its backward: `everything` that a compiled block does, `products` of
    matrices and attention with the input, or the `input` alone."""

    everything: int
    products: int
    input: int


def block_activations(config: LlamaConfig, split: Mapping[str, int] = WHOLE, sequence: int = 1) -> BlockActivations:
    """Values per token and rank: 7 D + 2 K H + 3 F for everything, where nothing is split.

    Input and the sum after attention; both normed inputs; q, rotated q and attention's output; k and v; the three of
    SwiGLU. torch's partitioner, asked for an 8B block of 8,192 tokens in bf16, keeps 1,089 MiB besides the 64 MiB
    input; this formula gives 1,152 for both. `split`: as in `count_parameters`. `sequence`: shares of the tokens that
    the residual stream is cut into.
    """
    stream = config.dim // sequence
    kv = 2 * config.n_kv_heads * config.head_dim
    attention, feed_forward = split.get("attention", 1), split.get("feed_forward", 1)
    return BlockActivations(
        everything=2 * stream + 2 * config.dim + (3 * config.dim + kv) // attention + 3 * config.ffn_dim // feed_forward,
        products=3 * stream + (2 * config.dim + kv) // attention + 2 * config.ffn_dim // feed_forward,
        input=stream,
    )
