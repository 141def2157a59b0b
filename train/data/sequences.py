"""Sequences of a model's length, read from tokens on disk. Shapes: B sequences, T tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.loss import IGNORE_INDEX
from train.data.config import DataConfig, DataError
from train.data.documents import part_documents, read_document
from train.data.split import Split
from train.data.tokenizer import TokenizerInfo
from train.step import Batch


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


def make_sequence_shape(config: DataConfig, tokenizer: TokenizerInfo, seq_len: int, vocab_size: int) -> SequenceShape:
    """What `data.packing` and `data.document_mask` ask for."""
    start_id = tokenizer.eos if tokenizer.bos is None else None
    return SequenceShape(seq_len, config.packing, config.document_mask, start_id, vocab_size)


def count_sequences(split: Split, shape: SequenceShape, what: str) -> int:
    """How many sequences a split has; DataError if none. Packed, each has T inputs and shares its last target with the next."""
    count = (split.tokens - 1) // shape.seq_len if shape.packing else split.documents
    if count < 1:
        raise DataError(f"data.source has {split.tokens} {what} tokens, fewer than one sequence of "
                        f"train.seq_len={shape.seq_len} + 1: use more text or a shorter sequence")  # fmt: skip
    return count


def read_batch(splits: list[Split], rows: NDArray[np.int64], shape: SequenceShape, pinned: bool = False) -> Batch:
    """The sequences rows[B] = (split, index) on the host, copied once, from the mapped file into the batch. An index of -1 is
    padding, which counts for nothing. Raises DataError for an id that the model does not have."""
    size = (len(rows), shape.seq_len)
    tokens, targets = (torch.empty(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    first = torch.zeros(size, dtype=torch.int64, pin_memory=pinned) if shape.document_mask else None
    ids = np.empty(shape.seq_len + 1, np.int64)
    for b, (source, index) in enumerate(rows.tolist()):
        split = splits[source]
        if shape.packing:
            begin = max(index, 0) * shape.seq_len
            split.read(begin, ids)
            known = len(ids)
        else:
            begin, known = read_document(split, max(index, 0), shape.start_id, ids)
        _check_ids(ids[:known], split, begin, shape.vocab_size)
        tokens[b], targets[b] = torch.from_numpy(ids[:-1]), torch.from_numpy(ids[1:])
        targets[b, known - 1 :] = IGNORE_INDEX
        if first is not None:
            part_documents(split, begin, targets[b].numpy(), first[b].numpy())
        if index < 0:
            targets[b] = IGNORE_INDEX
    return Batch(tokens, targets, first)


def _check_ids(ids: NDArray[np.int64], split: Split, begin: int, vocab_size: int) -> None:
    if ids.max() < vocab_size:
        return
    bad = int((ids >= vocab_size).argmax())
    raise DataError(f"token id {ids[bad]} is beyond model.vocab_size={vocab_size}: {split.place(begin + bad)}. "
                    "Prepare the data again, with this model's tokenizer")  # fmt: skip
