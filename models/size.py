"""Parameter counts of a Llama, by formula, without building the model."""

from dataclasses import dataclass

from meshwright.models.llama import LlamaConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `head` is the final norm and, unless tied, the output projection."""

    embedding: int
    block: int
    n_blocks: int
    head: int

    @property
    def total(self) -> int:
        """The number of parameters of the model."""
        return self.embedding + self.n_blocks * self.block + self.head


def count_parameters(config: LlamaConfig) -> ParameterCount:
    """Return the parameters by part of the model; a tied weight counts once, as the embedding."""
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
