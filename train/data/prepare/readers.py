"""Reads a part's documents one at a time. A file is only held in memory if it is one document."""

import csv
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from meshwright.train.data.prepare.arrow_reader import (
    CHUNK_BYTES,
    SET_FIELD,
    check_field,
    read_dataset,
    read_errors,
    read_rows,
    unpack,
)
from meshwright.train.data.prepare.partition import BOM, HF, Part
from meshwright.train.data.sources import TEXT
from meshwright.train.errors import DataError

# a complete string, a quote that begins an incomplete one, or a symbol
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)


class Document(NamedTuple):
    """A document.

    Fields: its name (NAME of a text file; NAME:INDEX of a record, where INDEX is its row in the file, or in
    JSON the uncompressed byte offset of its line or item), its text in UTF-8, how many bytes of the part have
    been read up to its end, and for a record without usable text its place and what is wrong, else "".
    """

    name: str
    text: bytes
    done_bytes: int
    bad: str = ""


def read_part(part: Part, text_field: str, check_text: bool) -> Iterator[Document]:
    """Yield the documents of a part in file order, including empty and bad ones.

    With `check_text` text files must be UTF-8; records always must be. Raises DataError for what is wrong
    with the file.
    """
    if part.kind == HF:
        yield from _read_table(part, read_dataset(part.path, part.first, part.last, text_field))
        return
    _check_unchanged(part)
    if part.kind == TEXT:
        yield _read_text(part, check_text)
    elif part.kind in ("parquet", "arrow"):
        yield from _read_table(part, read_rows(Path(part.path), part.kind, part.first, part.last, text_field))
    else:
        yield from _read_stream(part, text_field)
    _check_unchanged(part)


def _check_unchanged(part: Part) -> None:
    """DataError if size or time of the file have changed since it was listed."""
    with read_errors(part.path):
        stat = os.stat(part.path)
    if (stat.st_size, stat.st_mtime_ns) != (part.file_bytes, part.mtime_ns):
        raise DataError(
            f"data.source: {part.path} changed while it was being read: start again when no process writes "
            "to it"
        )


def _read_text(part: Part, check_text: bool) -> Document:
    with read_errors(part.path):
        text = Path(part.path).read_bytes()
    wrong = _utf8_error(text) if check_text else ""
    return Document(part.name, text, len(text), wrong and part.path + wrong)


def _utf8_error(text: bytes, offset: int = 0) -> str:
    """The byte that is not UTF-8, counted from `offset`, as the end of a message; or ""."""
    try:
        text.decode()
        return ""
    except UnicodeDecodeError as error:
        return f", byte {offset + error.start:,}: not UTF-8 ({error.reason})"


def _read_table(part: Part, batches: Iterator[tuple[int, list[bytes | None]]]) -> Iterator[Document]:
    """The rows of a table as documents; the bytes read are estimated from the text so far."""
    done = 0
    for row, texts in batches:
        for index, text in enumerate(texts, row):
            done = min(part.size_bytes, done + len(text or b""))
            wrong = _utf8_error(text or b"")
            bad = wrong and f"{part.path}, row {index + 1:,}{wrong}"
            yield Document(f"{part.name}:{index}", text or b"", done, bad)


def _read_stream(part: Part, text_field: str) -> Iterator[Document]:
    """The records of a JSON or CSV file."""
    form = part.kind.partition(".")[0]
    unit = "item" if form == "json" else "line"
    with read_errors(part.path), open(part.path, "rb", buffering=CHUNK_BYTES) as raw:
        file = unpack(raw, part.kind, Path(part.path))
        if form == "csv":
            records = _csv_records(part, file, text_field)
        else:
            contents = _list_items(file) if form == "json" else _lines(part, file)
            records = (
                (offset, number, *_json_text(content, text_field, offset))
                for number, (offset, content) in enumerate(contents, 1)
                if content.strip() or form == "json"
            )
        for index, number, text, wrong in records:
            done = min(part.size_bytes, raw.tell() - part.first)
            place = f"{unit} {_lines_before(part) + number:,}" if part.whole else f"byte {index:,}"
            bad = wrong and f"{part.path}, {place}{wrong}"
            if form == "json" and wrong.startswith(": not JSON"):  # the next item may begin anywhere
                raise EOFError(f"item {number:,}{wrong}")
            yield Document(f"{part.name}:{index}", text, done, bad)


