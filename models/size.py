"""How many parameters a Llama has, by formula. No tensors are made."""

from dataclasses import dataclass

from meshwright.models.llama import LlamaConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `head` is the final norm and, when it has a weight of its own, the output
    projection."""

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
