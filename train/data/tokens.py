"""Text tokenised once, into two files of token ids on disk (training and held-out) that are then memory-mapped."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.config import DataConfig, DataError
from train.data.documents import find_documents
from train.data.tokenise import VOCAB_SIZE, write_cache

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
        write_cache(folder, documents, config.held_out)
    train, held_out = (np.memmap(folder / f"{split}.bin", np.uint16, "r") for split in ("train", "held_out"))
    return TokenFiles(train, held_out, f"{config.source}: {len(documents):,} documents, {len(train):,} training and "
                                       f"{len(held_out):,} held-out byte tokens in {folder}")  # fmt: skip
