"""Tokenized text on disk: a folder of shards and a manifest.

    manifest.json        tokenizer, dtype, sources with fingerprints, every shard with counts and checksums
    tokenizer.json       unless the tokenizer is bytes
    train-00000.bin      token ids, little-endian uint16 or uint32: document after document, [BOS] ids EOS
    train-00000.ends     little-endian uint64: where each document of the shard ends, in tokens
    held_out-00000.bin   token ids of the held-out documents

A folder with a manifest is complete, because it gets its name by one rename at the end. The checksums of its
shards are compared once, and again after a file changes.
"""

import errno
import functools
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Count, Natural, structure, wrong_keys
from meshwright.train.data.tokenizer import TokenizerInfo
from meshwright.train.errors import DataError
from meshwright.train.files import open_files_limit, read_json

# Files that stay mapped after they were read. Each takes an open file and a memory map; Linux allows a
# process 65,530 maps.
MOST_MAPPED = 4096


@dataclass(eq=False)
class MappedFile:
    """An array in a file, memory-mapped when it is read.

    `known_ns`: until this time the file is known to be what was prepared; if it has changed later, `sha256`
    shows whether its content has. `last`: the last number, if that is known.
    """

    path: Path
    dtype: np.dtype[Any]
    length: int
    sha256: str
    known_ns: int
    last: int | None = None

    def __len__(self) -> int:
        return self.length

    def numbers(self) -> NDArray[Any]:
        """Return numbers[length]. Raises DataError if the file cannot be opened or has changed."""
        return _maps()(self)


