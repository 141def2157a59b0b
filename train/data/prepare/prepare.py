"""From the text of a source to a folder of tokenised shards, whole or not at all, and begun again where it
was cut off. It is prepared by one process at a time, in a folder beside the one that it will become."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.train.data.prepare.partition import Piece, cut_source
from meshwright.train.data.prepare.worker import (
    NoSpace,
    TokenizedPiece,
    TokenizeJob,
    piece_key,
    read_result,
    result_path,
    token_dtype,
    tokenise_piece,
)
from meshwright.train.data.prepare.worker_pool import tokenise_pieces
from meshwright.train.data.token_store import (
    MANIFEST,
    MANIFEST_BYTES,
    SPLITS,
    ShardInfo,
    SourceFile,
    TokenStoreManifest,
    hash_file,
    manifest_to_json,
    read_manifest,
)
from meshwright.train.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from meshwright.train.errors import DataError
from meshwright.train.files import NO_LOCKS, flush_folder, make_lock, write_whole


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """The folder to work in, one process at a time; it goes when `folder` is there, or when nothing in it is
    worth keeping."""
    partial, lock_file = (folder.with_name(f".{folder.name}.{ending}") for ending in ("partial", "lock"))
    lock = make_lock(lock_file)
    try:
        # First: where no file can be made filelock would take the error for another's lock, and wait.
        partial.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            # without locks two processes write the same bytes, each file by one rename
        for name in ("data", "results"):
            (partial / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        lock.release()
        raise DataError(
            f"data.cache_dir or OUT_DIR: cannot write to {folder.parent} ({error}): name another folder"
        ) from None
    try:
        yield partial
    finally:
        if is_there(folder) or not any((partial / "results").iterdir()):
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                lock_file.unlink()  # whoever waits for it notices, and makes a new one
        lock.release()


def is_there(folder: Path) -> bool:
    """Whether something has this name already; an empty folder is nothing, and is replaced."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


@dataclass(frozen=True)
class PrepareSettings:
    """How text becomes shards.

    Args:
        held_out: share of documents kept for evaluation; at least one document and never all, but none if it
            is 0
        text_field: field of a record that holds its text
        shard_bytes: about how much of the source becomes one shard
        workers: processes; with 1 it is this process, and the tokenizers library uses threads
    """

    held_out: float = 0.02
    text_field: str = "text"
    shard_bytes: int = 64 * 2**20
    workers: int = 1


@dataclass(frozen=True)
class Progress:
    """How far the work is.

    Args:
        done_bytes, total_bytes: of the source, kept shards included
        kept_bytes: of the source, whose shards an earlier start had finished
        documents, tokens: tokenised by this start
        elapsed_s: since this start
    """

    done_bytes: int
    total_bytes: int
    kept_bytes: int
    documents: int
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
    """Tokenise a source into `folder`, which appears by one rename, whole; if it is there already, of the
    same, it counts.

    Work goes on in .NAME.partial beside it, where shards that an earlier start finished are kept if they are
    of the same text, tokenizer and settings. Raises DataError.
    """
    if folder.name in ("", ".."):
        raise DataError(
            f"OUT_DIR={folder} names no new folder: give it a name of its own, such as {folder / 'tokens'}"
        )
    tokenizer = load_tokenizer(tokenizer_name, bos, eos)
    check_text = source != "stdlib" or tokenizer.info.sha256 != ""  # bytes take the standard library as it is
    files, pieces = cut_source(source, settings.held_out, settings.shard_bytes, check_text)
    if sum(len(json.dumps(file.name)) + 150 for file in files) > MANIFEST_BYTES:
        raise DataError(
            f"{source} has {len(files):,} files, too many to be listed: pack them into .jsonl files"
        )
    wanted = _empty_manifest(tokenizer, files, settings)
    with partial_folder(folder) as partial:
        if is_there(folder):
            return check_same(folder, wanted)
        job = TokenizeJob(
            tokenizer_name,
            bos,
            eos,
            tokenizer.info.sha256,
            settings.text_field,
            settings.held_out,
            str(partial / "data"),
            str(partial / "results"),
            check_text,
        )
        results = _Work(job, tokenizer, settings.workers, folder, on_progress).run(pieces)
        manifest = _fill_manifest(wanted, results, source)
        try:
            _publish(partial / "data", folder, manifest, tokenizer)
        except OSError as error:
            if not is_there(folder):  # another run may have finished the same: then that one counts
                raise DataError(
                    f"cannot write to {folder.parent} ({error.strerror}): name another folder"
                ) from None
        return manifest


