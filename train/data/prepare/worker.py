"""Tokenizes pieces of a source, in this process or in several, which import neither torch nor the main
program.

Long documents are tokenized in parts, because the tokenizers library needs some hundred bytes of memory per
byte of text. Tokens depend only on a few characters around them, but tokenizers differ in what they do at the
ends of a text (some prepend a space, some strip the end). So each place to cut is tested: the text around it
must give the same ids with and without the cut. If no place passes, the rest of the text is one part.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Natural
from meshwright.train.data.prepare.partition import Part, Piece, unit_hash
from meshwright.train.data.prepare.readers import Document, read_part
from meshwright.train.data.prepare.shard_writer import ShardWriter
from meshwright.train.data.sources import TEXT
from meshwright.train.data.token_store import SPLITS, BadRecords, ShardInfo
from meshwright.train.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.train.errors import DataError
from meshwright.train.files import read_json, write_atomically

PART_BYTES = 2**20
_AROUND_BYTES = 2000  # much longer than the pieces into which a tokenizer splits text
_TRIES = 8
# after a line end, or before a space: these split no UTF-8 character
_PLACE = re.compile(rb"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

Encode = Callable[[list[bytes]], list[NDArray[np.uint32]]]
OnPart = Callable[[int, int], None]  # bytes and ids of a part


def encode_in_parts(encode: Encode, text: bytes, dtype: np.dtype, on_part: OnPart) -> list[NDArray[Any]]:
    """Return the ids of a text, in parts that join to those of the full text; `on_part` follows each."""
    ids = []
    for part in cut_text(encode, text):
        ids.append(encode([part])[0].astype(dtype))
        on_part(len(part), len(ids[-1]))
    return ids


def cut_text(encode: Encode, text: bytes) -> Iterator[bytes]:
    """Yield the text in parts of little more than PART_BYTES, whose ids together are those of the text."""
    begin = 0
    while begin + 2 * PART_BYTES < len(text):
        places = (match.start() for match in _PLACE.finditer(text, begin + PART_BYTES))
        place = next((place for place in islice(places, _TRIES) if _may_cut(encode, text, place)), len(text))
        yield text[begin:place]
        begin = place
    if begin < len(text):
        yield text[begin:]


def _may_cut(encode: Encode, text: bytes, place: int) -> bool:
    """Whether the text around a place gives the same ids with and without a cut there."""
    before, after = text[max(0, place - _AROUND_BYTES) : place], text[place : place + _AROUND_BYTES]
    # drop partial characters at the far ends
    before, after = (part.decode(errors="ignore").encode() for part in (before, after))
    left, right, joined = encode([before, after, before + after])
    return np.array_equal(np.concatenate([left, right]), joined)


_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 4096
_LONG_BYTES = 4 * 2**20
RESULT_BYTES = 2**20  # limit of the file of a finished piece: two shards and the names of records


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of a preparation.

    Args:
        held_out: share of documents kept for evaluation: at least one document and never all, none if 0
        text_field: field of a record that contains its text
        shard_bytes: approximate bytes of the source per shard
        workers: processes; with 1 only this process, and the tokenizers library uses threads
        skip_bad: how many records without usable text are left out; one more is an error
    """

    held_out: float = 0.02
    text_field: str = "text"
    shard_bytes: int = 64 * 2**20
    workers: int = 1
    skip_bad: int = 0


@dataclass(frozen=True)
class TokenizeJob:
    """What all pieces share. `tokenizer`, `bos`, `eos`: arguments of load_tokenizer; `tokenizer_sha256`: of
    its file, "" for bytes; `folder`: to work in; `check_text`: text files must be UTF-8."""

    tokenizer: str
    bos: str
    eos: str
    tokenizer_sha256: str
    settings: PrepareSettings
    folder: Path
    check_text: bool

    @property
    def data(self) -> Path:
        return self.folder / "data"


@dataclass(frozen=True)
class TokenizedPiece:
    """A finished piece.

    Args:
        key: hash of the piece and of everything else that determines its shards
        shards: shard of each split, or None if it has no document
        empty: number of documents without text, which are skipped
        lowest, highest: the records with the lowest and the highest hash of their name, as (hash, name); the
            name is "" without records
        bad: records that are left out because they have no usable text
    """

    key: str
    shards: dict[str, ShardInfo | None]
    empty: Natural
    lowest: tuple[float, str]
    highest: tuple[float, str]
    bad: BadRecords = field(default_factory=BadRecords)


OnBatch = Callable[[int, int], None]  # further source bytes and tokens


def result_path(folder: Path, index: int) -> Path:
    """Return the path of the file in a job's folder that marks a piece as finished."""
    return folder / "results" / f"{index:05d}.json"


