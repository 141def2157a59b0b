"""A model to try: how it is built, a batch of it, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, ROWS = 96, 12, 4
Batch = dict[str, Any]
HF_SIZES = {  # of a tiny model of transformers
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """A model to try.

    Args:
        kind: its family
        special: what is unusual about it
        build: returns the model, with the values of its constructor
        batch: function of a seed; returns the keyword arguments of a forward, whose rows are the samples
        loss: function of outputs and batch; the mean over samples
        asked: arguments of `describe` beside the example
        compiled: whether blocks are compiled in the comparison too
        needs_values: whether the forward looks at values, so that it must be built with them
        way_out: does what the refusal of the model advises; None if it is to be taken as it is
    """

    kind: str
    special: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor]
    asked: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    needs_values: bool = False
    way_out: "Callable[[Case], Case] | None" = None


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a forward's result: a tensor, an object with `logits`, or a tuple's first."""
    if isinstance(outputs, Tensor):
        return outputs
    logits: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    return logits


def first_of(batch: Any) -> Tensor:
    """Return the first input of a batch."""
    first: Tensor = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return first


def next_token(outputs: Any, batch: Any) -> Tensor:
    """The loss of a language model: each token is predicted from those before it."""
    logits, ids = logits_of(outputs)[:, :-1], first_of(batch)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def each_token(outputs: Any, batch: Any) -> Tensor:
    """The loss of an encoder: each token is predicted from all."""
    return nn.functional.cross_entropy(logits_of(outputs).flatten(0, 1), first_of(batch).flatten())


def target_tokens(outputs: Any, batch: Any) -> Tensor:
    """The loss of an encoder-decoder: the tokens of its second input."""
    ids = list(batch.values())[1] if isinstance(batch, Mapping) else batch[1]
    return nn.functional.cross_entropy(logits_of(outputs)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def sign_class(outputs: Any, batch: Any) -> Tensor:
    """The loss of a classifier of images or sounds: the class is the sign of the first number."""
    labels = (first_of(batch).flatten(1)[:, 0] > 0).long()
    return nn.functional.cross_entropy(logits_of(outputs), labels)


def squared_error(outputs: Any, batch: Any) -> Tensor:
    """The loss of a denoiser: the square of its distance from its first input."""
    return nn.functional.mse_loss(logits_of(outputs), first_of(batch))


def numbers(*shape: int, seed: int) -> Tensor:
    """Return normal random numbers of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(seed: int = 0, rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    """Return random ids[rows, tokens]."""
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def tokens_as(name: str) -> Callable[[int], Batch]:
    """Return a function of a seed that returns ids as the argument of this name."""
    return lambda seed: {name: ids(seed)}


def images_as(name: str, size: int = 16) -> Callable[[int], Batch]:
    """Return a function of a seed that returns images as the argument of this name."""
    return lambda seed: {name: numbers(ROWS, 3, size, size, seed=seed)}
