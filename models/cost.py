"""What a Llama costs: parameters and floating-point operations, by formula. No tensors are made.

Symbols: L layers, D dim, S sequence length, F ffn dim, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from models.llama import LlamaConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `head` is the final norm and, when it has a weight of its own, the output projection."""

    embedding: int
    block: int
    n_blocks: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.n_blocks * self.block + self.head


def count_parameters(config: LlamaConfig) -> ParameterCount:
    """Parameters by part of the model; a tied weight is counted once, as the embedding."""
    kv_dim = config.n_kv_heads * config.head_dim
    attention = 2 * config.dim * config.dim + 2 * config.dim * kv_dim
    feed_forward = 3 * config.dim * config.ffn_dim
    vocabulary = config.vocab_size * config.dim
    return ParameterCount(
        embedding=vocabulary,
        block=attention + feed_forward + 2 * config.dim,
        n_blocks=config.n_layers,
        head=config.dim + (0 if config.tie_embeddings else vocabulary),
    )


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


def saved_values_per_token(config: LlamaConfig) -> int:
    """Values a compiled block keeps per token for its backward, its input included: 7 D + 2 K H + 3 F.

    Input, two normed inputs, q, attention's output and its projection's sum (7 D with the rotated q), k and v, and
    the three of SwiGLU. torch's partitioner, asked for an 8B block of 8,192 tokens in bf16, keeps 1,089 MiB
    besides the 64 MiB input; this formula gives 1,152 for both.
    """
    return 7 * config.dim + 2 * config.n_kv_heads * config.head_dim + 3 * config.ffn_dim
