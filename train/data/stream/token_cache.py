"""Tokenized groups of a streamed corpus on this node's disk: fetched ahead by threads, tokenized by worker
processes, kept within `data.cache_gib`. The ranks of a node share the folder; what is missing is made again.

    raw/       what was fetched of a file, at its place in it, until it is tokenized
    data/      ids and document ends of each group, as in prepared data
    results/   what marks a group as finished
"""

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.background import BackgroundThread
from meshwright.train.data.prepare.partition import Part, Piece
from meshwright.train.data.prepare.worker import (
    TokenizeJob,
    kill_workers,
    read_result,
    result_path,
    start_workers,
    token_dtype,
    tokenize_in_worker,
)
from meshwright.train.data.stream.fetch import fetch_part, writing
from meshwright.train.data.stream.index import StreamGroup, StreamIndex, StreamShard
from meshwright.train.data.stream.lanes import GroupTokens
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.token_store import SPLITS, hash_file
from meshwright.train.errors import DataError
from meshwright.train.files import NO_LOCKS, make_lock

FETCHERS = 8  # threads, at least: most of them wait for the network
KILLED = 3  # times that a group may lose its worker process
RESERVE_BYTES = GIB  # of the disk, left free as far as that needs no file in use
TRIMS = 32  # of the whole cache: to look at all its files takes long
ORPHAN_S = 86400.0  # after which an unfinished file is of a process that was killed
_TRAIN = SPLITS[0]


@dataclass(frozen=True)
class CachedSource:
    """A streamed source: its name, its index, the location of each shard by name, and how to tokenize it."""

    name: str
    index: StreamIndex
    locations: Mapping[str, str]
    job: TokenizeJob
    vocab_size: int


@dataclass(frozen=True)
class CacheLimits:
    """`folder_bytes`: of the tokens of all ranks of this node; `share_bytes`: of those in the windows that
    this rank has open; `workers`: processes of this rank that tokenize."""

    folder_bytes: float
    share_bytes: float
    workers: int


