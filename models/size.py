"""Parameter counts of a Llama, by formula, without building the model."""

from dataclasses import dataclass

from meshwright.models.llama import LlamaConfig, block_linears


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
    linears = sum(outputs * inputs for outputs, inputs in block_linears(config).values())
    vocabulary = config.vocab_size * config.dim
    return ParameterCount(
        embedding=vocabulary,
        block=linears + 2 * config.dim,
        n_blocks=config.n_layers,
        head=config.dim + (0 if config.tie_embeddings else vocabulary),
    )