def check_same(folder: Path, wanted: TokenStoreManifest) -> TokenStoreManifest:
    """The manifest of a folder that is there, if it is of the same text, tokenizer and settings. Raises
    DataError."""
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder} is there already and holds no prepared data: name another folder")
    there = read_manifest(folder)
    for what, old, new in (
        ("another tokenizer", replace(there.tokenizer, name=""), replace(wanted.tokenizer, name="")),
        ("other text", there.sources, wanted.sources),
        *(
            (f"{key}={there.settings.get(key)}", there.settings.get(key), wanted.settings[key])
            for key in wanted.settings
        ),
    ):
        if old != new:
            raise DataError(
                f"{folder} is there already and was made with {what}: name another folder, or remove that one"
            )
    return there


class _Work:
    """The pieces of a source on their way to shards."""

    def __init__(
        self,
        job: TokenizeJob,
        tokenizer: Tokenizer,
        workers: int,
        folder: Path,
        on_progress: OnProgress | None,
    ) -> None:
        self._job, self._tokenizer, self._workers, self._folder = job, tokenizer, workers, folder
        self._on_progress = on_progress
        self._start_s = time.perf_counter()
        self._total = self._kept = self._done = self._documents = self._tokens = 0

    def run(self, pieces: list[Piece]) -> list[TokenizedPiece]:
        """The result of every piece; then once more of one, if all documents were in one split."""
        results = self._finish(pieces)
        changed = _balance(pieces, results) if self._job.held_out else pieces
        return results if changed == pieces else self._finish(changed)

    def _finish(self, pieces: list[Piece]) -> list[TokenizedPiece]:
        kept = {piece.index: result for piece in pieces if (result := _kept_result(self._job, piece))}
        _remove_others(
            Path(self._job.folder),
            [shard for result in kept.values() for shard in result.shards.values() if shard],
        )
        left = [piece for piece in pieces if piece.index not in kept]
        self._total = sum(piece.size_bytes for piece in pieces)
        self._done = self._kept = self._total - sum(piece.size_bytes for piece in left)
        self._count(0, 0, 0)
        try:
            if self._workers == 1:
                for piece in left:
                    tokenise_piece(piece, self._job, self._tokenizer, self._count)
            else:
                tokenise_pieces(left, self._job, self._workers, self._count)
        except NoSpace as error:
            raise DataError(self._no_space(str(error))) from None
        return [read_result(result_path(self._job, piece)) for piece in pieces]

    def _count(self, done_bytes: int, documents: int, tokens: int) -> None:
        self._done += done_bytes
        self._documents += documents
        self._tokens += tokens
        if self._on_progress is not None:
            elapsed_s = time.perf_counter() - self._start_s
            self._on_progress(
                Progress(self._done, self._total, self._kept, self._documents, self._tokens, elapsed_s)
            )

    def _no_space(self, said: str) -> str:
        """What to say when the disk is full: what is left needs as much per byte of source as what has been
        done."""
        per_byte = self._tokens / (self._done - self._kept) if self._done > self._kept else 1.0
        needed_bytes = (
            (self._total - self._kept) * per_byte * token_dtype(self._tokenizer.info.vocab_size).itemsize
        )
        free_bytes = shutil.disk_usage(self._job.folder).free
        return (
            f"no space left for {self._folder} ({said}): about {needed_bytes / 1e6:,.1f} MB are still "
            f"needed, {free_bytes / 1e6:,.1f} MB are free. Make room and start again, or remove "
            f"{Path(self._job.folder).parent}, where finished shards are kept"
        )


