"""Reads sequences from token shards into batches, and masks packed documents. Shapes: B sequences of a micro
batch, T tokens of a sequence, t those of a rank (T without context parallelism)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.models.loss import IGNORE_INDEX
from meshwright.parallel.sharded_model import token_positions
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import DataConfig
from meshwright.train.data.token_store import TokenStream
from meshwright.train.data.tokenizer import TokenizerInfo
from meshwright.train.errors import DataError


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank: int64 tokens[B, t] and targets[B, t], the tokens one position later.

    With a document mask also first[B, T]: the position in the sequence where each token's document begins.
    With context parallelism also positions[t]: those of the tokens in their sequences.
    """

    tokens: Tensor
    targets: Tensor
    first: Tensor | None = None
    positions: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class Mark:
    """Where the reading of data goes on, apart from its position: nothing but for streamed data.

    Args:
        places: of the lanes that this rank saves, by their names
        counts: numbers whose sums over the data-parallel ranks become metrics
    """

    places: Mapping[str, str] = field(default_factory=dict)
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is divided: rank `data_rank` of `data_parallel` reads `accumulation` micro batches
    of `micro_batch_size` sequences, and rank `context_rank` of `context_parallel` holds its tokens of them.

    `exchange`: of context parallelism (`ContextPlan`)."""

    micro_batch_size: int
    accumulation: int
    data_rank: int
    data_parallel: int
    context_rank: int = 0
    context_parallel: int = 1
    exchange: str = "heads"

    @property
    def global_batch_size(self) -> int:
        """Sequences of an optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation * self.data_parallel

    def positions(self, first_sample: int, strided: bool) -> NDArray[np.int64]:
        """Return this rank's positions of the step that begins at `first_sample`: consecutive ones, or if
        `strided` those that are its number modulo the data-parallel degree."""
        count = self.micro_batch_size * self.accumulation
        if strided:
            first = first_sample + (self.data_rank - first_sample) % self.data_parallel
            return first + self.data_parallel * np.arange(count)
        return first_sample + self.data_rank * count + np.arange(count)

    def local_tokens(self, batch: Batch) -> Batch:
        """Return this rank's tokens of a batch of whole sequences."""
        if self.context_parallel == 1:
            return batch
        seq_len = batch.tokens.shape[1]
        return at_positions(
            batch, token_positions(self.exchange, self.context_parallel, self.context_rank, seq_len)
        )


@dataclass(frozen=True)
class StepData:
    """The data of one rank for one optimizer step.

    Args:
        micro_batches: on the device
        data_hash: hash of this rank's tokens and their positions in the sample order; its sum over the
            data-parallel ranks is the same on every mesh; 0 on all but the first rank of a cp group
        wait_s: seconds that the step waited for the batches
        mark: where the reading of data goes on after the step
    """

    micro_batches: list[Batch]
    data_hash: int
    wait_s: float
    mark: Mark = Mark()


class StepReader(Protocol):
    """Reads this rank's sequences of one step after another."""

    def read(self, first_sample: int, pinned: bool) -> list[Batch]:
        """Return the micro batches of the step that begins at position `first_sample`, in host memory."""

    def mark(self) -> Mark:
        """Return where reading goes on after the last step that was read."""

    def close(self) -> None:
        """End what reads ahead."""


def at_positions(batch: Batch, positions: Tensor) -> Batch:
    """Return the tokens and targets at positions[t] of whole sequences, as they are needed by a rank that
    holds only these."""
    return Batch(batch.tokens[:, positions], batch.targets[:, positions], batch.first, positions)


def separate_documents(
    split: TokenStream, begin: int, end: int, targets: NDArray[np.int64], first: NDArray[np.int64]
) -> None:
    """Mask the documents of the sequence that is tokens begin .. end - 1 of a split.

    Writes into first[T] where each token's document begins in the sequence, and sets targets[T] to
    IGNORE_INDEX where the target belongs to the next document. DataError if document ends do not increase.
    """
    last = min(begin + len(first), end)
    ends = split.ends_between(begin, last) - begin
    if (np.diff(ends, prepend=0, append=last - begin + 1) <= 0).any():
        raise DataError(
            f"{split.place(begin)}: the document ends near it are not increasing: prepare the data again"
        )
    targets[ends - 1] = IGNORE_INDEX
    starts = ends[ends < len(first)]
    first[starts] = starts
    np.maximum.accumulate(first, out=first)


@dataclass(frozen=True)
class SequenceShape:
    """How documents become sequences of T = `seq_len` tokens. `packing`, `document_mask`: as in DataConfig;
    `start_id`: put in front of an unpacked document whose tokenizer has no BOS; `vocab_size`: of the model:
    every token id must be smaller."""

    seq_len: int
    packing: bool
    document_mask: bool
    start_id: int | None
    vocab_size: int


