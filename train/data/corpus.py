"""The data of a run: prepared folders, and raw text that one process of each node tokenizes into a cache.
The data is the same on every rank, and is checked before tokenizing and before the first step."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.parallel.compile.apply import user_cache
from meshwright.parallel.mesh import gather_from_all
from meshwright.train.config import DataConfig, is_remote
from meshwright.train.data.sample_order import CYCLE, shares
from meshwright.train.data.sequences import SequenceShape, count_sequences
from meshwright.train.data.sources import HF_PREFIX, RECORD_SUFFIXES, describe_unread, find_files, find_unread
from meshwright.train.data.token_store import (
    FORMAT,
    MANIFEST,
    SPLITS,
    Source,
    TokenStoreManifest,
    TokenStream,
    open_split,
    read_manifest,
)
from meshwright.train.data.tokenizer import (
    FILE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    TokenizerInfo,
    check_vocabulary,
    load_tokenizer,
)
from meshwright.train.data.verify import verify_together
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError
from meshwright.train.files import user_path


@dataclass(frozen=True)
class Corpus:
    """All data of a run.

    Args:
        evaluation_sets: name -> tokens held out of the sources, and those of data.validation
        description: a line of text that is printed at the start of a run
        fingerprint: hash of the shards, the mixture's weights and data.packing, which with the seed and
            train.seq_len determine the order of the training sequences
    """

    sources: tuple[Source, ...]
    evaluation_sets: dict[str, TokenStream]
    tokenizer: TokenizerInfo
    description: str
    fingerprint: str


@dataclass(frozen=True)
class Prepared:
    """The prepared folders of a config's data: of the training sources, of the validation sets by name, and
    the manifests of all."""

    sources: dict[str, Path]
    validation: dict[str, Path]
    manifests: dict[Path, TokenStoreManifest]


def find_prepared(config: DataConfig) -> Prepared:
    """Return the prepared folders of a config; raw text is tokenized into the cache if it is not there yet.
    Raises DataError."""
    sources = {source: find_folder(source, config) for source in prepared_sources(config)}
    validation = {
        name: find_folder(source, config, held_out=0.0) for name, source in config.validation.items()
    }
    folders = (*sources.values(), *validation.values())
    return Prepared(sources, validation, {folder: read_manifest(folder) for folder in folders})


def open_corpus(config: DataConfig, prepared: Prepared) -> Corpus:
    """Return the data in prepared folders, whose files have been checked. Raises DataError."""
    folders, validation, manifests = prepared.sources, prepared.validation, prepared.manifests
    tokenizer = _common_tokenizer(
        {folder: manifest.tokenizer for folder, manifest in manifests.items()}, config
    )
    # Sorted by their hashes, so that the sample order depends neither on names nor on the order in the
    # config.
    hashes = {
        source: [shard.sha256 for shard in manifests[folder].splits["train"]]
        for source, folder in folders.items()
    }
    folders = {source: folders[source] for source in sorted(folders, key=lambda source: hashes[source])}
    names = short_names(list(folders))
    held_out = {
        names[source] if config.mixture else "held_out": open_split(folder, manifests[folder], "held_out")
        for source, folder in folders.items()
        if manifests[folder].splits["held_out"]
    }
    if duplicates := held_out.keys() & validation.keys():
        raise DataError(
            f"data.validation.{min(duplicates)}: the documents held out of the training data already have "
            "this name: use another name"
        )
    weights = [config.mixture.get(source, 1.0) for source in folders]
    sources = [hashes[source] for source in folders], shares(tuple(weights)) if weights else ()
    order = json.dumps([config.factory] if config.factory else [*sources, config.packing])
    return Corpus(
        sources=tuple(
            Source(names[source], weight, open_split(folder, manifests[folder], "train"))
            for (source, folder), weight in zip(folders.items(), weights, strict=True)
        ),
        evaluation_sets=held_out
        | {name: open_split(folder, manifests[folder], *SPLITS) for name, folder in validation.items()},
        tokenizer=tokenizer,
        description=config.factory
        or "; ".join(_describe(source, folder, manifests[folder]) for source, folder in folders.items()),
        fingerprint=hashlib.sha256(order.encode()).hexdigest()[:16],
    )


def prepared_sources(config: DataConfig) -> tuple[str, ...]:
    """Return the training sources that are tokenized before the first step."""
    return () if config.streamed else config.training_sources


def find_folder(source: str, config: DataConfig, held_out: float | None = None) -> Path:
    """Return the prepared folder of a source: the source itself, or a folder in the cache, made if missing.

    The cache folder's name is a hash of the source's files (names, sizes, times), how they are read, the
    tokenizer and the settings. `held_out`: share of documents to hold out; None takes data.eval_fraction.
    Raises DataError.
    """
    if is_prepared(source):
        return user_path(source, "data.source")
    if is_remote(source):
        from meshwright.train.data.stream.fetch import fetch_all  # late: few runs have one
        from meshwright.train.data.stream.remote import Remote
        from meshwright.train.data.stream.shards import find_shards

        shards, remote = find_shards(source, "data.validation"), Remote(config.fetch_s or math.inf)
        source = str(fetch_all(shards, cache_root(config), remote, MAX_RAW_BYTES))
    files = [(name, s.st_size, s.st_mtime_ns) for name, path in find_files(source) for s in [path.stat()]]
    share = config.eval_fraction if held_out is None else held_out
    tokenizer = load_tokenizer(config.tokenizer, config.bos, config.eos).info
    key = [FORMAT, RECORD_SUFFIXES, vars(tokenizer), share, config.text_field, files]
    folder = cache_root(config) / f"tokens-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    if not folder.exists():
        from meshwright.train.data.prepare.prepare import prepare
        from meshwright.train.data.prepare.worker import PrepareSettings

        settings = PrepareSettings(share, config.text_field, skip_bad=config.skip_bad)
        prepare(source, config.tokenizer, config.bos, config.eos, folder, settings)
    read_manifest(folder).bad_records.check(config.skip_bad)
    return folder


def find_tokenizer(config: DataConfig) -> Tokenizer:
    """Load the tokenizer of a config's data: data.tokenizer, or with auto that of the prepared data.

    Raises DataError.
    """
    file = find_tokenizer_file(config)
    if config.tokenizer != "auto" or file is None:
        return load_tokenizer(config.tokenizer, config.bos, config.eos)
    info = read_manifest(file.parent).tokenizer
    return JsonTokenizer(file, info=info) if info.sha256 else ByteTokenizer()


def find_tokenizer_file(config: DataConfig) -> Path | None:
    """Return the tokenizer.json of a config's data; it may be missing, and is None for bytes."""
    source = next(iter(config.mixture), config.source)
    if config.tokenizer == "auto" and is_prepared(source):
        return user_path(source, "data.source") / FILE
    if config.tokenizer in ("auto", "bytes"):
        return None
    path = user_path(config.tokenizer, "data.tokenizer")
    return path / FILE if path.is_dir() else path