def _balance(pieces: list[Piece], results: Sequence[TokenizedPiece]) -> list[Piece]:
    """The pieces, but with one changed if a split has no document: its likeliest record moves there, or the
    only one is cut."""
    documents = [sum(shard.documents for r in results if (shard := r.shards[split])) for split in SPLITS]
    if all(documents) or not any(documents) or any(piece.cut or piece.swapped for piece in pieces):
        return pieces
    places = [r.highest if documents[0] == 0 else r.lowest for r in results]
    names = [place for place in places if place[1]]
    if not names:  # text files, which were chosen by name
        return pieces
    chosen = places.index(max(names) if documents[0] == 0 else min(names))
    change: dict[str, Any] = {"cut": True} if sum(documents) == 1 else {"swapped": places[chosen][1]}
    return [replace(piece, **change) if piece.index == chosen else piece for piece in pieces]


def _kept_result(job: TokenizeJob, piece: Piece) -> TokenizedPiece | None:
    """What an earlier start left of a piece, if it is of the same and its files are as they were written."""
    try:
        result = read_result(result_path(job, piece))
        shards = [shard for shard in result.shards.values() if shard]
        whole = all(
            hash_file(Path(job.folder, f"{shard.name}{suffix}")) == sha256
            for shard in shards
            for suffix, sha256 in ((".bin", shard.sha256), (".ends", shard.ends_sha256))
        )
        return result if whole and result.key == piece_key(job, piece) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _empty_manifest(
    tokenizer: Tokenizer, files: list[SourceFile], settings: PrepareSettings
) -> TokenStoreManifest:
    chosen = {"held_out": settings.held_out, "text_field": settings.text_field}
    return TokenStoreManifest(
        tokenizer.info, str(token_dtype(tokenizer.info.vocab_size)), tuple(files), {}, chosen
    )


def _fill_manifest(
    manifest: TokenStoreManifest, results: list[TokenizedPiece], source: str
) -> TokenStoreManifest:
    """With the shards of all pieces. Raises DataError if there are none."""
    empty = sum(result.empty for result in results)
    splits: dict[str, tuple[ShardInfo, ...]] = {
        split: tuple(shard for result in results if (shard := result.shards[split])) for split in SPLITS
    }
    if not any(splits.values()):
        raise DataError(
            f"data.source={source} holds no text: {len(manifest.sources):,} files with {empty:,} empty "
            "documents"
        )
    return replace(manifest, splits=splits, settings=manifest.settings | {"empty_documents": empty})


def _publish(data: Path, folder: Path, manifest: TokenStoreManifest, tokenizer: Tokenizer) -> None:
    """Complete the folder of shards and give it its name. Raises OSError and DataError."""
    _remove_others(data, [shard for split in SPLITS for shard in manifest.splits[split]])
    if isinstance(tokenizer, JsonTokenizer):
        _copy_tokenizer(tokenizer, data)
    write_whole(data / MANIFEST, manifest_to_json(manifest).encode())
    flush_folder(data)
    os.rename(data, folder)
    flush_folder(folder.parent)


def _remove_others(data: Path, shards: Sequence[ShardInfo]) -> None:
    """Leave these shards alone in the folder: what was cut off half-way goes, and what was made with other
    settings."""
    ours = {f"{shard.name}{suffix}" for shard in shards for suffix in (".bin", ".ends")}
    for path in data.iterdir():
        if path.name not in ours:
            path.unlink()


def _copy_tokenizer(tokenizer: JsonTokenizer, data: Path) -> None:
    write_whole(data / "tokenizer.json", tokenizer.path.read_bytes())
    if hash_file(data / "tokenizer.json") != tokenizer.info.sha256:
        raise DataError(f"{tokenizer.path} changed while data was being prepared: start again")
    beside = tokenizer.path.with_name("tokenizer_config.json")
    if beside.is_file():
        write_whole(data / beside.name, beside.read_bytes())
