"""Packed documents that do not see one another."""

import numpy as np
from numpy.typing import NDArray

from models.loss import IGNORE_INDEX
from train.data.split import Split


def part_documents(split: Split, begin: int, end: int, targets: NDArray[np.int64], first: NDArray[np.int64]) -> None:
    """Of the sequence that is tokens begin .. end - 1 of a split, write where each token's document begins in the sequence, into
    first[T], and let no target of targets[T] cross two documents."""
    ends = split.ends_between(begin, min(begin + len(first), end)) - begin
    targets[ends - 1] = IGNORE_INDEX
    starts = ends[ends < len(first)]
    first[starts] = starts
    np.maximum.accumulate(first, out=first)