class Numbers(Protocol):
    """An array in a file or in memory; `path`: what a message names."""

    @property
    def path(self) -> Path | str: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __len__(self) -> int: ...
    def numbers(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class TokenShard:
    """A shard: ids[tokens], and ends[documents], the end of each document in tokens."""

    ids: Numbers
    ends: Numbers


class TokenStream:
    """The shards of one split, concatenated to one stream of tokens and one list of documents."""

    def __init__(self, shards: list[TokenShard], text_bytes: int) -> None:
        self._shards, self.text_bytes = shards, text_bytes
        self._tokens = np.cumsum([0, *(len(shard.ids) for shard in shards)])  # where each shard begins
        self._documents = np.cumsum([0, *(len(shard.ends) for shard in shards)])

    @property
    def tokens(self) -> int:
        """The number of tokens, BOS and EOS included."""
        return int(self._tokens[-1])

    @property
    def documents(self) -> int:
        return int(self._documents[-1])

    def read(self, first: int, out: NDArray[np.int64]) -> None:
        """Copy the tokens from `first` on into `out`, converted to int64."""
        done = 0
        while done < len(out):
            shard, offset = self._find(first + done)
            part = self._shards[shard].ids.numbers()[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def document(self, index: int) -> tuple[int, int]:
        """Return the positions of a document's first token and of the token after its last."""
        shard = int(np.searchsorted(self._documents, index, side="right")) - 1
        ends, within = self._shards[shard].ends.numbers(), index - int(self._documents[shard])
        begin = int(self._tokens[shard])
        return begin + (int(ends[within - 1]) if within else 0), begin + int(ends[within])

    def ends_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the ends of documents (the token after) that are after `first` and at most `last`."""
        parts = []
        shard = self._find(first)[0]
        while shard < len(self._shards) and self._tokens[shard] < last:
            begin, ends = int(self._tokens[shard]), self._shards[shard].ends.numbers()
            # uint64 like the ends: for a Python int numpy would copy all of them as float64.
            bounds = np.array([max(0, first - begin), last - begin], np.uint64)
            low, high = np.searchsorted(ends, bounds, side="right").tolist()
            parts.append(ends[low:high].astype(np.int64) + begin)
            shard += 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def place(self, token: int) -> str:
        """Return file and byte offset of a token, as text for a message."""
        shard, offset = self._find(token)
        ids = self._shards[shard].ids
        return f"{ids.path}, byte {offset * ids.dtype.itemsize:,} (token {offset:,})"

    def _find(self, token: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._tokens, token, side="right")) - 1
        return shard, token - int(self._tokens[shard])


@functools.cache
def _maps() -> Callable[[MappedFile], NDArray[Any]]:
    """`_map` with a cache of the latest results: for all data of this process at most a quarter of the files
    that it may open."""
    return functools.lru_cache(maxsize=min(open_files_limit() // 4, MOST_MAPPED))(_map)


def _map(file: MappedFile) -> NDArray[Any]:
    try:
        with open(file.path, "rb") as opened:
            _check_unchanged(file, opened)
            numbers = np.memmap(opened, file.dtype, "r")
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise DataError(
                f"{file.path} cannot be opened ({error.strerror}): this process may have "
                f"{open_files_limit()} files open, and all are in use: raise the limit (ulimit -n)"
            ) from None
        if error.errno in (errno.ENOENT, errno.EACCES):
            raise DataError(
                f"{file.path} cannot be opened ({error.strerror}), but a run reads its data until its end: "
                "restore the file and start the run again"
            ) from None
        raise  # a fault of the disk or of the network, not a mistake of the user
    if file.last is not None and numbers[-1] != file.last:
        raise DataError(
            f"{file.path}: the last document ends at token {numbers[-1]} of {file.last}: prepare the data "
            "again"
        )
    return numbers


def _check_unchanged(file: MappedFile, opened: BufferedReader) -> None:
    """DataError if the file has changed since the run started: its tokens would be of other documents."""
    status = os.fstat(opened.fileno())
    same_size = status.st_size == file.length * file.dtype.itemsize
    if same_size and status.st_ctime_ns <= file.known_ns:
        return
    # Some users touch their files so that a cluster does not delete them: a new time stamp with the same hash
    # is no error.
    if not same_size or hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
        raise DataError(f"{file.path} has changed since the run started: start the run again")
    file.known_ns = status.st_ctime_ns


FORMAT = 1  # incremented when the layout of the files changes
MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**28  # more than a million source files with names of 150 letters
SPLITS = ("train", "held_out")
ShardName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,100}\Z")]  # cannot leave the folder
IdDtype = Annotated[str, msgspec.Meta(pattern=r"^(uint16|uint32)\Z")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class ShardInfo:
    """A shard in the manifest. `name`: of its files, without .bin and .ends; `tokens`: BOS and EOS included;
    `text_bytes`: of its documents in UTF-8; `max_id`: the largest token id; `sha256`: of the .bin file."""

    name: ShardName
    tokens: Count
    documents: Count
    text_bytes: Count
    max_id: Natural
    sha256: Sha256
    ends_sha256: Sha256


@dataclass(frozen=True)
class SourceFile:
    """A tokenized file: its name within the source, its size, and a hash of size, beginning and end."""

    name: str
    size_bytes: Natural
    fingerprint: str


NAMED_BAD = 100  # bad records of a folder that are named


@dataclass(frozen=True)
class BadRecords:
    """Records without usable text, which are left out: their number, and place and reason of the first."""

    count: Natural = 0
    first: tuple[str, ...] = ()

    def __add__(self, other: "BadRecords") -> "BadRecords":
        return BadRecords(self.count + other.count, (*self.first, *other.first)[:NAMED_BAD])

    def check(self, most: int) -> "BadRecords":
        """Return it. DataError if there are more than `most`, which is data.skip_bad."""
        if self.count <= most:
            return self
        others = f", and {self.count - 1:,} more, above data.skip_bad={most}" if self.count > 1 else ""
        raise DataError(
            f"data.source: {self.first[0]}{others}: fix the file, leave it out, or leave out up to N such "
            "records with data.skip_bad=N (--skip_bad=N of tools.prepare_data)"
        )


@dataclass(frozen=True)
class TokenStoreManifest:
    """A prepared folder's manifest: tokenizer, dtype of ids, source files, shards of each split, settings."""

    tokenizer: TokenizerInfo
    dtype: IdDtype
    sources: tuple[SourceFile, ...]
    splits: dict[str, tuple[ShardInfo, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bad_records(self) -> BadRecords:
        """The records that were left out; the settings name them only if there are any. Raises ValueError."""
        return structure(BadRecords, self.settings.get("bad_records", vars(BadRecords())), "bad_records")


def read_manifest(folder: Path) -> TokenStoreManifest:
    """Read and check the manifest of a folder. Raises DataError."""
    path = folder / MANIFEST
    try:
        plain = read_json(path, MANIFEST_BYTES)
        if repr(plain.get("format")) != repr(FORMAT):
            raise ValueError(f"format {plain.get('format')!r}, this version reads {FORMAT}")
        manifest = structure(TokenStoreManifest, plain, MANIFEST)
        if mistakes := _find_contradictions(manifest):
            raise ValueError("; ".join(mistakes))
        return manifest
    except (OSError, ValueError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 400)
        raise DataError(f"{path} cannot be read ({reason}): prepare the data again") from None


def _find_contradictions(manifest: TokenStoreManifest) -> list[str]:
    """Contradictions between values that are each valid, as messages."""
    mistakes = wrong_keys(manifest.splits, SPLITS, "splits")
    names = Counter(shard.name for shards in manifest.splits.values() for shard in shards)
    mistakes += [f"the shard {name} is listed twice" for name, count in names.items() if count > 1]
    if min(manifest.bad_records.count, NAMED_BAD) != len(manifest.bad_records.first):
        mistakes.append("bad_records does not name the records that it counts")
    bos, eos, size = manifest.tokenizer.bos, manifest.tokenizer.eos, manifest.tokenizer.vocab_size
    if not max(eos, bos or 0) < size:
        mistakes.append(f"the tokenizer's bos {bos} and eos {eos} are not below its vocab_size {size}")
    return mistakes


def manifest_to_json(manifest: TokenStoreManifest) -> str:
    return json.dumps(asdict(manifest), indent=1) + "\n"


def open_split(folder: Path, manifest: TokenStoreManifest, *splits: str) -> TokenStream:
    """Open splits as one stream. Touches no file: each is opened when it is first read."""
    infos = [info for split in splits for info in manifest.splits[split]]
    dtype, now_ns = np.dtype(manifest.dtype).newbyteorder("<"), time.time_ns()
    shards = [
        TokenShard(
            MappedFile(folder / f"{info.name}.bin", dtype, info.tokens, info.sha256, now_ns),
            MappedFile(
                folder / f"{info.name}.ends",
                np.dtype("<u8"),
                info.documents,
                info.ends_sha256,
                now_ns,
                info.tokens,
            ),
        )
        for info in infos
    ]
    return TokenStream(shards, sum(info.text_bytes for info in infos))


def file_sizes(manifest: TokenStoreManifest) -> dict[str, int]:
    """Return the size in bytes of every file of the shards."""
    id_bytes, infos = np.dtype(manifest.dtype).itemsize, [*chain.from_iterable(manifest.splits.values())]
    ids = {f"{info.name}.bin": info.tokens * id_bytes for info in infos}
    return ids | {f"{info.name}.ends": info.documents * 8 for info in infos}


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Source:
    """A training source: `name` is the last part of its path, or the full path if another source has
    the same last part; `weight` its relative share of the sequences."""

    name: str
    weight: float
    split: TokenStream
