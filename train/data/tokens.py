"""Text tokenised once, into two files of token ids on disk (training and held-out) that are then memory-mapped."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.config import DataConfig, DataError
from train.data.documents import find_documents

SEPARATOR = 256  # the byte tokenizer's one special id: end of a document
VOCAB_SIZE = 257
_FORMAT = 1  # raise when the files' layout changes: old caches are then left alone


@dataclass(frozen=True)
class TokenFiles:
    """Token ids, uint16 and memory-mapped: documents one after another, each followed by SEPARATOR."""

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    description: str


def check_vocabulary(vocab_size: int) -> None:
    """DataError if the model has fewer ids than the byte tokenizer."""
    if vocab_size < VOCAB_SIZE:
        raise DataError(f"model.vocab_size={vocab_size} is smaller than the {VOCAB_SIZE} ids of data.tokenizer=bytes: "
                        f"use {VOCAB_SIZE} or more")  # fmt: skip


def load_tokens(config: DataConfig) -> TokenFiles:
    """The tokens of `data.source`, from the cache, or tokenised into it first.

    The cache's name is a fingerprint of the source (names, sizes, times) and the tokenizer; it appears by one
    rename, whole. Raises DataError where the source cannot be used.
    """
    documents = find_documents(config.source)
    stats = [(name, s.st_size, s.st_mtime_ns) for name, path in documents for s in [path.stat()]]
    key = hashlib.sha256(json.dumps([_FORMAT, config.tokenizer, config.held_out, stats]).encode()).hexdigest()[:16]
    root = Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "meshwright"
    folder = root / f"tokens-{key}"
    if not folder.exists():
        _write_cache(folder, documents, config.held_out)
    train, held_out = (np.memmap(folder / f"{split}.bin", np.uint16, "r") for split in ("train", "held_out"))
    return TokenFiles(train, held_out, f"{config.source}: {len(documents):,} documents, {len(train):,} training and "
                                       f"{len(held_out):,} held-out byte tokens in {folder}")  # fmt: skip


def _write_cache(folder: Path, documents: list[tuple[str, Path]], share: float) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write to {folder.parent} ({error}): name another folder") from None
    try:
        _write_splits(partial, documents, share)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():  # another run may have finished the same cache first: then that one counts
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_splits(folder: Path, documents: list[tuple[str, Path]], share: float) -> None:
    """Write train.bin and held_out.bin. One document alone is cut in two: its end is held out."""
    held_out = choose_held_out([name for name, _ in documents], share)
    with open(folder / "train.bin", "wb") as train_file, open(folder / "held_out.bin", "wb") as held_out_file:
        for name, path in documents:
            try:
                text = path.read_bytes()
            except OSError as error:
                raise DataError(f"data.source: cannot read {path} ({error.strerror})") from None
            if len(documents) == 1:
                cut = len(text) - max(1, round(len(text) * share))
                train_file.write(encode(text[:cut]))
                held_out_file.write(encode(text[cut:]))
            else:
                (held_out_file if name in held_out else train_file).write(encode(text))


def choose_held_out(names: list[str], share: float) -> set[str]:
    """Names whose hash falls into `share`; at least one name, and never all. Other documents do not matter."""
    by_hash = sorted(names, key=_unit_hash)
    count = sum(_unit_hash(name) < share for name in names)
    return set(by_hash[: min(max(count, 1), len(names) - 1)])


def _unit_hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def encode(text: bytes) -> bytes:
    """One document as uint16 ids, its separator at the end."""
    ids = np.empty(len(text) + 1, np.uint16)
    ids[:-1] = np.frombuffer(text, np.uint8)
    ids[-1] = SEPARATOR
    return ids.tobytes()


def decode(ids: list[int]) -> str:
    """Token ids as text; separators and ids without a byte are left out, broken UTF-8 is shown as such."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
