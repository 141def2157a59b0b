"""The byte tokenizer, and a text's token files: training and held-out, written once."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from train.data.config import DataError

SEPARATOR = 256  # the byte tokenizer's one special id: end of a document
VOCAB_SIZE = 257


def write_cache(folder: Path, documents: list[tuple[str, Path]], share: float) -> None:
    """Tokenise documents into `folder`, which appears by one rename, whole. Raises DataError."""
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
