"""How well the model predicts text it has not seen: each named set shared out over the data-parallel
ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.head import LinearCrossEntropySum
from meshwright.parallel.forward_only import without_backward
from meshwright.train.data.batch import Batch, to_device
from meshwright.train.data.loader import BatchShape
from meshwright.train.data.sequences import SequenceShape, read_batch
from meshwright.train.data.token_store import TokenStream
from meshwright.train.step import count_targets, summed


@dataclass(frozen=True)
class Score:
    """What an evaluation of one set found.

    Args:
        nats: summed loss
        tokens: that were predicted
        bytes_per_token: of the whole set: its text in UTF-8, by the tokens in it that are predicted
    """

    nats: float
    tokens: int
    bytes_per_token: float

    @property
    def loss(self) -> float:
        """Mean over the tokens, in nats."""
        return self.nats / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond, a float64 overflows

    @property
    def bits_per_byte(self) -> float:
        """The loss per byte of text, which models with different tokenizers can be compared by. Exact for a
        set that is evaluated whole, without clipped documents; else by the whole set's bytes per token."""
        return self.loss / math.log(2) / self.bytes_per_token


def score_sets(
    model: nn.Module,
    sets: Mapping[str, TokenStream],
    sequences: SequenceShape,
    shape: BatchShape,
    limit: int,
    device: torch.device,
    data_parallel: dist.ProcessGroup,
) -> dict[str, Score]:
    """The score of every set, the same on all ranks and, but for rounding, on every mesh. `limit`: sequences
    of each set, from its first on, at most; 0 is all."""
    scores = {}
    for name, split in sets.items():
        batches = set_batches(split, sequences, shape, limit, device)
        nats, tokens = evaluate(model, batches, data_parallel).tolist()
        scores[name] = Score(
            nats, int(tokens), max(1, split.text_bytes) / max(1, _predicted(split, sequences))
        )
    return scores


def set_batches(
    split: TokenStream, sequences: SequenceShape, shape: BatchShape, limit: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's share of a set's first sequences, in batches of one shape, as many on every rank; `limit` 0
    is all, the last filled up."""
    count = -(-(split.tokens - 1) // sequences.seq_len) if sequences.packing else split.documents
    count = min(limit, count) if limit else count
    per_round = shape.micro_batch_size * shape.data_parallel
    for first in range(0, count, per_round):
        index = first + shape.data_rank * shape.micro_batch_size + np.arange(shape.micro_batch_size)
        rows = np.stack((np.zeros_like(index), np.where(index < count, index, -1)), axis=1)
        yield to_device(read_batch([split], rows, sequences, device.type == "cuda"), device)


def _predicted(split: TokenStream, shape: SequenceShape) -> int:
    """How many tokens of a set are ever a target: not the first of all, nor of any document that is kept
    apart."""
    if shape.packing:
        return split.tokens - (split.documents if shape.document_mask else 1)
    return split.tokens - (split.documents if shape.start_id is None else 0)


def evaluate(model: nn.Module, batches: Iterable[Batch], data_parallel: dist.ProcessGroup) -> Tensor:
    """(loss, tokens) summed over all ranks' batches, float64 [2] on the device, the loss in nats. Weights and
    gradients stay.

    Autograd stays on though nothing is differentiated: without it the compiled blocks would need a second
    graph.
    """
    totals = None
    with without_backward(model), _not_learning(model):
        for batch in batches:
            loss = model(batch.tokens, batch.targets, batch.first).detach()
            add = torch.stack((loss, count_targets([batch]))).double()
            totals = add if totals is None else totals + add
    assert totals is not None, "a set has at least one batch on every rank"
    return summed(totals, data_parallel)


@contextmanager
def _not_learning(model: nn.Module) -> Iterator[None]:
    """Within it the loss of the model counts no z-loss and makes no gradients."""
    switches = [module.learning for module in model.modules() if isinstance(module, LinearCrossEntropySum)]
    for switch in switches:
        switch.zero_()
    try:
        yield
    finally:
        for switch in switches:
            switch.fill_(1.0)


def mean_loss(scores: Mapping[str, Score]) -> float:
    """Mean over the tokens of all sets, in nats."""
    return sum(score.nats for score in scores.values()) / max(
        1, sum(score.tokens for score in scores.values())
    )
