"""Reads a part's documents one at a time. A file is only held in memory if it is one document."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshwright.train.data.prepare.arrow_reader import open_zstd, read_dataset, read_errors, read_rows
from meshwright.train.data.prepare.partition import HF, Part
from meshwright.train.data.sources import TEXT
from meshwright.train.errors import DataError

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**20


class Document(NamedTuple):
    """A document.

    Fields: its name (NAME of a text file; NAME:INDEX of a record, where INDEX is its row in the file, or in a
    .jsonl file the uncompressed byte offset of its line), its text in UTF-8, and how many bytes of the part
    have been read up to its end.
    """

    name: str
    text: bytes
    done_bytes: int


def read_part(part: Part, text_field: str, check_text: bool) -> Iterator[Document]:
    """Yield the documents of a part in file order, including empty ones.

    With `check_text` text files must be UTF-8; records always must be. Raises DataError.
    """
    if part.kind == HF:
        yield from _read_records(part, read_dataset(part.path, part.first, part.last, text_field))
        return
    _check_unchanged(part)
    if part.kind == TEXT:
        yield _read_text(part, check_text)
    elif part.kind in ("parquet", "arrow"):
        yield from _read_records(
            part, read_rows(Path(part.path), part.kind, part.first, part.last, text_field)
        )
    else:
        yield from _read_jsonl(part, text_field)
    _check_unchanged(part)


def _check_unchanged(part: Part) -> None:
    """DataError if size or time of the file have changed since it was listed."""
    try:
        stat = os.stat(part.path)
    except OSError as error:
        raise DataError(
            f"data.source: cannot read {part.path} ({error.strerror}): restore it or leave it out"
        ) from None
    if (stat.st_size, stat.st_mtime_ns) != (part.file_bytes, part.mtime_ns):
        raise DataError(
            f"data.source: {part.path} changed while it was being read: start again when no process writes "
            "to it"
        )


def _read_text(part: Part, check_text: bool) -> Document:
    try:
        text = Path(part.path).read_bytes()
    except OSError as error:
        raise DataError(
            f"data.source: cannot read {part.path} ({error.strerror}): restore it or leave it out"
        ) from None
    if check_text:
        _check_utf8(text, part.path, 0)
    return Document(part.name, text, len(text))


def _check_utf8(text: bytes, place: str, offset: int) -> str:
    """Decode a text. DataError with the byte, counted from `offset`, that is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.source: {place}, byte {offset + error.start:,}: not UTF-8 ({error.reason}): "
            "convert the file, or leave it out"
        ) from None


def _read_records(part: Part, batches: Iterator[tuple[int, list[bytes | None]]]) -> Iterator[Document]:
    """The rows of a table as documents; the bytes read are estimated from the text so far."""
    done = 0
    for row, texts in batches:
        for index, text in enumerate(texts, row):
            done = min(part.size_bytes, done + len(text or b""))
            if text is not None:
                _check_utf8(text, f"{part.path}, row {index + 1:,}", 0)
            yield Document(f"{part.name}:{index}", text or b"", done)


def _read_jsonl(part: Part, text_field: str) -> Iterator[Document]:
    """The records whose first byte lies in the part."""
    try:
        with open(part.path, "rb", buffering=_CHUNK_BYTES) as raw:
            for line, (offset, content) in enumerate(_lines(part, raw), 1):
                if content.strip():
                    text = _record_text(part, content, text_field, line, offset)
                    done = min(
                        part.size_bytes,
                        (offset + len(content) if part.kind == "jsonl" else raw.tell()) - part.first,
                    )
                    yield Document(f"{part.name}:{offset}", text, done)
    except (OSError, EOFError, zlib.error) as error:
        with read_errors(part.path):
            raise OSError(str(error) or type(error).__name__) from None


def _lines(part: Part, raw: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a part, with their byte offsets. A line belongs to the range with its first byte."""
    file: Any = raw
    offset = part.first
    if part.kind == "jsonl.gz":
        file = io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK_BYTES)  # type: ignore[arg-type]
    elif part.kind == "jsonl.zst":
        file = io.BufferedReader(open_zstd(raw, Path(part.path)), _CHUNK_BYTES)
    elif part.first:
        raw.seek(part.first - 1)
        offset += len(raw.readline()) - 1
    while part.kind != "jsonl" or offset < part.last:
        content = file.readline()
        if not content:
            return
        yield offset, content.removeprefix(_BOM) if offset == 0 else content
        offset += len(content)


def _record_text(part: Part, content: bytes, text_field: str, line: int, offset: int) -> bytes:
    """The text of a line's record; b"" for null. Raises DataError."""
    try:
        record = json.loads(content.decode())
        text = record[text_field]
        return b"" if text is None else text.encode()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise DataError(_line_error(part, content, text_field, line, offset)) from None


def _line_error(part: Part, content: bytes, text_field: str, line: int, offset: int) -> str:
    """The message for a line without text."""
    place = f"data.source: {part.path}, line {_lines_before(part) + line:,}"
    try:
        record = json.loads(_check_utf8(content, place, offset).rstrip())
    except DataError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"{place}: not JSON ({error}): every line of a .jsonl file must be a JSON object"
    way_out = "set the field of the text with data.text_field (--text_field of tools.prepare_data)"
    if not isinstance(record, dict):
        return f"{place}: a JSON {type(record).__name__}, not an object with the field {text_field}"
    if text_field not in record:
        return f"{place}: no field {text_field} (fields: {', '.join(map(repr, record)) or 'none'}): {way_out}"
    if not isinstance(record[text_field], str):
        return f"{place}: the field {text_field} is {type(record[text_field]).__name__}, not text: {way_out}"
    return f"{place}: the field {text_field} has half of a surrogate pair, which is not text: fix the line"


def _lines_before(part: Part) -> int:
    """The number of lines of the file that begin before the part."""
    if part.kind != "jsonl" or part.first == 0:
        return 0
    with open(part.path, "rb") as file:
        left, count, last = part.first, 0, b"\n"
        while left and (block := file.read(min(left, _CHUNK_BYTES))):
            left, count, last = left - len(block), count + block.count(b"\n"), block
    return count + (not last.endswith(b"\n"))