class TokenCache:
    """The tokens of the windows of this rank's lanes. One thread at a time may call its methods."""

    def __init__(self, sources: Sequence[CachedSource], limits: CacheLimits, remote: Remote) -> None:
        self._sources, self._limits, self._remote = sources, limits, remote
        self._folder = sources[0].job.folder
        with writing(self._folder):
            for name in ("raw", "data", "results"):
                (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._pool, self._lock, self._closed = start_workers(limits.workers), threading.Lock(), Future[None]()
        self._threads = BackgroundThread("stream", max(FETCHERS, 2 * limits.workers))
        self._ahead = dict[tuple[int, int], dict[int, Future[GroupTokens]]]()
        self._open = dict[tuple[int, int], Sequence[GroupTokens]]()
        self._used = set[int]()  # by this process: names of groups
        # bytes of groups to make before the cache is trimmed again; of the largest group made so far
        self._room, self._largest = 0.0, 0
        self._making = set[int]()  # names of groups

    def expect(self, lane: tuple[int, int], groups: Sequence[int]) -> None:
        """Begin to fetch the groups of the window for which a lane's first turn will ask."""
        self._ahead[lane] = {number: self._ask(lane[0], number) for number in groups}

    def turn(
        self, lane: tuple[int, int], groups: Sequence[int], following: Sequence[int]
    ) -> Sequence[GroupTokens]:
        """Return the tokens of a lane's window, which takes the place of that before, and begin to fetch the
        groups of the window after it, if there is room. `lane`: number of the source and of the lane. Raises
        DataError, and CancelledError once the cache is closed."""
        ahead = self._ahead.pop(lane, {})
        asked = [ahead.get(number) or self._ask(lane[0], number) for number in groups]
        self._open[lane] = [self._await(future) for future in asked]
        held = sum(group.size_bytes for window in self._open.values() for group in window)
        if held > self._limits.share_bytes:
            raise DataError(
                f"the open windows of {len(self._open)} lanes have {held / GIB:.3g} GiB of tokens, but this "
                f"rank's share of data.cache_gib is {self._limits.share_bytes / GIB:.3g} GiB: raise it, or "
                f"use smaller row groups than those of {self._sources[lane[0]].name}"
            )
        if 2 * held <= self._limits.share_bytes:
            self._ahead[lane] = {number: self._ask(lane[0], number) for number in following}
        return self._open[lane]

    def close(self) -> None:
        """End the worker processes and a wait in `turn`; threads that wait for a source are left alone."""
        self._closed.set_result(None)
        for of_lane in list(self._ahead.values()):  # a turn may go on
            for future in of_lane.values():
                future.cancel()
        self._threads.close(limit_s=0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        kill_workers()

    def _ask(self, source: int, number: int) -> Future[GroupTokens]:
        return self._threads.submit(partial(self._make, self._sources[source], number))

    def _await(self, future: Future[GroupTokens]) -> GroupTokens:
        either: list[Future[Any]] = [future, self._closed]
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            raise CancelledError
        return future.result()

    # in the threads

    def _make(self, source: CachedSource, number: int) -> GroupTokens:
        """Return the tokens of a group, made unless they are there."""
        group = source.index.group(number)
        shards = source.index.shards[group.shard : group.shard + group.shards]
        name = _name(source.job, group, shards)
        with _alone(self._folder / "raw" / f"{name}.lock"):
            tokens = self._find(source, name)
            if tokens is None:
                self._make_room(name)
                try:
                    self._tokenize(source, group, shards, name)
                    tokens = self._find(source, name)
                finally:
                    with self._lock:
                        self._making.discard(name)
                        self._largest = max(self._largest, tokens.size_bytes if tokens else 0)
        if tokens is None:
            raise DataError(
                f"{self._folder}: the tokens of {shards[0].name} are gone or damaged right after they were "
                "written: check the disk, or use another data.cache_dir"
            )
        return tokens

    def _find(self, source: CachedSource, name: int) -> GroupTokens | None:
        """The tokens of a finished group, if its files are intact, and it has no more bad records than are
        left out, which making it again would report."""
        try:
            result = read_result(result_path(self._folder, name))
            result.bad.check(source.job.settings.skip_bad)
            shard = result.shards[_TRAIN]
            if shard is None:
                return GroupTokens(np.empty(0, np.uint16), np.empty(0, np.int64), name)
            ids, ends = (_path(self._folder, name, suffix) for suffix in (".bin", ".ends"))
            os.utime(ids)
            hashes = shard.sha256, shard.ends_sha256
            if name not in self._used and (hash_file(ids), hash_file(ends)) != hashes:
                return None
            self._used.add(name)
            dtype = token_dtype(source.vocab_size).newbyteorder("<")
            # as a plain array: a memmap takes ten times as long to cut
            tokens = np.asarray(np.memmap(ids, dtype, "r"))
            return GroupTokens(tokens, np.fromfile(ends, "<u8").astype(np.int64), name)
        except (OSError, ValueError):
            return None

    def _tokenize(
        self, source: CachedSource, group: StreamGroup, shards: Sequence[StreamShard], name: int
    ) -> None:
        # another name in each process and thread: without locks several may make the group
        raw, stem, parts = self._folder / "raw", f"{name}-{secrets.token_hex(8)}", list[Part]()
        try:
            with writing(self._folder):
                for number, shard in enumerate(shards):
                    location = source.locations[shard.name]
                    parts.append(fetch_part(self._remote, shard, location, group, raw / f"{stem}-{number}"))
            self._run(Piece(name, tuple(parts)), source.job)
        except DataError as error:
            message = str(error)
            for part in parts:
                message = message.replace(part.path, part.name)
            raise DataError(message) from None
        finally:
            for path in raw.glob(f"{stem}-*"):
                path.unlink(missing_ok=True)

    def _run(self, piece: Piece, job: TokenizeJob) -> None:
        """Tokenize a piece in a worker process, again in another one if that was killed."""
        for _ in range(KILLED):
            with self._lock:
                pool = self._pool
            try:
                pool.submit(tokenize_in_worker, piece, job).result()
                return
            except BrokenProcessPool:
                with self._lock:
                    if self._pool is pool and not self._closed.done():
                        self._pool = start_workers(self._limits.workers)
        raise DataError(
            f"worker processes were killed {KILLED} times while {piece.parts[0].name} was tokenized (perhaps "
            "memory ran out): use fewer (data.workers); the same command goes on"
        )

    def _make_room(self, name: int) -> None:
        """Trim the cache unless there is room for a group as large as any before; no trim deletes this one
        while it is made."""
        with self._lock:
            self._making.add(name)
            self._room -= max(1, self._largest)
            full = self._room < 0
        if full:
            with writing(self._folder):
                self._trim()

    def _trim(self) -> None:
        """Delete the groups that were used least lately, and are not of a window that is open or the next of
        its lane, until all ranks have room for what they make before they trim again."""
        ahead = [future for of_lane in list(self._ahead.values()) for future in of_lane.values()]
        done = [f.result() for f in ahead if f.done() and not (f.cancelled() or f.exception())]
        windows = [*self._open.values(), done]
        with self._lock:
            held = {*self._making, *(group.name for window in windows for group in window)}
        for name in held:  # other ranks do not know that they are in use
            with contextlib.suppress(OSError):
                os.utime(_path(self._folder, name, ".bin"))
        files, now_s = list[tuple[float, int, str]](), time.time()
        for entry in (*os.scandir(self._folder / "raw"), *os.scandir(self._folder / "data")):
            with contextlib.suppress(OSError):  # another rank has just deleted it
                stat = entry.stat()
                if entry.name.endswith((".bin", ".ends")):
                    files.append((stat.st_mtime, stat.st_size, entry.path))
                elif stat.st_mtime < now_s - ORPHAN_S:
                    os.unlink(entry.path)
        sizes = {path: size for _, size, path in files}
        used = sum(sizes.values())
        disk = os.statvfs(self._folder)
        most = min(self._limits.folder_bytes, used + disk.f_bavail * disk.f_frsize - RESERVE_BYTES)
        ranks = max(1.0, self._limits.folder_bytes / self._limits.share_bytes)
        left = most - most / TRIMS
        for _, size, path in sorted(files):
            if used <= left:
                break
            if path.endswith(".bin") and (name := int(path[:-4].rpartition("-")[2])) not in held:
                ends = Path(path).with_suffix(".ends")
                used -= size + sizes.get(str(ends), 0)
                for each in (result_path(self._folder, name), ends, Path(path)):
                    each.unlink(missing_ok=True)
        with self._lock:
            self._room = min(most - used, most / TRIMS) / ranks


def _name(job: TokenizeJob, group: StreamGroup, shards: Sequence[StreamShard]) -> int:
    """A number that names a group's files: a hash of all that determines them."""
    files = [(shard.name, shard.size_bytes, shard.version, shard.content) for shard in shards]
    inputs = [job.tokenizer_sha256, job.bos, job.eos, job.settings.text_field, job.check_text, files]
    inputs += [group.first, group.last]
    return int(hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:15], 16)


def _path(folder: Path, name: int, suffix: str) -> Path:
    return folder / "data" / f"{_TRAIN}-{name:05d}{suffix}"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context that one thread of all processes of this node is in. Without locks two of them write the same
    bytes, and each file appears by one rename."""
    lock = make_lock(path)
    with writing(path.parent):
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # a process that waits for it notices, and makes a new one
        lock.release()
