"""Training sequences that a function of yours returns (`data.factory`).

    def batches(first: int, count: int, seq_len: int) -> Tensor:

It returns the sequences at positions first .. first + count - 1 of an endless order, the same whoever asks:
int64 tokens[count, seq_len + 1], or tokens[count, seq_len] with targets[count, seq_len], in which -100
(IGNORE_INDEX) does not count in the loss. Which positions a rank asks for is what makes ranks, micro batches,
meshes and a resume read what they ought to, so the function knows nothing of them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.models.loss import IGNORE_INDEX
from meshwright.parallel.mesh import gather_from_all
from meshwright.train.data.sequences import Batch, PositionOrder, SequenceShape
from meshwright.train.errors import DataError
from meshwright.train.user_code import find

CHECKED = 4  # sequences


class GivenOrder(PositionOrder):
    """The order of sequences that a function of yours states; in place of a SampleOrder."""

    def __init__(self, name: str, seed: int) -> None:
        self._batches: Callable[[int, int, int], Any] = find("data.factory", name)
        self.name, self.sizes, self.seed = name, list[int](), seed

    def describe(self, positions: NDArray[np.int64]) -> str:
        """Name the sequences at consecutive positions."""
        return f"{positions[0]} to {positions[-1]} of {self.name}"

    def read(self, first: int, count: int, shape: SequenceShape, pinned: bool = False) -> Batch:
        """Return sequences as `sequences.read_batch` does. Raises DataError if the function returns something
        else."""
        given, seq_len = self._batches(first, count, shape.seq_len), shape.seq_len
        parts = given if isinstance(given, tuple) else (given,)
        found = [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x) for x in parts]
        wanted = [[(torch.int64, (count, seq_len + 1))], [(torch.int64, (count, seq_len))] * 2]
        if found not in wanted:
            raise DataError(
                f"data.factory={self.name} must return a tensor int64 [{count}, {seq_len + 1}], or two "
                f"of [{count}, {seq_len}], for positions {first} to {first + count - 1}, not "
                f"{' and '.join(map(_describe, parts))}"
            )
        tokens, targets = parts if len(parts) == 2 else (given[:, :-1], given[:, 1:])
        bad = ~_are_ids(tokens, shape) | ~(_are_ids(targets, shape) | (targets == IGNORE_INDEX))
        if bad.any():
            row = int(bad.any(1).nonzero()[0, 0])
            raise DataError(
                f"data.factory={self.name}: the sequence at position {first + row} has a token id that "
                f"is not from 0 to model.vocab_size - 1 = {shape.vocab_size - 1}"
            )
        batch = Batch(tokens.contiguous(), targets.contiguous())
        return Batch(*(part.pin_memory() for part in batch.tensors().values())) if pinned else batch

    def progress(self, position: int, sums: Sequence[int] = ()) -> dict[str, float]:
        return {"sequences": float(position)}

    def check(self, first: int, shape: SequenceShape) -> None:
        """Check that the function keeps its promise at the positions from `first` on; every rank calls it.
        Raises DataError."""
        whole = self._hash(first, CHECKED, shape)
        promises = {
            "again": self._hash(first, CHECKED, shape),
            "one by one": sum((self._hash(first + i, 1, shape) for i in range(CHECKED)), ()),
        }
        promises |= {f"on rank {rank}": of_rank for rank, of_rank in enumerate(gather_from_all(whole))}
        for how, sequences in promises.items():
            if sequences != whole:
                raise DataError(
                    f"data.factory={self.name} returned other sequences for positions {first} to "
                    f"{first + CHECKED - 1} when asked {how}: they must depend on the position alone, or "
                    "ranks, meshes and a resume would not train what they ought to"
                )

    def _hash(self, first: int, count: int, shape: SequenceShape) -> tuple[int, ...]:
        batch = self.read(first, count, shape)
        pairs = zip(batch.tokens, batch.targets, strict=True)
        return tuple(zlib.crc32(torch.cat(pair).numpy().data) for pair in pairs)


def _describe(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    return f"a {type(given).__module__}.{type(given).__name__}"


def _are_ids(ids: Tensor, shape: SequenceShape) -> Tensor:
    return (ids >= 0) & (ids < shape.vocab_size)
