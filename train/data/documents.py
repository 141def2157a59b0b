"""Documents within a sequence: one alone, or several packed that do not see one another."""

import numpy as np
from numpy.typing import NDArray

from models.loss import IGNORE_INDEX
from train.data.split import Split


def read_document(split: Split, index: int, start_id: int | None, ids: NDArray[np.int64]) -> tuple[int, int]:
    """One document at the front of ids[T + 1], clipped, what follows it filled with its last id. Returns where it begins in
    the split, and how many ids are real."""
    begin, end = split.document(index)
    skipped = 0 if start_id is None else 1
    ids[:skipped] = start_id or 0
    known = min(end - begin + skipped, len(ids))
    split.read(begin, ids[skipped:known])
    ids[known:] = ids[known - 1]
    return begin, known


def part_documents(split: Split, begin: int, targets: NDArray[np.int64], first: NDArray[np.int64]) -> None:
    """Write where each token's document begins in the sequence, into first[T], and let no target cross two documents."""
    ends = split.ends_between(begin, begin + len(first)) - begin
    targets[ends - 1] = IGNORE_INDEX
    starts = ends[ends < len(first)]
    first[starts] = starts
    np.maximum.accumulate(first, out=first)
