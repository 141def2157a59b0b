"""What a group of a streamed source needs of a file, as a part of a local file that the readers of prepared
data read; and whole sources, for evaluation."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from meshwright.train.data.prepare.arrow_reader import read_errors, unpack
from meshwright.train.data.prepare.partition import Part, detect_kind
from meshwright.train.data.sources import TEXT
from meshwright.train.data.stream.index import StreamGroup, StreamShard
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import is_local
from meshwright.train.errors import DataError

_PIECE_BYTES = 8 * 2**20  # in memory at once
_LINE_BYTES = 2**16  # read at once behind a block, whose last line may end there


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context that converts an OSError into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to {folder} ({error.strerror}): free space, lower data.cache_gib, or use another "
            "data.cache_dir; the same command goes on"
        ) from None


def fetch_part(remote: Remote, shard: StreamShard, location: str, group: StreamGroup, stem: Path) -> Part:
    """Return what a group has of a shard, as a part of the shard's own file if it is on this machine, else of
    one that is written at `stem` and a suffix. Raises DataError and OSError."""
    in_frames = bool(shard.parts) and shard.kind != "parquet"
    path, whole = Path(location), is_local(location) and not in_frames
    if not whole:
        suffix = "jsonl" if in_frames else "txt" if shard.kind == TEXT else shard.kind
        path = stem.with_name(f"{stem.name}.{suffix}")
        with open(path, "wb") as file:
            (_write_frames if in_frames else _write_ranges)(file, remote, shard, location, group)
    remote.check(shard.name, location, shard.size_bytes, shard.version)
    with read_errors(shard.name):
        stat, kind = os.stat(path), detect_kind(path)
    first, last = 0, max(stat.st_size, shard.size_bytes)
    if in_frames:
        first, last = shard.parts[group.first][3], stat.st_size
    elif shard.kind in ("parquet", "jsonl"):
        first, last = group.first, group.last
    sizes = last - first, stat.st_size, stat.st_mtime_ns
    return Part(shard.name, str(path), kind, first, last, *sizes, shard.content, whole=whole)


def _write_ranges(
    file: BinaryIO, remote: Remote, shard: StreamShard, location: str, group: StreamGroup
) -> None:
    """Write what a group needs at its place in the file, which has holes."""
    if shard.kind == "parquet":
        ranges = [(group.begin, group.end), (shard.footer, shard.size_bytes)]
    elif shard.kind == "jsonl":  # with the byte before, which may end a line
        ranges = [(max(0, group.begin - 1), group.end)]
    else:
        ranges = [(0, shard.size_bytes)]
    last = b""
    for first, end in ranges:
        for begin in range(first, end, _PIECE_BYTES):
            last = remote.read(shard.name, location, begin, min(end, begin + _PIECE_BYTES))
            os.pwrite(file.fileno(), last, begin)
    at, last = group.end, last[-1:]
    while shard.kind == "jsonl" and b"\n" not in last and at < shard.size_bytes:  # the rest of the last line
        last = remote.read(shard.name, location, at, min(shard.size_bytes, at + _LINE_BYTES))
        os.pwrite(file.fileno(), last, at)
        at += len(last)


def _write_frames(
    file: BinaryIO, remote: Remote, shard: StreamShard, location: str, group: StreamGroup
) -> None:
    """Write the text of a group of zstd frames at its place in the whole text, and behind it the rest up to
    the first line end. A line that begins with the group, or before it, is of the group before."""
    file.seek(shard.parts[group.first][3])
    for number, begin, end, _ in shard.parts[group.first :]:
        packed = io.BytesIO(remote.read(shard.name, location, begin, end))
        with read_errors(shard.name):
            text = unpack(packed, shard.kind, Path(shard.name)).read()
        if number < group.last:
            file.write(text)
            continue
        line, line_end, _ = text.partition(b"\n")
        file.write(line + line_end)
        if line_end:
            return


def fetch_all(shards: Mapping[str, str], cache: Path, remote: Remote, most_bytes: int) -> Path:
    """Return a folder in the cache with all files of a source, fetched unless they are there. Raises
    DataError, also for more than `most_bytes`."""
    key = hashlib.sha256(json.dumps([*shards]).encode()).hexdigest()[:16]
    folder = cache / f"fetched-{key}"
    if folder.is_dir():
        return folder
    left = most_bytes
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with writing(cache), tempfile.TemporaryDirectory(dir=cache, prefix=f".{folder.name}-") as partial:
        for number, (name, location) in enumerate(shards.items()):
            size, version = remote.stat(name, location)
            left -= size
            if left < 0:
                raise DataError(
                    f"{name} and the files before it have more than {most_bytes / 2**30:.1f} GiB, which is "
                    "too much for evaluation: name fewer files"
                )
            with open(Path(partial, f"{number:06d}-{name.rpartition('/')[2][-100:]}"), "wb") as file:
                for begin in range(0, size, _PIECE_BYTES):
                    file.write(remote.read(name, location, begin, min(size, begin + _PIECE_BYTES)))
            remote.check(name, location, size, version)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder
