"""Tokenised documents on disk: a stream of tokens, and where in it each document lies."""

import errno
import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.config import DataError
from meshwright.train.open_files import open_files_limit

# Files that stay mapped after they were read: each is an open file, and a map, of which Linux gives a process
# 65,530.
MOST_MAPPED = 4096


class _TooManyOpenFiles(Exception):
    """This process has as many files open as it may."""


@dataclass(eq=False)
class MappedFile:
    """Numbers in a file, mapped into memory when they are read. `modified_ns`: the file's time stamp; where
    that is another one, `sha256` says whether it is still the same file."""

    path: Path
    dtype: np.dtype[Any]
    length: int
    sha256: str
    modified_ns: int

    def __len__(self) -> int:
        return self.length

    def numbers(self) -> NDArray[Any]:
        """numbers[length]. Raises DataError if the file cannot be opened, or is not the one that it was."""
        try:
            return _maps()(self)
        # others of this process have taken what was free: close all of these, and begin again
        except _TooManyOpenFiles:
            _maps.cache_clear()
        try:
            return _maps()(self)
        except _TooManyOpenFiles as error:
            raise DataError(
                f"{self.path} cannot be opened ({error}): this process may have {open_files_limit()} "
                f"files open "
                "(ulimit -n), and all are taken: allow it more"
            ) from None


@dataclass(frozen=True)
class Shard:
    """A shard: ids[tokens], and ends[documents], where each document ends in it."""

    ids: MappedFile
    ends: MappedFile


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
            part = self._shards[shard].ids.numbers()[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def document(self, index: int) -> tuple[int, int]:
        """First token of a document, and the one after its last."""
        shard = int(np.searchsorted(self._documents, index, side="right")) - 1
        ends, within = self._shards[shard].ends.numbers(), index - int(self._documents[shard])
        begin = int(self._tokens[shard])
        return begin + (int(ends[within - 1]) if within else 0), begin + int(ends[within])

    def ends_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Where documents end (one after their last token), of those that end after `first` and at or before
        `last`."""
        found = []
        shard = self._find(first)[0]
        while shard < len(self._shards) and self._tokens[shard] < last:
            begin, ends = int(self._tokens[shard]), self._shards[shard].ends.numbers()
            # As uint64, which the ends are: for a Python int numpy would copy all of them as float64.
            bounds = np.array([max(0, first - begin), last - begin], np.uint64)
            low, high = np.searchsorted(ends, bounds, side="right").tolist()
            found.append(ends[low:high].astype(np.int64) + begin)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def place(self, token: int) -> str:
        """Where a token lies, for people: file and byte offset."""
        shard, offset = self._find(token)
        ids = self._shards[shard].ids
        return f"{ids.path}, byte {offset * ids.dtype.itemsize:,} (token {offset:,})"

    def _find(self, token: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._tokens, token, side="right")) - 1
        return shard, token - int(self._tokens[shard])


@functools.cache
def _maps() -> Callable[[MappedFile], NDArray[Any]]:
    """`_map`, of which the latest are kept: for all data of this process at most a quarter of the files that
    it may open."""
    return functools.lru_cache(maxsize=min(open_files_limit() // 4, MOST_MAPPED))(_map)


def _map(file: MappedFile) -> NDArray[Any]:
    try:
        with open(file.path, "rb") as opened:
            _check_unchanged(file, opened)
            return np.memmap(opened, file.dtype, "r")
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise _TooManyOpenFiles(error.strerror) from None
        if error.errno in (errno.ENOENT, errno.EACCES):
            raise DataError(
                f"{file.path} cannot be opened ({error.strerror}): a run reads its data until its end"
            ) from None
        raise  # a fault of the disk or of the network: no mistake of the user


def _check_unchanged(file: MappedFile, opened: BufferedReader) -> None:
    """DataError where the file is another one than at the start of the run: its tokens would be of other
    documents."""
    status = os.fstat(opened.fileno())
    same_size = status.st_size == file.length * file.dtype.itemsize
    if same_size and status.st_mtime_ns == file.modified_ns:
        return
    # Some touch their files, lest a cluster deletes them.
    if not same_size or hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
        raise DataError(f"{file.path} has been changed since the run began: start the run again")
    file.modified_ns = status.st_mtime_ns