def is_prepared(source: str) -> bool:
    """Whether a source is a folder made by tools.prepare_data."""
    named = source.startswith(HF_PREFIX) or is_remote(source)
    return not named and (user_path(source, "data.source") / MANIFEST).is_file()


def cache_root(config: DataConfig) -> Path:
    """The folder of tokenized text: data.cache_dir, or this user's cache."""
    return user_path(config.cache_dir, "data.cache_dir") if config.cache_dir else user_cache()


def _common_tokenizer(infos: dict[Path, TokenizerInfo], config: DataConfig) -> TokenizerInfo:
    """The tokenizer of all prepared folders. DataError if they differ, or differ from data.tokenizer."""
    if not infos:  # of a data.factory or a stream
        return load_tokenizer(config.tokenizer, config.bos, config.eos).info
    (first, tokenizer), *others = infos.items()
    for folder, info in others:
        if not _same_tokenizer(tokenizer, info):
            raise DataError(
                "all data of a run must have the same tokenizer, but "
                f"{first} was made with the tokenizer {_describe_tokenizer(tokenizer)} and {folder} with "
                f"{_describe_tokenizer(info)}: prepare one of them again"
            )
    if config.tokenizer != "auto" or config.streamed:
        requested = load_tokenizer(config.tokenizer, config.bos, config.eos).info
        if not _same_tokenizer(requested, tokenizer):
            raise DataError(
                f"data.tokenizer={config.tokenizer} is {_describe_tokenizer(requested)}, but {first} was "
                f"made with {_describe_tokenizer(tokenizer)}: prepare the data again, or set "
                "data.tokenizer=auto"
            )
    return tokenizer


