"""How many parameters a Llama has, by formula. No tensors are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.models.llama import LlamaConfig

WHOLE: Mapping[str, int] = MappingProxyType({})  # no part of the model is split


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


def count_parameters(config: LlamaConfig, split: Mapping[str, int] = WHOLE) -> ParameterCount:
    """Parameters by part of the model; a tied weight is counted once, as the embedding.

    `split`: of a part in `models.llama.SHARDING`, into how many shares tensor parallelism splits its
    matrices; the count is then one rank's.
    """
    kv_dim = config.n_kv_heads * config.head_dim
    attention = (2 * config.dim * config.dim + 2 * config.dim * kv_dim) // split.get("attention", 1)
    feed_forward = 3 * config.dim * config.ffn_dim // split.get("feed_forward", 1)
    vocabulary = config.vocab_size * config.dim
    return ParameterCount(
        embedding=vocabulary // split.get("embedding", 1),
        block=attention + feed_forward + 2 * config.dim,
        n_blocks=config.n_layers,
        head=config.dim + (0 if config.tie_embeddings else vocabulary // split.get("head", 1)),
    )
