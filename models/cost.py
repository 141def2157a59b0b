"""What a Llama costs: floating-point operations, by formula. No tensors are made.

Symbols: L layers, D dim, S sequence length.
"""

from typing import Literal

from meshwright.models.llama import LlamaConfig
from meshwright.models.size import count_parameters


def matmul_parameters(config: LlamaConfig) -> int:
    """Parameters that multiply every token: all but norms and the embedding look-up; a tied head still
    multiplies."""
    counts = count_parameters(config)
    norms = 2 * config.dim
    return counts.n_blocks * (counts.block - norms) + config.vocab_size * config.dim


def flops_per_token(config: LlamaConfig, seq_len: int, attention: Literal["full", "causal"]) -> float:
    """Forward and backward operations per token, recomputation not counted: 6 N + 12 L D S (PaLM, appendix
    B).

    N is `matmul_parameters`. "causal" counts half of attention's 12 L D S: the half above the diagonal is not
    needed. Both are in use; name the one that a utilisation was computed with.
    """
    full = 12.0 * config.n_layers * config.dim * seq_len
    return 6.0 * matmul_parameters(config) + (full if attention == "full" else full / 2)