def _same_tokenizer(a: TokenizerInfo, b: TokenizerInfo) -> bool:
    return dataclasses.replace(a, name="") == dataclasses.replace(b, name="")  # a folder may have moved


def _describe_tokenizer(tokenizer: TokenizerInfo) -> str:
    file = f", sha256 {tokenizer.sha256[:12]}" if tokenizer.sha256 else ""
    return f"{tokenizer.name} ({tokenizer.vocab_size:,} ids{file}, bos {tokenizer.bos}, eos {tokenizer.eos})"


def short_names(sources: list[str]) -> dict[str, str]:
    """The last part of each source's path, or the full path if several sources share the last part."""
    last = {source: Path(source).name or source for source in sources}
    return {source: name if list(last.values()).count(name) == 1 else source for source, name in last.items()}


def _describe(source: str, folder: Path, manifest: TokenStoreManifest) -> str:
    train, held_out = (manifest.splits[split] for split in ("train", "held_out"))
    documents = sum(shard.documents for shard in (*train, *held_out))
    counts = [sum(shard.tokens for shard in split) for split in (train, held_out)]
    left_out = manifest.bad_records
    bad = f"; {left_out.count:,} bad records left out, such as {left_out.first[0]}" if left_out.count else ""
    unit = "byte tokens" if manifest.tokenizer.name == "bytes" else f"tokens of {manifest.tokenizer.name}"
    return (
        f"{source}: {documents:,} documents, {counts[0]:,} training and {counts[1]:,} held-out {unit} in "
        f"{folder}{bad}"
    )


MAX_RAW_BYTES = 2 * 2**30  # takes minutes to tokenize, while the other processes wait


def check_data(config: DataConfig, vocab_size: int) -> None:
    """Check the sources of a config before anything is tokenized.

    Raises DataError, e.g. for a missing source or a model with fewer ids than the tokenizer.
    """
    total = sum(config.mixture.values())
    for source, weight in config.mixture.items():
        if weight * CYCLE < total:
            raise DataError(
                f"data.mixture: {source} has weight {weight} of {total}, less than the smallest share, "
                f"1/{CYCLE:,} of the total: remove it or raise its weight"
            )
    for name, source in config.validation.items():
        if source in config.training_sources:
            raise DataError(
                f"data.validation.{name}={source} is also a training source: remove it; the documents held "
                "out of a training source are evaluated anyway"
            )
    key = "data.mixture" if config.mixture else "data.source"
    if config.streamed:
        check_vocabulary(load_tokenizer(config.tokenizer, config.bos, config.eos).info, vocab_size)
        for source in config.training_sources:
            if is_prepared(source):
                raise DataError(f"{key}={source} is tokenized already: remove data.stream, or use its text")
    sources = [(key, source) for source in prepared_sources(config)]
    sources += [(f"data.validation.{name}", source) for name, source in config.validation.items()]
    for key, source in sources:
        if not is_prepared(source):
            if not is_remote(source):
                check_raw_size(source, key)
            check_vocabulary(load_tokenizer(config.tokenizer, config.bos, config.eos).info, vocab_size)
            continue
        manifest = read_manifest(user_path(source, key))
        check_vocabulary(manifest.tokenizer, vocab_size)
        for shard in (
            shard for split in SPLITS for shard in manifest.splits[split] if shard.max_id >= vocab_size
        ):
            raise DataError(
                f"{source}/{shard.name}.bin contains token id {shard.max_id}, which is not below "
                f"model.vocab_size={vocab_size}: prepare the data again with this model's tokenizer"
            )


