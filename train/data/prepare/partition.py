"""Divides a source into pieces: the unit of work and of restarting. A piece becomes one shard of each split.

The division depends on the files (names, sizes, row groups) and the shard size, not on the number of
processes.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.train.data.prepare.arrow_reader import count_groups, open_dataset, read_errors, unpack
from meshwright.train.data.sources import HF_PREFIX, TEXT, file_kind, find_files, fingerprint_file
from meshwright.train.data.token_store import SourceFile

HF = "hf"
BOM = b"\xef\xbb\xbf"
# a small source gets smaller pieces, so that several processes have work
_FEWEST_PIECES, _LEAST_BYTES = 64, 2 * 2**20
# units of a range; bytes for other kinds
_UNITS = {"parquet": "row groups", "arrow": "record batches", HF: "rows"}


@dataclass(frozen=True)
class Part:
    """A file, or a range of it.

    Args:
        name: of the file, relative to the source
        path: of the file
        kind: text, jsonl, json (a list), csv, parquet, arrow or hf; the first four may end in .gz or .zst
        first: begin of the range: a byte (text, jsonl), row group (parquet), record batch (arrow) or row (hf)
        last: one after the end of the range
        size_bytes: approximate size of the range
        file_bytes, mtime_ns: of the full file when it was listed
        fingerprint: of the full file
        held_out: whether a text file is held out; records are held out one by one
        whole: the file at `path` has all of the file, not only the range
    """

    name: str
    path: str
    kind: str
    first: int
    last: int
    size_bytes: int
    file_bytes: int
    mtime_ns: int
    fingerprint: str
    held_out: bool = False
    whole: bool = True


@dataclass(frozen=True)
class Piece:
    """Consecutive parts of a source.

    Args:
        index: its position in the source
        parts: files, or ranges of files
        cut: the piece has the only document of the source, and the end of that document is held out
        swapped: name of a record that goes to the split opposite to its hash, or ""
    """

    index: int
    parts: tuple[Part, ...]
    cut: bool = False
    swapped: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def place(self) -> str:
        """The first file and range and the number of other files, as text for a message."""
        first, others = self.parts[0], len(self.parts) - 1
        unit = _UNITS.get(first.kind, "bytes")
        more = f" and {others:,} more file{'s' if others > 1 else ''}" if others else ""
        return f"{first.path} ({unit} {first.first:,} to {first.last:,}){more}"


def cut_source(
    source: str, share: float, shard_bytes: int, check_text: bool = True
) -> tuple[list[SourceFile], list[Piece]]:
    """Return the files of a source, and its pieces of about `shard_bytes`. Raises DataError.

    With `check_text`, files of the standard library that are not UTF-8 (its tests use other encodings) are
    left out.
    """
    if source.startswith(HF_PREFIX):
        files = [_describe_dataset(source)]
    else:
        paths = find_files(source)
        if check_text and source == "stdlib":
            paths = [(name, path) for name, path in paths if is_utf8(path)]
        files = [_describe_file(name, path) for name, path in paths]
    texts = [part.name for part in files if part.kind == TEXT]
    held_out = choose_held_out(texts, share)
    target = min(shard_bytes, max(sum(part.file_bytes for part in files) // _FEWEST_PIECES, _LEAST_BYTES))
    parts = (
        part for file in files for part in _cut_file(replace(file, held_out=file.name in held_out), target)
    )
    pieces = [Piece(index, group) for index, group in enumerate(_group(parts, target))]
    if len(files) == len(texts) == 1 and share:
        pieces = [replace(pieces[0], cut=True)]
    return [SourceFile(part.name, part.file_bytes, part.fingerprint) for part in files], pieces


def choose_held_out(names: Sequence[str], share: float) -> set[str]:
    """Return the names whose hash is below `share`: of several names at least one and never all. None of a
    single name, and none for a share of 0.

    Apart from these limits, the choice of a name does not depend on the other names.
    """
    if share == 0:
        return set()
    by_hash = sorted(names, key=unit_hash)
    count = sum(unit_hash(name) < share for name in names)
    return set(by_hash[: min(max(count, 1), len(names) - 1)])


def unit_hash(name: str) -> float:
    """Return a hash of a name as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
        return True
    except UnicodeDecodeError:
        return False


def _describe_file(name: str, path: Path) -> Part:
    """The full file as one part."""
    with read_errors(path):
        stat, fingerprint, kind = path.stat(), fingerprint_file(path), detect_kind(path)
    size = stat.st_size
    if path.suffix in (".json", ".csv"):  # what was prepared when these were one text each is not the same
        fingerprint = hashlib.sha256(f"{kind}:{fingerprint}".encode()).hexdigest()
    last = count_groups(path, kind) if kind in ("parquet", "arrow") else size
    return Part(name, str(path), kind, 0, last, size, size, stat.st_mtime_ns, fingerprint)


def detect_kind(path: Path) -> str:
    """Return the kind of a file by its name; of a .json file by its content, which is a list, or else JSON
    lines. Raises OSError and what a damaged file raises."""
    kind = file_kind(path)
    if kind.split(".")[0] != "json":
        return kind
    with open(path, "rb") as raw:
        begin = unpack(raw, kind, path).read(2**16).removeprefix(BOM).lstrip()
    return kind if begin.startswith(b"[") else kind.replace("json", "jsonl")


def _describe_dataset(source: str) -> Part:
    """All rows of a Hugging Face dataset as one part, with the fingerprint that the library computes."""
    dataset = open_dataset(source)
    size = int(dataset.data.nbytes)
    fingerprint = hashlib.sha256(f"{dataset._fingerprint}:{len(dataset)}".encode()).hexdigest()
    return Part(source, source, HF, 0, len(dataset), size, size, 0, fingerprint)


def _cut_file(part: Part, target: int) -> Iterator[Part]:
    """Divide a file into equal ranges of about `target` bytes. A file that cannot be read from its middle
    stays one part."""
    splittable = part.kind == "jsonl" or part.kind in _UNITS
    count = max(1, min(round(part.file_bytes / target), part.last)) if splittable else 1
    edges = [part.last * i // count for i in range(count + 1)]
    sizes = [part.file_bytes * i // count for i in range(count + 1)]
    for i in range(count):
        yield replace(part, first=edges[i], last=edges[i + 1], size_bytes=sizes[i + 1] - sizes[i])


def _group(parts: Iterator[Part], target: int) -> Iterator[tuple[Part, ...]]:
    """Group consecutive parts; a group of several parts has at most `target` bytes."""
    group, size_bytes = list[Part](), 0
    for part in parts:
        if group and size_bytes + part.size_bytes > target:
            yield tuple(group)
            group, size_bytes = [], 0
        group.append(part)
        size_bytes += part.size_bytes
    if group:
        yield tuple(group)
