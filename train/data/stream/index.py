"""The index of a streamed source: its shards and their groups, which are what is read at once: a row group of
a parquet file, a block of a file of JSON lines, several small files, or one file that cannot be read from its
middle. All ranks read it together, once per shard, and later starts take it from the cache."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.parallel.mesh import gather_from_all
from meshwright.train.data.prepare.arrow_reader import SET_FIELD, check_field, import_pyarrow, read_errors
from meshwright.train.data.sources import file_kind
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import is_local
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError
from meshwright.train.files import write_atomically

FORMAT = 1
# of a parquet file, which has its row groups: a third request is needed if they take more
TAIL_BYTES = 256 * 2**10
_SEEKABLE = 0x8F92EAB1  # the last bytes of zstd's seekable format
THREADS = 16  # of each rank: requests wait for the network
# A block of a file of JSON lines is a 1024th of the source within these limits.
_BLOCKS, _LEAST_BLOCK, _MOST_BLOCK = 1024, 64 * 2**10, 4 * 2**20


@dataclass(frozen=True)
class StreamShard:
    """A file of a streamed source.

    Args:
        name: as it is shown: a path, or a URL without what may be secret
        kind: as in `Part`
        version: what tells that the file has changed, such as an ETag; "": nothing does
        content: hash of the content, as far as it is known without reading all of it
        footer: where the footer of a parquet file begins, else the size
        parts: of each row group with rows, or frame of a file in zstd's seekable format: its number, where
            its text begins and ends in the file; and of a frame, where that begins in the whole text
    """

    name: str
    kind: str
    size_bytes: int
    version: str
    content: str
    footer: int
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StreamGroup:
    """`shards` consecutive shards from `shard` on; of a single one the range first .. last - 1 in units of
    its kind (`Part`), and the bytes begin .. end - 1 to read."""

    shard: int
    shards: int
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class StreamIndex:
    """All shards of a source, and its groups[n, 6], with the fields of a `StreamGroup`."""

    shards: tuple[StreamShard, ...]
    groups: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each group in its file."""
        sizes: NDArray[np.int64] = self.groups[:, 5] - self.groups[:, 4]
        return sizes

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' contents and of the groups: where the files are does not count."""
        contents = json.dumps([(shard.size_bytes, shard.content) for shard in self.shards])
        return hashlib.sha256(contents.encode() + self.groups.tobytes()).hexdigest()

    def group(self, number: int) -> StreamGroup:
        return StreamGroup(*self.groups[number].tolist())


def read_index(
    source: str, shards: Mapping[str, str], field: str, remote: Remote, cache: Path, ranks: RankInfo
) -> StreamIndex:
    """Return the index of a source whose `shards` have these names and locations; `field`: of the text.
    Collective: every rank must call it. Raises the same DataError on every rank."""
    path = on_all_ranks(lambda: cache / "stream" / f"index-{_key(shards, field)[:16]}.json")
    kept = _kept(path)
    hashes = gather_from_all(hashlib.sha256(msgspec.json.encode(kept)).hexdigest() if kept else "")
    if len({*hashes}) > 1 or not kept:
        if len({*hashes} - {""}) == 1:
            given, holder = [kept], next(rank for rank, known in enumerate(hashes) if known)
            dist.broadcast_object_list(given, src=holder, device=torch.device("cpu"))
            kept = given[0]
        else:  # none, or those of nodes differ
            kept = _describe_together(shards, field, remote, ranks)
        if ranks.local_rank == 0:
            content = msgspec.json.encode(kept)
            with contextlib.suppress(OSError):  # the next start reads the shards again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content)
    groups = cut_groups(kept or ())
    if not len(groups):
        raise DataError(f"data.source={source} contains no text: {len(shards):,} files without rows or bytes")
    # the groups have what row groups are: a million of them as tuples would take a gigabyte on each rank
    return StreamIndex(tuple(replace(s, parts=()) if s.kind == "parquet" else s for s in kept or ()), groups)