def check_raw_size(source: str, key: str = "data.source") -> None:
    """Check that raw text exists and is small enough to be tokenized by a run. Raises DataError, which names
    the config `key`."""
    size_bytes = sum(path.stat().st_size for _, path in find_files(source, key))
    if size_bytes > MAX_RAW_BYTES:
        size, most = (f"{n / 2**30:.1f} GiB" for n in (size_bytes, MAX_RAW_BYTES))
        raise DataError(
            f"{source} has {size} of text, and a run tokenizes at most {most} before it starts: prepare it "
            f"with python -m tools.prepare_data {source} OUT_DIR, and use OUT_DIR as the source, or set "
            "data.stream=true"
        )


def check_sequences(split: TokenStream, shape: SequenceShape, name: str) -> int:
    """Return the number of training sequences of a split. DataError if there is none."""
    if count := count_sequences(split, shape):
        return count
    raise DataError(
        f"{name}: {split.tokens} training tokens are fewer than one sequence of "
        f"train.seq_len={shape.seq_len} + 1: use more text or a shorter sequence"
    )


def check_evaluation(corpus: Corpus) -> None:
    """Check that there is an evaluation set and that each has at least two tokens. Raises DataError."""
    if not corpus.evaluation_sets:
        how = "raise data.eval_fraction, set" if corpus.sources else "set"  # a data.factory holds none out
        raise DataError(
            f"train.eval_every is not 0, but no document is held out: {how} data.validation, or set "
            "train.eval_every=0"
        )
    for name, split in corpus.evaluation_sets.items():
        if split.tokens < 2:
            raise DataError(
                f"evaluation set {name} has {split.tokens} tokens, but at least two are needed: use more "
                "text, or set train.eval_every=0"
            )


def load_on_all_ranks(
    config: DataConfig, ranks: RankInfo, resume_from: Path | None, print_: Callable[[str], None]
) -> Corpus:
    """Load the data on all ranks: one process per node writes the cache while the others wait, and all
    compare checksums, each of its share. Collective: every rank must call it. `print_`: prints on rank 0.

    Raises the same DataError on every rank, also if ranks read different text or checkpoints.
    """
    first = on_all_ranks(lambda: find_prepared(config) if ranks.local_rank == 0 else None)
    prepared = first or find_prepared(config)
    for source in (*config.training_sources, *config.validation.values()) if ranks.is_main else ():
        if not is_remote(source) and (unread := find_unread(source)):
            print_(f"data: {source}: {describe_unread(unread)}")
    cache = cache_root(config) / "verified"
    verify_together(prepared.manifests, config.verify == "full", cache, ranks, print_)
    corpus = open_corpus(config, prepared)
    sizes = {name: split.tokens for name, split in corpus.evaluation_sets.items()}
    tokenizer = corpus.tokenizer.sha256[:12], corpus.tokenizer.bos, corpus.tokenizer.eos
    seen = gather_from_all((corpus.fingerprint, sizes, tokenizer, resume_from and resume_from.name))
    if any(state != seen[0] for state in seen):
        raise DataError(
            "ranks have different data or checkpoints (fingerprint, tokens to evaluate, tokenizer, "
            f"checkpoint): {sorted(set(map(str, seen)))}: data, tokenizer and run.dir must be the same on every node"
        )
    return corpus
