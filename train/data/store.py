"""Tokenised text on disk: a folder of shards, and a manifest that says what they hold.

    manifest.json        tokenizer, dtype, sources with their fingerprints, and every shard with its counts and checksums
    tokenizer.json       where the tokenizer has one
    train-00000.bin      token ids, little-endian uint16 or uint32: documents one after another, [BOS] ids EOS each
    train-00000.ends     little-endian uint64: where each document of the shard ends, in tokens
    held_out-00000.bin   the same of the documents kept for evaluation

A folder with a manifest is complete: whoever writes one gives it its name by one rename at the end.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from train.data.config import DataError
from train.data.split import Shard, Split
from train.data.tokenizer import TokenizerInfo

FORMAT = 1  # raised when the files' layout changes
MANIFEST = "manifest.json"
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
    """A file that was tokenised: its name within the source, its size, and a hash of its beginning, end and size."""

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
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] != FORMAT:
            raise DataError(f"{path} has format {plain['format']!r}, this version reads {FORMAT}: prepare the data again")
        if plain["dtype"] not in DTYPES:
            raise ValueError(f"dtype {plain['dtype']!r} is not one of {', '.join(DTYPES)}")
        return Manifest(
            tokenizer=_build(TokenizerInfo, plain["tokenizer"]),
            dtype=plain["dtype"],
            sources=tuple(_build(SourceFile, source) for source in plain["sources"]),
            splits={split: tuple(_build(ShardInfo, shard) for shard in plain["splits"][split]) for split in SPLITS},
            settings=dict(plain["settings"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): prepare the data again") from None


def _build(kind: type[T], plain: dict[str, Any]) -> T:
    """One of the dataclasses above. TypeError or ValueError for a value that cannot be: of another type, a count below 0, a name
    that leads out of the folder."""
    built = kind(**plain)
    for item in fields(kind):  # type: ignore[arg-type]
        value, wanted = getattr(built, item.name), item.type
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            raise TypeError(f"{item.name} is {value!r}")
        if isinstance(value, int) and not 0 <= value < 2**62:
            raise ValueError(f"{item.name} is {value}")
    if isinstance(built, ShardInfo) and not (re.fullmatch(r"[\w-]+", built.name) and built.tokens and built.documents):
        raise ValueError(f"the shard {built.name} is described by impossible values")
    return built


def manifest_to_json(manifest: Manifest) -> str:
    """The manifest as its file has it."""
    return json.dumps(asdict(manifest), indent=1) + "\n"


def open_split(folder: Path, manifest: Manifest, *splits: str) -> Split:
    """Splits as one, memory-mapped. Raises DataError where a file is not there or has another size than the manifest says."""
    infos = [info for split in splits for info in manifest.splits[split]]
    shards = [_open_shard(folder, info, np.dtype(manifest.dtype)) for info in infos]
    return Split(shards, sum(info.text_bytes for info in infos))


def _open_shard(folder: Path, info: ShardInfo, dtype: np.dtype) -> Shard:
    sizes = {f"{info.name}.bin": info.tokens * dtype.itemsize, f"{info.name}.ends": info.documents * 8}
    for name, size in sizes.items():
        _check_size(folder / name, size)
    ids, ends = (folder / name for name in sizes)
    shard = Shard(ids, np.memmap(ids, dtype.newbyteorder("<"), "r"), np.memmap(ends, "<u8", "r"))
    if shard.ends[-1] != info.tokens:
        raise DataError(f"{ends}: the last document ends at token {shard.ends[-1]} of {info.tokens}: prepare the data again")
    return shard


def _check_size(path: Path, size_bytes: int) -> None:
    if not path.is_file() or path.stat().st_size != size_bytes:
        here = f"{path.stat().st_size:,} bytes" if path.is_file() else "no such file"
        raise DataError(f"{path}: {here}, but {path.parent / MANIFEST} says {size_bytes:,} bytes: prepare the data again")
