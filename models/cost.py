"""Floating-point operations of a Llama, by formula, without building the model.

Symbols: L layers, D dim, S sequence length.
"""

from typing import Literal

from meshwright.models.llama import LlamaConfig
from meshwright.models.size import count_parameters


def matmul_parameters(config: LlamaConfig) -> int:
    """Return the number of parameters in matrix products: all but norms and the embedding table. A tied
    output head counts."""
    counts = count_parameters(config)
    norms = 2 * config.dim
    return counts.n_blocks * (counts.block - norms) + config.vocab_size * config.dim


def flops_per_token(config: LlamaConfig, seq_len: int, attention: Literal["full", "causal"]) -> float:
    """Return forward and backward operations per token without recompute: 6 N + 12 L D S (PaLM, appendix B).

    N is `matmul_parameters`. "causal" counts half of attention's 12 L D S, because scores above the diagonal
    are masked. Both counts are in use: state which one a utilization is based on.
    """
    full = 12.0 * config.n_layers * config.dim * seq_len
    return 6.0 * matmul_parameters(config) + (full if attention == "full" else full / 2)
