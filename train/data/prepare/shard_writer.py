"""Writes shards under temporary names, flushes and renames them: no partial shard has a final name."""

import contextlib
import hashlib
import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.token_store import ShardInfo
from meshwright.train.files import write_atomically

_RUN_TOKENS = 2**20


class ShardWriter:
    """Writes one shard of one split. A shard without tokens has no files; `abandon` deletes the temporary
    file of an unfinished one."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype.newbyteorder("<")
        self._temporary = folder / f".{name}.bin.{os.getpid()}-{threading.get_native_id()}.tmp"
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._ends = array("Q")
        self._tokens = self._text_bytes = self._max_id = 0

    def add(self, ids: list[NDArray[Any]], lengths: list[int], text_bytes: int) -> None:
        """Add documents: their ids as consecutive arrays, the number of tokens of each document, and the size
        of their text. Raises OSError."""
        if self._file is None:
            self._file = open(self._temporary, "wb")  # noqa: SIM115
        for run in _runs(ids):
            self._max_id = max(self._max_id, int(run.max()))
            content = run.astype(self._dtype).data
            self._file.write(content)
            self._hash.update(content)
        for length in lengths:
            self._tokens += length
            self._ends.append(self._tokens)
        self._text_bytes += text_bytes

    def finish(self) -> ShardInfo | None:
        """Flush the files and rename them; None for a shard without tokens. Raises OSError."""
        if self._file is None:
            return None
        ends = np.array(self._ends, "<u8").tobytes()
        write_atomically(self._folder / f"{self._name}.ends", ends)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._folder / f"{self._name}.bin")
        ends_sha256 = hashlib.sha256(ends).hexdigest()
        counts = (self._tokens, len(self._ends), self._text_bytes, self._max_id)
        return ShardInfo(self._name, *counts, self._hash.hexdigest(), ends_sha256)

    def abandon(self) -> None:
        """Delete the temporary file of an unfinished shard."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may have no space for the rest of the buffer
                self._file.close()
            self._temporary.unlink(missing_ok=True)


def _runs(arrays: list[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Regroup tokens into arrays of about _RUN_TOKENS: short ones are joined for speed, long ones cut."""
    joined: list[NDArray[Any]] = []
    size = 0
    for ids in arrays:
        for first in range(0, len(ids), _RUN_TOKENS):
            joined.append(ids[first : first + _RUN_TOKENS])
            size += len(joined[-1])
            if size >= _RUN_TOKENS:
                yield np.concatenate(joined)
                joined, size = [], 0
    if joined:
        yield np.concatenate(joined)
