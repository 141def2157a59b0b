"""Whether prepared shards are still what their manifest says, read once and remembered until a file
changes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshwright.train.data.config import DataError
from meshwright.train.data.store import MANIFEST, Manifest, check_size, read_manifest, sizes

THREADS = 4  # hashing lets go of the interpreter


def verify_once(folder: Path, remembered: Path) -> None:
    """Compare every file of a prepared folder with its checksum, unless that was done before and no file has
    another size or time since; `remembered` is the folder where that is noted. Raises DataError naming the
    file."""
    names = [MANIFEST, *(name for name, _ in _checksums(read_manifest(folder)))]
    seen = json.dumps({name: _stamp(folder / name) for name in names}).encode()
    note = remembered / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if note.is_file() and note.stat().st_size == len(seen) and note.read_bytes() == seen:
            return
    verify(folder)
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower next time
        remembered.mkdir(parents=True, exist_ok=True)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_bytes(seen)
        os.replace(partial, note)


def verify(folder: Path) -> None:
    """Compare every file of a prepared folder with its checksum. Raises DataError naming the file."""
    manifest = read_manifest(folder)
    wanted = dict(_checksums(manifest))
    # first: what is no file, or leads elsewhere, is not read at all
    for name, size_bytes in sizes(manifest).items():
        check_size(folder / name, size_bytes)
    with ThreadPoolExecutor(THREADS) as pool:
        for name, found in zip(wanted, pool.map(lambda name: hash_file(folder / name), wanted), strict=True):
            if found != wanted[name]:
                raise DataError(
                    f"{folder / name} has changed since it was prepared: its sha256 is {found[:16]}..., "
                    f"{folder / MANIFEST} says {wanted[name][:16]}...: prepare the data again"
                )
            if name.endswith(".ends") and (np.diff(np.fromfile(folder / name, "<i8"), prepend=0) <= 0).any():
                raise DataError(
                    f"{folder / name} does not list documents one after another: prepare the data again"
                )


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal. DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): prepare the data again") from None


def _checksums(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for shards in manifest.splits.values():
        for shard in shards:
            yield f"{shard.name}.bin", shard.sha256
            yield f"{shard.name}.ends", shard.ends_sha256


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}, but {path.parent / MANIFEST} lists it: prepare the data again"
        ) from None
    # The last two are others in a copy that was given the file's time, as on another node's disk under the
    # same path.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