def read_result(path: Path) -> TokenizedPiece:
    """Read the result of a finished piece. Raises OSError and ValueError."""
    result = msgspec.convert(read_json(path, RESULT_BYTES), TokenizedPiece)
    if result.shards.keys() != set(SPLITS):
        raise ValueError(f"{path} does not have the splits {', '.join(SPLITS)}")
    return result


def piece_key(job: TokenizeJob, piece: Piece) -> str:
    """Return a hash of all that determines the shards of a piece, which paths and `skip_bad` do not."""
    described = asdict(piece)
    for part in described["parts"]:
        del part["path"]
    settings = job.settings.text_field, job.settings.held_out
    inputs = [job.tokenizer_sha256, job.bos, job.eos, *settings, described]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def tokenize_piece(piece: Piece, job: TokenizeJob, tokenizer: Tokenizer, on_batch: OnBatch) -> TokenizedPiece:
    """Write the shards of a piece, then its result. Raises DataError."""
    writer = _PieceWriter(piece, job, tokenizer, on_batch)
    try:
        for documents, done_bytes in _batches(piece, job):
            writer.add(documents, done_bytes)
        result = writer.finish()
        write_atomically(result_path(job.folder, piece.index), json.dumps(asdict(result)).encode())
        return result
    except OSError as error:
        raise DataError(
            f"cannot write to {job.folder} ({error.strerror}), which keeps the finished shards: free space "
            "and start again, or delete it and use another folder"
        ) from None
    finally:
        writer.abandon()


def _batches(piece: Piece, job: TokenizeJob) -> Iterator[tuple[list[tuple[Part, Document]], int]]:
    """Documents in batches large enough for one call of the tokenizer, each with the bytes of source read
    since the batch before."""
    batch: list[tuple[Part, Document]] = []
    size_bytes, before, reported = 0, 0, 0
    for part in piece.parts:
        for document in read_part(part, job.settings.text_field, job.check_text):
            batch.append((part, document))
            size_bytes += len(document.text)
            if size_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                done = before + document.done_bytes
                yield batch, done - reported
                batch, size_bytes, reported = [], 0, done
        before += part.size_bytes
    yield batch, before - reported


class _PieceWriter:
    """Tokenizes the documents of a piece and writes its shards."""

    def __init__(self, piece: Piece, job: TokenizeJob, tokenizer: Tokenizer, on_batch: OnBatch) -> None:
        info = tokenizer.info
        self._piece, self._job, self._tokenizer, self._on_batch = piece, job, tokenizer, on_batch
        # of the current batch: bytes not yet reported to `on_batch`, and tokens already reported
        self._bytes_left = self._tokens_reported = 0
        self._begin = [] if info.bos is None else [np.array([info.bos], np.uint32)]
        self._end = np.array([info.eos], np.uint32)
        self._dtype = token_dtype(info.vocab_size)
        self._writers = {
            split: ShardWriter(job.data, f"{split}-{piece.index:05d}", self._dtype) for split in SPLITS
        }
        self._empty, self._bad = 0, BadRecords()
        self._lowest, self._highest = (1.0, ""), (0.0, "")

    def add(self, documents: list[tuple[Part, Document]], done_bytes: int) -> None:
        """Tokenize and write a batch of `done_bytes` of the source. Progress is reported after the batch, and
        after each part of a long text."""
        self._bytes_left, self._tokens_reported = done_bytes, 0
        kept = [(split, text) for part, document in documents for split, text in self._assign(part, document)]
        encoded = self._encode([text for _, text in kept], documents)
        total = 0
        for split in SPLITS:
            chosen = [
                (ids, text) for ids, (assigned, text) in zip(encoded, kept, strict=True) if assigned == split
            ]
            if chosen:
                arrays = [array for ids, _ in chosen for array in (*self._begin, *ids, self._end)]
                lengths = [len(self._begin) + sum(map(len, ids)) + 1 for ids, _ in chosen]
                self._writers[split].add(arrays, lengths, sum(len(text) for _, text in chosen))
                total += sum(lengths)
        self._on_batch(self._bytes_left, total - self._tokens_reported)

    def _report_part(self, size_bytes: int, tokens: int) -> None:
        done_bytes = min(size_bytes, self._bytes_left)  # a compressed text has fewer bytes in the source
        self._bytes_left -= done_bytes
        self._tokens_reported += tokens
        self._on_batch(done_bytes, tokens)

    def _encode(self, texts: list[bytes], documents: list[tuple[Part, Document]]) -> list[list[NDArray[Any]]]:
        """The ids of each text as arrays: several for a long text."""
        encode = self._tokenizer.encode
        short = [text for text in texts if len(text) <= _LONG_BYTES]
        long = functools.partial(encode_in_parts, encode, dtype=self._dtype, on_part=self._report_part)
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

    def _assign(self, part: Part, document: Document) -> list[tuple[str, bytes]]:
        """The split and text of a document: both splits of the only document, none without text. DataError if
        more than `skip_bad` are bad."""
        text = document.text
        if document.bad:
            bad = BadRecords(1, (one_line(document.bad),))
            self._bad = (self._bad + bad).check(self._job.settings.skip_bad)
            return []
        if not text:
            self._empty += 1
            return []
        held_out = part.held_out
        if part.kind != TEXT:
            hashed = (unit_hash(document.name), document.name)
            self._lowest, self._highest = min(self._lowest, hashed), max(self._highest, hashed)
            held_out = (hashed[0] < self._job.settings.held_out) != (document.name == self._piece.swapped)
        if self._piece.cut:
            at = cut_place(text, self._job.settings.held_out)
            return [(split, half) for split, half in zip(SPLITS, (text[:at], text[at:]), strict=True) if half]
        return [(SPLITS[held_out], text)]

    def finish(self) -> TokenizedPiece:
        """Complete the shards. Raises OSError."""
        shards = {split: writer.finish() for split, writer in self._writers.items()}
        return TokenizedPiece(
            piece_key(self._job, self._piece), shards, self._empty, self._lowest, self._highest, self._bad
        )

    def abandon(self) -> None:
        """Delete unfinished files."""
        for writer in self._writers.values():
            writer.abandon()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def cut_place(text: bytes, share: float) -> int:
    """Return where the held-out end of a text begins: `share` of the text, at least a byte. It splits no
    UTF-8 character."""
    place = len(text) - max(1, round(len(text) * share))
    starts = (at for at in range(place, max(-1, place - 4), -1) if text[at] & 0xC0 != 0x80)
    return next(starts, place)  # no character starts nearby: the text is not UTF-8


