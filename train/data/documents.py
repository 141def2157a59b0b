"""Packed documents that do not see one another."""

import numpy as np
from numpy.typing import NDArray

from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.data.config import DataError
from meshwright.train.data.split import Split


def part_documents(
    split: Split, begin: int, end: int, targets: NDArray[np.int64], first: NDArray[np.int64]
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
