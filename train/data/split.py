"""Tokenised documents, memory-mapped: a stream of tokens, and where in it each document lies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shard:
    """A shard, memory-mapped: ids[tokens], ends[documents]."""

    path: Path
    ids: NDArray[Any]
    ends: NDArray[np.uint64]


class Split:
    """The shards of one split, one after another, as one stream of tokens and one list of documents."""

    def __init__(self, shards: list[Shard], text_bytes: int) -> None:
        self._shards, self.text_bytes = shards, text_bytes
        self._tokens = np.cumsum([0, *(len(shard.ids) for shard in shards)])  # where each shard begins
        self._documents = np.cumsum([0, *(len(shard.ends) for shard in shards)])

    @property
    def tokens(self) -> int:
        return int(self._tokens[-1])

    @property
    def documents(self) -> int:
        return int(self._documents[-1])

    def read(self, first: int, out: NDArray[np.int64]) -> None:
        """Copy the tokens from `first` on into `out`, widened on the way."""
        done = 0
        while done < len(out):
            shard, offset = self._find(first + done)
            part = self._shards[shard].ids[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def document(self, index: int) -> tuple[int, int]:
        """First token of a document, and the one after its last."""
        shard = int(np.searchsorted(self._documents, index, side="right")) - 1
        ends, within = self._shards[shard].ends, index - int(self._documents[shard])
        begin = int(self._tokens[shard])
        return begin + (int(ends[within - 1]) if within else 0), begin + int(ends[within])

    def ends_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Where documents end (one after their last token), of those that end after `first` and at or before `last`."""
        found = []
        shard = self._find(first)[0]
        while shard < len(self._shards) and self._tokens[shard] < last:
            begin, ends = int(self._tokens[shard]), self._shards[shard].ends
            low, high = (int(np.searchsorted(ends, max(0, at - begin), side="right")) for at in (first, last))
            found.append(ends[low:high].astype(np.int64) + begin)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def place(self, token: int) -> str:
        """Where a token lies, for people: file and byte offset."""
        shard, offset = self._find(token)
        ids = self._shards[shard].ids
        return f"{self._shards[shard].path}, byte {offset * ids.itemsize:,} (token {offset:,})"

    def _find(self, token: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._tokens, token, side="right")) - 1
        return shard, token - int(self._tokens[shard])
