"""Tokenises pieces of a source, in this process or in a worker of worker_pool.py.

Long documents are taken in parts: the tokenizers library would need some hundred bytes of memory for each
byte of them. A tokenizer looks only a little around it when it decides how text falls into tokens; but what
it does at the ends of a text is its own affair (one puts a space in front, one strips the end). So each place
to cut is tried: the text around it must give the same ids whole and cut. Where no place does, the text stays
whole.
"""

import errno
import functools
import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.structure import Natural
from meshwright.train.data.prepare.partition import Part, Piece, unit_hash
from meshwright.train.data.prepare.readers import Document, read_part
from meshwright.train.data.prepare.shard_writer import ShardWriter
from meshwright.train.data.sources import TEXT
from meshwright.train.data.token_store import SPLITS, ShardInfo
from meshwright.train.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.train.errors import DataError
from meshwright.train.files import read_json, write_whole

PART_BYTES = 2**20
_AROUND_BYTES = 2000  # a tokenizer's pieces are far shorter
_TRIES = 8
# after a line's end, or before a space: no UTF-8 character is split
_PLACE = re.compile(rb"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

Encode = Callable[[list[bytes]], list[NDArray[np.uint32]]]
OnPart = Callable[[int, int], None]  # its bytes and its ids


def encode_in_parts(encode: Encode, text: bytes, dtype: np.dtype, on_part: OnPart) -> list[NDArray[Any]]:
    """The ids of a text as `encode` gives them of the whole, part after part, each of which `on_part` hears
    of."""
    ids = []
    for part in cut_text(encode, text):
        ids.append(encode([part])[0].astype(dtype))
        on_part(len(part), len(ids[-1]))
    return ids


def cut_text(encode: Encode, text: bytes) -> Iterator[bytes]:
    """The text in parts of little more than PART_BYTES, the ids of which are together those of the text."""
    begin = 0
    while begin + 2 * PART_BYTES < len(text):
        places = (match.start() for match in _PLACE.finditer(text, begin + PART_BYTES))
        place = next((place for place in islice(places, _TRIES) if _may_cut(encode, text, place)), len(text))
        yield text[begin:place]
        begin = place
    if begin < len(text):
        yield text[begin:]


def _may_cut(encode: Encode, text: bytes, place: int) -> bool:
    """Whether the text around a place gives the same ids whole and cut there."""
    before, after = text[max(0, place - _AROUND_BYTES) : place], text[place : place + _AROUND_BYTES]
    # half characters at the far ends go
    before, after = (part.decode(errors="ignore").encode() for part in (before, after))
    left, right, whole = encode([before, after, before + after])
    return np.array_equal(np.concatenate([left, right]), whole)


_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 4096
_LONG_BYTES = 4 * 2**20
RESULT_BYTES = 2**16  # of the file for a finished piece: two shards, and the names of two records
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class TokenizeJob:
    """What is the same for all pieces.

    Args:
        tokenizer, bos, eos: as load_tokenizer takes them
        tokenizer_sha256: of the tokenizer's file, "" for bytes
        text_field: of records
        held_out: share of records held out
        folder: where shards go
        results_folder: where a small file for each finished piece goes
        check_text: text files must be UTF-8
    """

    tokenizer: str
    bos: str
    eos: str
    tokenizer_sha256: str
    text_field: str
    held_out: float
    folder: str
    results_folder: str
    check_text: bool


@dataclass(frozen=True)
class TokenizedPiece:
    """A finished piece.

    Args:
        key: of the piece and all that decides its shards
        shards: of each split, or None where it has no document
        empty: documents without text, which were skipped
        lowest, highest: record with the lowest hash of its name, and with the highest, as (hash, name); (""
            without records)
    """

    key: str
    shards: dict[str, ShardInfo | None]
    empty: Natural
    lowest: tuple[float, str]
    highest: tuple[float, str]


class NoSpace(Exception):
    """The disk is full."""


OnBatch = Callable[[int, int, int], None]  # further source bytes, documents and tokens


def result_path(job: TokenizeJob, piece: Piece) -> Path:
    """The file whose being there says that a piece is finished."""
    return Path(job.results_folder) / f"{piece.index:05d}.json"


def read_result(path: Path) -> TokenizedPiece:
    """The opposite of json.dumps(asdict(result)). Raises OSError and ValueError."""
    result = msgspec.convert(read_json(path, RESULT_BYTES), TokenizedPiece)
    if result.shards.keys() != set(SPLITS):
        raise ValueError(f"{path} has not the splits {', '.join(SPLITS)}")
    return result


def piece_key(job: TokenizeJob, piece: Piece) -> str:
    """Hash of all that decides what a piece becomes; not of where files lie."""
    decisive = asdict(piece)
    for part in decisive["parts"]:
        del part["path"]
    decided = [job.tokenizer_sha256, job.bos, job.eos, job.text_field, job.held_out, decisive]
    return hashlib.sha256(json.dumps(decided).encode()).hexdigest()


def tokenise_piece(piece: Piece, job: TokenizeJob, tokenizer: Tokenizer, on_batch: OnBatch) -> TokenizedPiece:
    """Write a piece's shards, then its result. Raises DataError, and NoSpace where the disk is full."""
    work = _PieceWork(piece, job, tokenizer, on_batch)
    try:
        for documents, done_bytes in _batches(piece, job):
            work.add(documents, done_bytes)
        result = work.finish()
        write_whole(result_path(job, piece), json.dumps(asdict(result)).encode())
        return result
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoSpace(error.strerror) from None
        raise DataError(f"cannot write to {job.folder} ({error.strerror}): name another folder") from None
    finally:
        work.abandon()


def _batches(piece: Piece, job: TokenizeJob) -> Iterator[tuple[list[tuple[Part, Document]], int]]:
    """Documents, as many together as are worth a call of the tokenizer, and how many further bytes of source
    they are."""
    batch: list[tuple[Part, Document]] = []
    size_bytes, before, reported = 0, 0, 0
    for part in piece.parts:
        for document in read_part(part, job.text_field, job.check_text):
            batch.append((part, document))
            size_bytes += len(document.text)
            if size_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                done = before + document.done_bytes
                yield batch, done - reported
                batch, size_bytes, reported = [], 0, done
        before += part.size_bytes
    yield batch, before - reported


class _PieceWork:
    """The shards of a piece while they grow."""

    def __init__(self, piece: Piece, job: TokenizeJob, tokenizer: Tokenizer, on_batch: OnBatch) -> None:
        info = tokenizer.info
        self._piece, self._job, self._tokenizer, self._on_batch = piece, job, tokenizer, on_batch
        # of a batch: what `on_batch` has not heard of yet, and what it has
        self._bytes_left = self._tokens_said = 0
        self._begin = [] if info.bos is None else [np.array([info.bos], np.uint32)]
        self._end = np.array([info.eos], np.uint32)
        self._dtype = token_dtype(info.vocab_size)
        folder = Path(job.folder)
        self._writers = {
            split: ShardWriter(folder, f"{split}-{piece.index:05d}", self._dtype) for split in SPLITS
        }
        self._empty = 0
        self._lowest, self._highest = (1.0, ""), (0.0, "")

    def add(self, documents: list[tuple[Part, Document]], done_bytes: int) -> None:
        """Tokenise and write a batch that is so many bytes of the source, and say so, of long texts part
        after part."""
        self._bytes_left, self._tokens_said = done_bytes, 0
        kept = [(split, text) for part, document in documents for split, text in self._place(part, document)]
        encoded = self._encode([text for _, text in kept], documents)
        total = 0
        for split in SPLITS:
            chosen = [(ids, text) for ids, (where, text) in zip(encoded, kept, strict=True) if where == split]
            if chosen:
                arrays = [array for ids, _ in chosen for array in (*self._begin, *ids, self._end)]
                lengths = [len(self._begin) + sum(map(len, ids)) + 1 for ids, _ in chosen]
                self._writers[split].add(arrays, lengths, sum(len(text) for _, text in chosen))
                total += sum(lengths)
        self._on_batch(self._bytes_left, len(documents), total - self._tokens_said)

    def _say_part(self, size_bytes: int, tokens: int) -> None:
        done_bytes = min(size_bytes, self._bytes_left)  # packed, a text has fewer in the source
        self._bytes_left -= done_bytes
        self._tokens_said += tokens
        self._on_batch(done_bytes, 0, tokens)

    def _encode(self, texts: list[bytes], documents: list[tuple[Part, Document]]) -> list[list[NDArray[Any]]]:
        """The ids of each text, those of a long one in parts."""
        encode = self._tokenizer.encode
        short = [text for text in texts if len(text) <= _LONG_BYTES]
        long = functools.partial(encode_in_parts, encode, dtype=self._dtype, on_part=self._say_part)
        try:
            encoded = iter(encode(short))
            return [[next(encoded)] if len(text) <= _LONG_BYTES else long(text) for text in texts]
        except DataError:
            for _, document in documents:
                try:
                    long(document.text)
                except DataError as error:
                    raise DataError(f"data.source: document {document.name}: {error}") from None
            raise

    def _place(self, part: Part, document: Document) -> list[tuple[str, bytes]]:
        """Which split a document goes to; both if it is the only one, none if it has no text."""
        text = document.text
        if not text:
            self._empty += 1
            return []
        held_out = part.held_out
        if part.kind != TEXT:
            place = (unit_hash(document.name), document.name)
            self._lowest, self._highest = min(self._lowest, place), max(self._highest, place)
            held_out = (place[0] < self._job.held_out) != (document.name == self._piece.swapped)
        if self._piece.cut:
            at = cut_place(text, self._job.held_out)
            return [(split, half) for split, half in zip(SPLITS, (text[:at], text[at:]), strict=True) if half]
        return [(SPLITS[held_out], text)]

    def finish(self) -> TokenizedPiece:
        shards = {split: writer.finish() for split, writer in self._writers.items()}
        return TokenizedPiece(
            piece_key(self._job, self._piece), shards, self._empty, self._lowest, self._highest
        )

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of the two that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def cut_place(text: bytes, share: float) -> int:
    """Where the end of a text begins that is held out: `share` of it, at least a byte, and a character is
    never split."""
    place = len(text) - max(1, round(len(text) * share))
    starts = (at for at in range(place, max(-1, place - 4), -1) if text[at] & 0xC0 != 0x80)
    return next(starts, place)  # what begins nowhere near is no UTF-8, and has no characters


# In a process of its own

# of a table with a row for each piece, which the process that starts workers reads: the process that is at
# the piece, or 0, and what of it is done
COLUMNS = ("pid", "source bytes", "documents", "tokens")
_table: NDArray[np.int64]


def start_worker(shared: Any) -> None:
    """Begin as a worker process, with the table in shared memory. It ends with the process that started it,
    however that ends."""
    global _table
    _table = np.frombuffer(shared, np.int64).reshape(-1, len(COLUMNS))
    # as many processes as cores are faster than threads of the tokenizers library
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def tokenise_shared(row: int, piece: Piece, job: TokenizeJob) -> None:
    """Tokenise a piece, and keep its row of the table. Raises as tokenise_piece."""
    _table[row, 0] = os.getpid()
    tokenise_piece(piece, job, _same_tokenizer(job), functools.partial(_add, row))
    _table[row, 0] = 0


def _add(row: int, *counts: int) -> None:
    _table[row, 1:] += counts


@functools.cache
def _same_tokenizer(job: TokenizeJob) -> Tokenizer:
    """The tokenizer that the preparation began with. Raises DataError."""
    tokenizer = load_tokenizer(job.tokenizer, job.bos, job.eos)
    if tokenizer.info.sha256 != job.tokenizer_sha256:
        raise DataError(f"data.tokenizer={job.tokenizer} changed while data was being prepared: start again")
    return tokenizer