def cut_groups(shards: Sequence[StreamShard]) -> NDArray[np.int64]:
    """Return the groups of shards, as in `StreamIndex`."""
    total = sum(shard.size_bytes for shard in shards if shard.kind != "parquet")
    block = min(_MOST_BLOCK, max(_LEAST_BLOCK, total // _BLOCKS))
    groups = list[tuple[int, ...]]()
    open_ = False  # whether a small file may join the last group
    for number, shard in enumerate(shards):
        size, joins = shard.size_bytes, False
        if shard.kind == "parquet":
            groups += [(number, 1, row, row + 1, begin, end) for row, begin, end in shard.parts]
        elif shard.parts:
            groups += [(number, 1, *frames) for frames in _join_frames(shard.parts, block)]
        elif shard.kind == "jsonl":
            count = max(1, round(size / block))
            edges = [size * i // count for i in range(count + 1)]
            groups += [(number, 1, a, b, a, b) for a, b in itertools.pairwise(edges)]
        elif joins := open_ and groups[-1][5] + size <= block:
            first, joined, *_, end = groups[-1]
            groups[-1] = (first, joined + 1, 0, end + size, 0, end + size)
        elif joins := size > 0:
            groups.append((number, 1, 0, size, 0, size))
        open_ = joins
    return np.array(groups, np.int64).reshape(-1, 6)


def _join_frames(frames: Sequence[tuple[int, ...]], block: int) -> list[tuple[int, int, int, int]]:
    """First frame, one after the last, and bytes, of consecutive frames of about `block` bytes together."""
    joined = list[tuple[int, int, int, int]]()
    for number, begin, end, _ in frames:
        if joined and end - joined[-1][2] <= block:
            joined[-1] = (joined[-1][0], number + 1, joined[-1][2], end)
        else:
            joined.append((number, number + 1, begin, end))
    return joined


def _key(shards: Mapping[str, str], field: str) -> str:
    """A hash of the shards' names, and of size and time of those on this machine: looking at them is cheap,
    and a change makes a new index. Raises DataError."""
    stamps = []
    for name, where in shards.items():
        if is_local(where):
            with read_errors(where):
                stat = os.stat(where)
            stamps.append((name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps([FORMAT, field, *shards, stamps]).encode()).hexdigest()


def _kept(path: Path) -> tuple[StreamShard, ...] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[StreamShard, ...])
    except (OSError, msgspec.MsgspecError):
        return None


def _describe_together(
    shards: Mapping[str, str], field: str, remote: Remote, ranks: RankInfo
) -> tuple[StreamShard, ...]:
    """Describe every shard, each on one rank."""
    names = list(shards)
    mine = names[ranks.rank :: ranks.world_size]

    def describe() -> list[StreamShard]:
        with ThreadPoolExecutor(THREADS) as pool:
            tasks = [pool.submit(describe_shard, name, shards[name], field, remote) for name in mine]
            try:
                return [task.result() for task in tasks]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    described = {
        shard.name: shard for of_rank in gather_from_all(on_all_ranks(describe)) for shard in of_rank
    }
    return tuple(described[name] for name in names)


def describe_shard(name: str, location: str, field: str, remote: Remote) -> StreamShard:
    """Return what the index has of a shard, by at most two requests unless its footer is very long."""
    kind = file_kind(Path(name))
    size, version = remote.stat(name, location)
    if kind == "parquet":
        return _describe_parquet(name, location, field, remote, size, version)
    tail_bytes = min(size, TAIL_BYTES) if kind == "jsonl.zst" else 0
    frames = read_frames(remote.read(name, location, size - tail_bytes, size), size)
    return StreamShard(name, kind, size, version, version, size, frames)


def read_frames(tail: bytes, size: int) -> tuple[tuple[int, ...], ...]:
    """Return number, begin and end of each frame, and the begin of its text, of a file of `size` bytes in
    zstd's seekable format, whose end is `tail`: none of other files, or if the table of frames is longer than
    the tail.

    Source: contrib/seekable_format/zstd_seekable_compression_format.md of zstd.
    """
    count, flags, magic = struct.unpack("<IBI", tail[-9:].rjust(9, b"\0"))
    table = count * (12 if flags & 0x80 else 8)  # with checksums
    begin = len(tail) - 9 - table
    if magic != _SEEKABLE or not count or begin < 8:
        return ()
    sizes = np.frombuffer(tail[begin:-9], "<u4").reshape(count, -1)[:, :2].astype(np.int64)
    ends, text_ends = np.cumsum(sizes, axis=0).T
    if ends[-1] != size - 8 - table - 9:
        return ()
    begins, text_begins = ends - sizes[:, 0], text_ends - sizes[:, 1]
    columns = begins.tolist(), ends.tolist(), text_begins.tolist()
    return tuple(zip(range(count), *columns, strict=True))


def _describe_parquet(
    name: str, location: str, field: str, remote: Remote, size: int, version: str
) -> StreamShard:
    pyarrow = import_pyarrow(name)
    tail = remote.read(name, location, max(0, size - TAIL_BYTES), size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or length > size:
        raise DataError(
            f"data.source: {name} is not a parquet file, or cut short: restore it or leave it out"
        )
    if length > len(tail):
        tail = remote.read(name, location, size - length, size - len(tail)) + tail
    footer = tail[-length:]
    with read_errors(name):
        metadata = pyarrow.parquet.read_metadata(io.BytesIO(footer))
        check_field(field, metadata.schema.to_arrow_schema().names, name)
        rows = [
            _text_range(name, metadata.row_group(number), number, field)
            for number in range(metadata.num_row_groups)
        ]
    content = hashlib.sha256(footer).hexdigest()
    used = tuple(part for part in rows if part[2] > part[1])
    return StreamShard(name, "parquet", size, version, content, size - length, used)


def _text_range(name: str, group: Any, number: int, field: str) -> tuple[int, int, int]:
    """The number of a row group, and where its text begins and ends in the file; the same place without
    rows."""
    if not group.num_rows:
        return number, 0, 0
    columns = {column.path_in_schema: column for column in map(group.column, range(group.num_columns))}
    if (column := columns.get(field)) is None:  # a nested one has names as text.list.element
        raise DataError(f"data.source: {name}: the field {field} is nested, not text: {SET_FIELD}")
    begin = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    return number, begin, begin + column.total_compressed_size
