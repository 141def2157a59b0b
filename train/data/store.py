"""Tokenised text on disk: a folder of shards, and a manifest that says what they hold.

    manifest.json        tokenizer, dtype, sources with fingerprints, and every shard with counts and checksums
    tokenizer.json       where the tokenizer has one
    train-00000.bin      token ids, little-endian uint16 or uint32: document after document, [BOS] ids EOS each
    train-00000.ends     little-endian uint64: where each document of the shard ends, in tokens
    held_out-00000.bin   the same of the documents kept for evaluation

A folder with a manifest is complete: whoever writes one gives it its name by one rename at the end.
"""  # noqa: E501

import json
import os
import re
import stat
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshwright.parallel.errors import one_line
from meshwright.train.data.config import DataError
from meshwright.train.data.split import MappedFile, Shard, Split
from meshwright.train.data.tokenizer import TokenizerInfo
from meshwright.train.read_json import read_json

FORMAT = 1  # raised when the files' layout changes
MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**28  # more than a million source files with names of 150 letters
SPLITS = ("train", "held_out")
DTYPES = ("uint16", "uint32")
T = TypeVar("T", TokenizerInfo, "ShardInfo", "SourceFile")


@dataclass(frozen=True)
class ShardInfo:
    """A shard as the manifest has it.

    Args:
        name: of its files, without .bin and .ends
        tokens: BOS and EOS included
        documents: how many
        text_bytes: of their text in UTF-8
        max_id: the largest token id
        sha256: of the .bin file
        ends_sha256: of the .ends file
    """

    name: str
    tokens: int
    documents: int
    text_bytes: int
    max_id: int
    sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class SourceFile:
    """A file that was tokenised: its name within the source, its size, and a hash of its beginning, end and
    size."""

    name: str
    size_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds."""

    tokenizer: TokenizerInfo
    dtype: str
    sources: tuple[SourceFile, ...]
    splits: dict[str, tuple[ShardInfo, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError."""
    path = folder / MANIFEST
    try:
        plain = read_json(path, MANIFEST_BYTES)
        if repr(plain["format"]) != repr(FORMAT):
            raise ValueError(f"format {plain['format']!r}, this version reads {FORMAT}")
        if plain["dtype"] not in DTYPES:
            raise ValueError(f"dtype {plain['dtype']!r} is not one of {', '.join(DTYPES)}")
        splits = {
            split: tuple(build(ShardInfo, shard) for shard in plain["splits"][split]) for split in SPLITS
        }
        if twice := [
            name for name, n in Counter(s.name for split in SPLITS for s in splits[split]).items() if n > 1
        ]:
            raise ValueError(f"the shard {twice[0]} stands twice")
        return Manifest(
            tokenizer=build(TokenizerInfo, plain["tokenizer"]),
            dtype=plain["dtype"],
            sources=tuple(build(SourceFile, source) for source in plain["sources"]),
            splits=splits,
            settings={**plain["settings"]},
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = one_line(f"{type(error).__name__}: {error}", 400)
        raise DataError(f"{path} cannot be read ({said}): prepare the data again") from None


def build(kind: type[T], plain: dict[str, Any]) -> T:
    """One of the dataclasses above. TypeError or ValueError for a value that cannot be: of another type, a
    count below 0, a name that leads out of the folder, BOS or EOS that is no id."""
    built = kind(**plain)
    for item in fields(kind):  # type: ignore[arg-type]
        value, wanted = getattr(built, item.name), item.type
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            raise TypeError(f"{item.name} is {one_line(repr(value), 80)}")
        if isinstance(value, int) and not 0 <= value < 2**62:
            raise ValueError(f"{item.name} is {value}")
    if isinstance(built, ShardInfo) and not (
        re.fullmatch(r"[\w-]{1,100}", built.name, re.ASCII)
        and built.tokens
        and built.documents
        and built.text_bytes
        and all(re.fullmatch(r"[0-9a-f]{64}", hash) for hash in (built.sha256, built.ends_sha256))
    ):
        raise ValueError(f"the shard {built.name} is described by impossible values")
    if isinstance(built, TokenizerInfo) and not max(built.eos, built.bos or 0) < built.vocab_size:
        raise ValueError(
            f"the tokenizer's bos {built.bos} and eos {built.eos} are not below its vocab_size "
            f"{built.vocab_size}"
        )
    return built


def manifest_to_json(manifest: Manifest) -> str:
    """The manifest as its file has it."""
    return json.dumps(asdict(manifest), indent=1) + "\n"


def open_split(folder: Path, manifest: Manifest, *splits: str) -> Split:
    """Splits as one. Raises DataError where a file is not there, has another size than the manifest says, or
    is a link that leads out of the folder. No file stays open: there may be more of them than a process may
    open."""
    infos = [info for split in splits for info in manifest.splits[split]]
    shards = [_open_shard(folder, info, np.dtype(manifest.dtype)) for info in infos]
    return Split(shards, sum(info.text_bytes for info in infos))


def sizes(manifest: Manifest) -> dict[str, int]:
    """Every file of the shards and how many bytes it has."""
    dtype = np.dtype(manifest.dtype)
    infos = [info for shards in manifest.splits.values() for info in shards]
    return {name: size for info in infos for name, size in _sizes(info, dtype).items()}


def _sizes(info: ShardInfo, dtype: np.dtype) -> dict[str, int]:
    return {f"{info.name}.bin": info.tokens * dtype.itemsize, f"{info.name}.ends": info.documents * 8}


def _open_shard(folder: Path, info: ShardInfo, dtype: np.dtype) -> Shard:
    ids = _open_file(folder / f"{info.name}.bin", dtype.newbyteorder("<"), info.tokens, info.sha256)
    ends = _open_file(folder / f"{info.name}.ends", np.dtype("<u8"), info.documents, info.ends_sha256)
    if (last := ends.numbers()[-1]) != info.tokens:
        raise DataError(
            f"{ends.path}: the last document ends at token {last} of {info.tokens}: prepare the data again"
        )
    return Shard(ids, ends)


def _open_file(path: Path, dtype: np.dtype, length: int, sha256: str) -> MappedFile:
    return MappedFile(path, dtype, length, sha256, check_size(path, length * dtype.itemsize).st_mtime_ns)


def check_size(path: Path, size_bytes: int) -> os.stat_result:
    """What the system says of a file. DataError unless there is such a file of this size, and in this folder:
    no link that leads elsewhere, or nowhere."""
    if path.is_symlink():
        real = os.path.realpath(path)  # Path.resolve raises RuntimeError where links lead in a circle
        if os.path.dirname(real) != os.path.realpath(path.parent):
            raise DataError(f"{path} leads out of its folder, to {real}: put the file itself there")
    try:
        status = path.stat()
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        missing = "a link to no file" if path.is_symlink() else "no such file"
        here = f"{status.st_size:,} bytes" if status and stat.S_ISREG(status.st_mode) else missing
        raise DataError(
            f"{path}: {here}, but {path.parent / MANIFEST} says {size_bytes:,} bytes: prepare the data again"
        )
    return status