def make_sequence_shape(
    config: DataConfig, tokenizer: TokenizerInfo, seq_len: int, vocab_size: int
) -> SequenceShape:
    """Return the sequence shape that `data.packing` and `data.document_mask` set."""
    start_id = tokenizer.eos if tokenizer.bos is None else None
    return SequenceShape(seq_len, config.packing, config.document_mask, start_id, vocab_size)


class PositionOrder(ABC):
    """An order whose sequences are found by their positions alone."""

    strided, lanes = False, 0  # of streamed data

    @abstractmethod
    def read(self, first: int, count: int, shape: SequenceShape, pinned: bool = False) -> Batch:
        """Return the sequences at positions first .. first + count - 1, as `read_batch` does."""

    def reader(self, start: TrainPosition, batch: BatchShape, shape: SequenceShape) -> StepReader:
        """Return what reads a rank's steps from `start` on, which is no matter here."""
        return PositionReader(self, batch, shape)

    def waiting(self) -> str:
        """Return what source reading waits for, as one clause; "" for none."""
        return ""

    def fetched(self) -> int:
        """Return the bytes that this process has fetched from sources of URLs."""
        return 0


@dataclass(frozen=True)
class PositionReader:
    """Reads steps of an order whose sequences are found by their positions alone."""

    order: PositionOrder
    batch: BatchShape
    shape: SequenceShape

    def read(self, first_sample: int, pinned: bool) -> list[Batch]:
        size = self.batch.micro_batch_size
        positions = self.batch.positions(first_sample, self.order.strided)
        return [self.order.read(first, size, self.shape, pinned) for first in positions[::size].tolist()]

    def mark(self) -> Mark:
        return Mark()

    def close(self) -> None:
        pass


def count_sequences(split: TokenStream, shape: SequenceShape) -> int:
    """Return how many full sequences a split has.

    A packed sequence has T inputs; its last target is the first input of the next sequence.
    """
    return max(0, split.tokens - 1) // shape.seq_len if shape.packing else split.documents


def read_batch(
    splits: list[TokenStream], rows: NDArray[np.int64], shape: SequenceShape, pinned: bool = False
) -> Batch:
    """Read the sequences rows[B] = (split, index) from the mapped files into a batch in host memory.

    An index of -1 is a padding sequence. Targets of padding, and those after the last token, are
    IGNORE_INDEX. Raises DataError, e.g. for a token id that is not below the model's vocab_size.
    """
    size = (len(rows), shape.seq_len)
    tokens, targets = (torch.empty(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    first = torch.zeros(size, dtype=torch.int64, pin_memory=pinned) if shape.document_mask else None
    for b, (source, index) in enumerate(rows.tolist()):
        split, inputs, outputs = splits[source], tokens[b].numpy(), targets[b].numpy()
        if shape.packing:
            begin = max(index, 0) * shape.seq_len
            end = min(begin + shape.seq_len + 1, split.tokens)
        else:
            begin, end = split.document(max(index, 0))
            if not begin < end <= split.tokens:
                raise DataError(
                    f"{split.place(0)}: document {index:,} must end after token {begin:,} and at most at "
                    f"{split.tokens:,}, but ends at {end:,}: prepare the data again"
                )
        _read_row(split, begin, end, shape, inputs, outputs)
        if first is not None:
            separate_documents(split, begin, end, outputs, first[b].numpy())
        if index < 0:
            outputs[:] = IGNORE_INDEX
    return Batch(tokens, targets, first)


def _read_row(
    split: TokenStream,
    begin: int,
    end: int,
    shape: SequenceShape,
    inputs: NDArray[np.int64],
    outputs: NDArray[np.int64],
) -> None:
    """Read tokens begin .. end - 1 into inputs[T], after the start id if there is one, and the tokens one
    position later into outputs[T]. Longer sequences are cut. In shorter ones inputs are padded with the last
    token, outputs with IGNORE_INDEX."""
    start = 0 if shape.packing or shape.start_id is None else 1
    inputs[:start] = shape.start_id or 0
    n_inputs, n_outputs = min(end - begin + start, len(inputs)), min(end - begin + start - 1, len(outputs))
    split.read(begin, inputs[start:n_inputs])
    split.read(begin + 1 - start, outputs[:n_outputs])
    _check_ids(inputs[start:n_inputs], split, begin, shape.vocab_size)
    _check_ids(outputs[:n_outputs], split, begin + 1 - start, shape.vocab_size)
    inputs[n_inputs:] = inputs[n_inputs - 1]
    outputs[n_outputs:] = IGNORE_INDEX


def _check_ids(ids: NDArray[np.int64], split: TokenStream, begin: int, vocab_size: int) -> None:
    if ids.max(initial=0) < vocab_size:
        return
    bad = int((ids >= vocab_size).argmax())
    raise DataError(
        f"token id {ids[bad]} is not below model.vocab_size={vocab_size}: {split.place(begin + bad)}: "
        "prepare the data again with this model's tokenizer"
    )
