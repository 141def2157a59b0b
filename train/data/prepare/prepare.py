"""Tokenizes a source into a folder of shards that appears only when it is complete.

One process at a time works in a hidden folder next to the final one. A restart keeps finished shards.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.train.data.prepare.partition import Piece, cut_source
from meshwright.train.data.prepare.worker import (
    PrepareSettings,
    TokenizedPiece,
    TokenizeJob,
    piece_key,
    read_result,
    result_path,
    token_dtype,
    tokenize_piece,
    tokenize_pieces,
)
from meshwright.train.data.token_store import (
    MANIFEST,
    MANIFEST_BYTES,
    SPLITS,
    BadRecords,
    ShardInfo,
    TokenStoreManifest,
    hash_file,
    manifest_to_json,
    read_manifest,
)
from meshwright.train.data.tokenizer import FILE, JsonTokenizer, Tokenizer, load_tokenizer, tokenizer_files
from meshwright.train.errors import DataError
from meshwright.train.files import NO_LOCKS, flush_folder, make_lock, write_atomically


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Create and lock the hidden folder to work in.

    At the end of the context it is deleted if `folder` exists or it contains no finished shard. Raises
    DataError.
    """
    partial, lock_file = (folder.with_name(f".{folder.name}.{ending}") for ending in ("partial", "lock"))
    lock = make_lock(lock_file)
    try:
        # First, because without write access filelock would wait, as if another process had the lock. Not in
        # `partial`, which a process that ends may delete at this moment.
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            # without locks, two processes write the same bytes, and each file appears by one rename
        for name in ("data", "results"):
            (partial / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        lock.release()
        raise DataError(
            f"data.cache_dir or OUT_DIR: cannot write to {folder.parent} ({error}): use another folder"
        ) from None
    try:
        yield partial
    finally:
        if exists_nonempty(folder) or not any((partial / "results").iterdir()):
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                lock_file.unlink()  # a process that waits for it notices, and creates a new one
        lock.release()


def exists_nonempty(folder: Path) -> bool:
    """Whether a file or a non-empty folder has this name; an empty folder is replaced."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation in bytes of the source, of which an earlier start finished `kept_bytes`; and
    the tokens and seconds of this start."""

    done_bytes: int
    total_bytes: int
    kept_bytes: int
    tokens: int
    elapsed_s: float


OnProgress = Callable[[Progress], None]


def prepare(
    source: str,
    tokenizer_name: str,
    bos: str,
    eos: str,
    folder: Path,
    settings: PrepareSettings,
    on_progress: OnProgress | None = None,
) -> TokenStoreManifest:
    """Tokenize a source into `folder`, which appears complete by one rename.

    A `folder` that exists and was made from the same text, tokenizer and settings is used as it is. The work
    is done in .NAME.partial next to it; shards that an earlier start finished are kept if text, tokenizer and
    settings are the same. Raises DataError.
    """
    if folder.name in ("", ".."):
        raise DataError(
            f"OUT_DIR={folder} is not a name for a new folder: use a name such as {folder / 'tokens'}"
        )
    tokenizer = load_tokenizer(tokenizer_name, bos, eos)
    # the bytes tokenizer also reads the files of the standard library that are not UTF-8
    check_text = source != "stdlib" or tokenizer.info.sha256 != ""
    files, pieces = cut_source(source, settings.held_out, settings.shard_bytes, check_text)
    if sum(len(json.dumps(file.name)) + 150 for file in files) > MANIFEST_BYTES:
        raise DataError(
            f"{source} has {len(files):,} files, too many for the manifest: combine them into .jsonl files"
        )
    chosen = {"held_out": settings.held_out, "text_field": settings.text_field}
    dtype = str(token_dtype(tokenizer.info.vocab_size))
    expected = TokenStoreManifest(tokenizer.info, dtype, tuple(files), {}, chosen)
    with partial_folder(folder) as partial:
        if exists_nonempty(folder):
            return check_same_inputs(folder, expected, settings.skip_bad)
        sha256 = tokenizer.info.sha256
        job = TokenizeJob(tokenizer_name, bos, eos, sha256, settings, partial, check_text)
        results = _tokenize(pieces, job, tokenizer, on_progress)
        if settings.held_out and (changed := _balance(pieces, results)) != pieces:
            results = _tokenize(changed, job, tokenizer, on_progress)
        manifest = _fill_manifest(expected, results, source, settings.skip_bad)
        try:
            _publish(job.data, folder, manifest, tokenizer)
        except OSError as error:
            if not exists_nonempty(folder):  # another process may have finished the same folder: use that
                raise DataError(
                    f"cannot write to {folder.parent} ({error.strerror}): use another folder"
                ) from None
        return manifest


def check_same_inputs(folder: Path, expected: TokenStoreManifest, skip_bad: int) -> TokenStoreManifest:
    """Return an existing folder's manifest. DataError if text, tokenizer or settings are not `expected`, or
    more than `skip_bad` records were left out."""
    if not (folder / MANIFEST).is_file():
        raise DataError(
            f"{folder} already exists and was not made by tools.prepare_data, so it is not replaced: use "
            "another folder"
        )
    existing = read_manifest(folder)
    for difference, old, new in (
        ("another tokenizer", replace(existing.tokenizer, name=""), replace(expected.tokenizer, name="")),
        ("other text", existing.sources, expected.sources),
        *(
            (f"{key}={existing.settings.get(key)}", existing.settings.get(key), expected.settings[key])
            for key in expected.settings
        ),
    ):
        if old != new:
            raise DataError(
                f"{folder} already exists and was made with {difference}: use another folder, or delete this "
                "one"
            )
    existing.bad_records.check(skip_bad)
    return existing


def _tokenize(
    pieces: list[Piece], job: TokenizeJob, tokenizer: Tokenizer, on_progress: OnProgress | None
) -> list[TokenizedPiece]:
    """Tokenize the pieces of a source that are not finished, and return the result of every piece."""
    start_s = time.perf_counter()
    kept = {piece.index: result for piece in pieces if (result := _kept_result(job, piece))}
    _remove_others(job.data, [shard for result in kept.values() for shard in result.shards.values() if shard])
    left = [piece for piece in pieces if piece.index not in kept]
    total_bytes = sum(piece.size_bytes for piece in pieces)
    kept_bytes = done_bytes = total_bytes - sum(piece.size_bytes for piece in left)
    all_tokens = 0

    def count(size_bytes: int, tokens: int) -> None:
        nonlocal done_bytes, all_tokens
        done_bytes, all_tokens = done_bytes + size_bytes, all_tokens + tokens
        if on_progress is not None:
            elapsed_s = time.perf_counter() - start_s
            on_progress(Progress(done_bytes, total_bytes, kept_bytes, all_tokens, elapsed_s))

    count(0, 0)
    workers = min(job.settings.workers, len(left))
    if workers > 1:
        tokenize_pieces(left, job, workers, count)
    else:
        for piece in left:
            tokenize_piece(piece, job, tokenizer, count)
    return [read_result(result_path(job.folder, piece.index)) for piece in pieces]


def _balance(pieces: list[Piece], results: Sequence[TokenizedPiece]) -> list[Piece]:
    """The pieces; if one split has no document, one piece is changed.

    The record whose hash is nearest to that split moves there; the only document of a source is cut in two.
    """
    documents = [sum(shard.documents for r in results if (shard := r.shards[split])) for split in SPLITS]
    if all(documents) or not any(documents) or any(piece.cut or piece.swapped for piece in pieces):
        return pieces
    places = [r.highest if documents[0] == 0 else r.lowest for r in results]
    names = [place for place in places if place[1]]
    if not names:  # text files, for which choose_held_out keeps both splits non-empty
        return pieces
    chosen = places.index(max(names) if documents[0] == 0 else min(names))
    change: dict[str, Any] = {"cut": True} if sum(documents) == 1 else {"swapped": places[chosen][1]}
    return [replace(piece, **change) if piece.index == chosen else piece for piece in pieces]


def _kept_result(job: TokenizeJob, piece: Piece) -> TokenizedPiece | None:
    """The result of a piece from an earlier start, if its inputs are the same and its files are intact."""
    try:
        result = read_result(result_path(job.folder, piece.index))
        shards = [shard for shard in result.shards.values() if shard]
        intact = all(
            hash_file(job.data / f"{shard.name}{suffix}") == sha256
            for shard in shards
            for suffix, sha256 in ((".bin", shard.sha256), (".ends", shard.ends_sha256))
        )
        return result if intact and result.key == piece_key(job, piece) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _fill_manifest(
    manifest: TokenStoreManifest, results: list[TokenizedPiece], source: str, skip_bad: int
) -> TokenStoreManifest:
    """Add the shards of all pieces to the manifest. DataError if there are none, or too many bad records."""
    empty = sum(result.empty for result in results)
    bad = sum((result.bad for result in results), BadRecords()).check(skip_bad)
    splits: dict[str, tuple[ShardInfo, ...]] = {
        split: tuple(shard for result in results if (shard := result.shards[split])) for split in SPLITS
    }
    if not any(splits.values()):
        raise DataError(
            f"data.source={source} contains no text: {len(manifest.sources):,} files with {empty:,} empty "
            f"documents and {bad.count:,} bad records"
        )
    settings = manifest.settings | {"empty_documents": empty}
    if bad.count:
        settings["bad_records"] = {"count": bad.count, "first": list(bad.first)}
    return replace(manifest, splits=splits, settings=settings)


def _publish(data: Path, folder: Path, manifest: TokenStoreManifest, tokenizer: Tokenizer) -> None:
    """Complete the folder of shards and rename it to its final name. Raises OSError and DataError."""
    _remove_others(data, [shard for split in SPLITS for shard in manifest.splits[split]])
    if isinstance(tokenizer, JsonTokenizer):
        for name, content in tokenizer_files(tokenizer.path).items():
            write_atomically(data / name, content)
        if hash_file(data / FILE) != tokenizer.info.sha256:
            raise DataError(f"{tokenizer.path} changed while data was being prepared: start again")
    write_atomically(data / MANIFEST, manifest_to_json(manifest).encode())
    flush_folder(data)
    os.rename(data, folder)
    flush_folder(folder.parent)


def _remove_others(data: Path, shards: Sequence[ShardInfo]) -> None:
    """Delete every file of the folder that belongs to none of these shards: partial files, and shards made
    with other settings."""
    kept = {f"{shard.name}{suffix}" for shard in shards for suffix in (".bin", ".ends")}
    for path in data.iterdir():
        if path.name not in kept:
            path.unlink()