def _lines(part: Part, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a part, with their byte offsets. A line belongs to the range with its first byte."""
    offset = part.first
    if offset:
        file.seek(offset - 1)
        offset += len(file.readline()) - 1
    while (part.kind != "jsonl" or offset < part.last) and (content := file.readline()):
        yield offset, content.removeprefix(BOM) if offset == 0 else content
        offset += len(content)


def _list_items(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The items of a JSON list, with their byte offsets. Only one is held in memory.

    Each is decoded like a line of JSON lines. ijson would replace half surrogates, and would end at the first
    item with NaN or a large integer.
    """
    buffer, base, at, begin, depth, filled = b"", 0, 0, 0, 0, False
    while block := file.read(max(CHUNK_BYTES, len(buffer))):
        buffer += block
        for match in _STRUCTURE.finditer(buffer, at):
            symbol = match[0]
            if symbol == b'"':  # the string continues in the next block
                break
            at = match.end()
            depth += (symbol in (b"[", b"{")) - (symbol in (b"]", b"}"))
            if depth == 0 or (depth == 1 and symbol == b","):
                item = buffer[begin : match.start()]
                if filled := filled or symbol == b"," or bool(item.strip()):  # [] has none
                    yield base + begin, item
            if depth == 1 and symbol in (b",", b"["):
                begin = at
            if depth == 0:
                if (buffer[at:] + file.read(CHUNK_BYTES)).strip():
                    raise EOFError("text after the end of the list")
                return
        buffer, base, at, begin = buffer[begin:], base + begin, at - begin, 0
    raise EOFError(f"the item of the list that begins at byte {base + begin:,} does not end")


def _json_text(content: bytes, text_field: str, offset: int) -> tuple[bytes, str]:
    """The text of a JSON record, b"" for null; and what is wrong with it, as the end of a message."""
    try:
        record = json.loads(content.decode().rstrip())
    except UnicodeDecodeError:
        return b"", _utf8_error(content, offset)
    except (json.JSONDecodeError, RecursionError) as error:
        return b"", f": not JSON ({error}), but each must be a JSON object"
    except ValueError:
        return b"", f": an integer has more than {sys.get_int_max_str_digits():,} digits"
    if not isinstance(record, dict):
        return b"", f": a JSON {type(record).__name__}, not an object with the field {text_field}"
    if text_field not in record:
        return b"", f": no field {text_field} (fields: {', '.join(map(repr, record)) or 'none'}): {SET_FIELD}"
    text = record[text_field]
    if not isinstance(text, str | None):
        return b"", f": the field {text_field} is {type(text).__name__}, not text: {SET_FIELD}"
    try:
        return (text or "").encode(), ""
    except UnicodeEncodeError:
        return b"", f": the field {text_field} has half of a surrogate pair, which is not text"


def _csv_records(part: Part, file: BinaryIO, text_field: str) -> Iterator[tuple[int, int, bytes, str]]:
    """The rows below the names of the columns, without blank lines: number of the row, of its line, text, and
    what is wrong."""
    csv.field_size_limit(sys.maxsize)
    content = itertools.chain([file.readline().removeprefix(BOM)], file)
    rows = csv.reader((line.decode(errors="surrogateescape") for line in content), strict=True)
    line = 1
    try:
        names = next(rows, [])
        check_field(text_field, names, part.path)
        line = rows.line_num + 1
        for index, row in enumerate(rows):
            if len(row) == len(names):
                text = row[names.index(text_field)].encode(errors="surrogateescape")
                yield index, line, text, _utf8_error(text)
            elif row:
                yield index, line, b"", f": {len(row):,} fields, but the first line has {len(names):,}"
            line = rows.line_num + 1
    except csv.Error as error:  # a quotation that does not end may have swallowed any number of rows
        raise csv.Error(f"not CSV from line {line:,} on: {error}") from None


@functools.lru_cache(maxsize=1)
def _lines_before(part: Part) -> int:
    """The number of lines of the file that begin before the part."""
    if part.kind != "jsonl" or part.first == 0:
        return 0
    with open(part.path, "rb") as file:
        left, count, last = part.first, 0, b"\n"
        while left and (block := file.read(min(left, CHUNK_BYTES))):
            left, count, last = left - len(block), count + block.count(b"\n"), block
    return count + (not last.endswith(b"\n"))
