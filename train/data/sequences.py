"""Sequences of a model's length, read from tokens on disk, and the mask that keeps packed documents apart.
Shapes: B sequences, T tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.config import DataConfig
from meshwright.train.data.batch import Batch
from meshwright.train.data.token_store import TokenStream
from meshwright.train.data.tokenizer import TokenizerInfo
from meshwright.train.errors import DataError


def part_documents(
    split: TokenStream, begin: int, end: int, targets: NDArray[np.int64], first: NDArray[np.int64]
) -> None:
    """Of the sequence that is tokens begin .. end - 1 of a split, write where each token's document begins in
    the sequence, into first[T], and let no target of targets[T] cross two documents. DataError where
    documents are not one after another."""
    last = min(begin + len(first), end)
    ends = split.ends_between(begin, last) - begin
    if (np.diff(ends, prepend=0, append=last - begin + 1) <= 0).any():
        raise DataError(
            f"{split.place(begin)}: documents around it do not end one after another: prepare the data again"
        )
    targets[ends - 1] = IGNORE_INDEX
    starts = ends[ends < len(first)]
    first[starts] = starts
    np.maximum.accumulate(first, out=first)


@dataclass(frozen=True)
class SequenceShape:
    """How documents become sequences.

    Args:
        seq_len: T, tokens of a sequence
        packing: False gives every document a sequence of its own
        document_mask: with packing, documents of a sequence do not see one another
        start_id: what an unpacked document without a BOS of its own begins after
        vocab_size: of the model: every id must be smaller
    """

    seq_len: int
    packing: bool
    document_mask: bool
    start_id: int | None
    vocab_size: int


def make_sequence_shape(
    config: DataConfig, tokenizer: TokenizerInfo, seq_len: int, vocab_size: int
) -> SequenceShape:
    """What `data.packing` and `data.document_mask` ask for."""
    start_id = tokenizer.eos if tokenizer.bos is None else None
    return SequenceShape(seq_len, config.packing, config.document_mask, start_id, vocab_size)


def count_sequences(split: TokenStream, shape: SequenceShape) -> int:
    """How many whole sequences a split has. Packed, each has T inputs and shares its last target with the
    next."""
    return max(0, split.tokens - 1) // shape.seq_len if shape.packing else split.documents


def read_batch(
    splits: list[TokenStream], rows: NDArray[np.int64], shape: SequenceShape, pinned: bool = False
) -> Batch:
    """The sequences rows[B] = (split, index) on the host, copied from the mapped file straight into the
    batch. An index of -1 is padding, which counts for nothing; so does what follows the last token. Raises
    DataError for an id that the model does not have."""
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
                    f"{split.place(0)}: document {index:,} does not end after it begins: prepare the data "
                    "again"
                )
        _read_row(split, begin, end, shape, inputs, outputs)
        if first is not None:
            part_documents(split, begin, end, outputs, first[b].numpy())
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
    """Tokens begin .. end - 1 as inputs[T], after a start id if there is one, and one position on as
    outputs[T]: clipped, or filled up with the last token and targets that count for nothing."""
    start = 0 if shape.packing or shape.start_id is None else 1
    inputs[:start] = shape.start_id or 0
    known, wanted = min(end - begin + start, len(inputs)), min(end - begin + start - 1, len(outputs))
    split.read(begin, inputs[start:known])
    split.read(begin + 1 - start, outputs[:wanted])
    _check_ids(inputs[start:known], split, begin, shape.vocab_size)
    _check_ids(outputs[:wanted], split, begin + 1 - start, shape.vocab_size)
    inputs[known:] = inputs[known - 1]
    outputs[wanted:] = IGNORE_INDEX


def _check_ids(ids: NDArray[np.int64], split: TokenStream, begin: int, vocab_size: int) -> None:
    if ids.max(initial=0) < vocab_size:
        return
    bad = int((ids >= vocab_size).argmax())
    raise DataError(
        f"token id {ids[bad]} is beyond model.vocab_size={vocab_size}: {split.place(begin + bad)}. "
        "Prepare the data again, with this model's tokenizer"
    )