# In a worker process


def start_worker() -> None:
    """Initialize a worker process, which exits when its parent process ends, for any reason."""
    # one process per core is faster than threads of the tokenizers library
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def tokenize_in_worker(piece: Piece, job: TokenizeJob) -> int:
    """Tokenize a piece in a worker, and return its number of tokens. Raises DataError."""
    result = tokenize_piece(piece, job, _job_tokenizer(job), lambda done_bytes, tokens: None)
    return sum(shard.tokens for shard in result.shards.values() if shard)


@functools.cache
def _job_tokenizer(job: TokenizeJob) -> Tokenizer:
    """Load the tokenizer of a job. DataError if its file has changed since the preparation started."""
    tokenizer = load_tokenizer(job.tokenizer, job.bos, job.eos)
    if tokenizer.info.sha256 != job.tokenizer_sha256:
        raise DataError(f"data.tokenizer={job.tokenizer} changed while data was being prepared: start again")
    return tokenizer


# Several workers


class _Worker(SpawnProcess):
    """A process that exits when its parent kills it or exits. It blocks SIGINT and SIGTERM, which a terminal
    or Slurm sends to both."""

    def start(self) -> None:
        program = sys.modules["__main__"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        # otherwise the new process would import the main program, and torch with it
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = program
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerContext(SpawnContext):
    """Starts workers."""

    Process = _Worker


def tokenize_pieces(pieces: Sequence[Piece], job: TokenizeJob, workers: int, on_batch: OnBatch) -> None:
    """Tokenize the pieces in `workers` processes, which end with the call; `on_batch` follows each piece.
    Raises DataError."""
    with start_workers(workers) as pool:
        try:
            jobs = {pool.submit(tokenize_in_worker, piece, job): piece for piece in pieces}
            for done in as_completed(jobs):
                on_batch(jobs[done].size_bytes, done.result())
        except BrokenProcessPool:
            raise DataError(
                "a worker process of the preparation was killed (perhaps memory ran out): start again, with "
                "fewer (--workers); finished shards are kept"
            ) from None
        finally:  # on Ctrl-C, and on an error in one piece, do not wait for the other pieces
            kill_workers()


def start_workers(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that tokenize, which end with this process. They start now: a start hides
    the main program, which must not happen while that runs on. DataError if the system cannot start them."""
    pool = ProcessPoolExecutor(workers, _WorkerContext(), start_worker)
    try:
        for _ in range(workers):
            pool.submit(os.getpid)
    except OSError as error:
        raise DataError(
            f"the processes that tokenize cannot be started ({error.strerror}): use fewer (data.workers, "
            "--workers), or raise the limits on open files and processes (ulimit -n, ulimit -u)"
        ) from None
    return pool


def kill_workers() -> None:
    for worker in multiprocessing.active_children():
        if isinstance(worker, _Worker):
            worker.kill()
