"""Floating-point operations of a Llama, by formula, without building the model.

Symbols: L layers, D dim, S sequence length.
"""

from meshwright.models.llama import LlamaConfig
from meshwright.models.size import count_parameters


def matmul_parameters(config: LlamaConfig) -> int:
    """Return the number of parameters in matrix products: all but norms and the embedding table. A tied
    output head counts."""
    counts = count_parameters(config)
    norms = 2 * config.dim
    return counts.n_blocks * (counts.block - norms) + config.vocab_size * config.dim


def forward_flops(config: LlamaConfig, seq_len: int) -> tuple[float, float]:
    """Return the operations of a forward per token: 2 N of products with weights, where N is
    `matmul_parameters`, and 2 L D S of attention, half of the full square: scores above the diagonal are
    masked. With a backward of twice as many they are those of PaLM, appendix B: 6 N + 12 L D S in full."""
    return 2.0 * matmul_parameters(config), 2.0 * config.n_layers * config.dim * seq_len
