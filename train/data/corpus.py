"""The data of a run: prepared folders as they are, any other text tokenised into a cache first, by one
process of each node, and the same on every rank. What can be wrong with it is found before anything is
tokenised, and before the first step."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from meshwright.train.config import DataConfig
from meshwright.train.data.sample_order import CYCLE, shares
from meshwright.train.data.sequences import SequenceShape, count_sequences
from meshwright.train.data.sources import HF_PREFIX, find_files
from meshwright.train.data.token_store import (
    FORMAT,
    MANIFEST,
    SPLITS,
    Source,
    TokenStoreManifest,
    TokenStream,
    open_split,
    read_manifest,
    verify_once,
)
from meshwright.train.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    TokenizerInfo,
    check_vocabulary,
    load_tokenizer,
)
from meshwright.train.distributed.ranks import RankInfo, gather_from_all
from meshwright.train.errors import DataError
from meshwright.train.files import user_path


@dataclass(frozen=True)
class Corpus:
    """All data of a run.

    Args:
        sources: what is trained on
        held_out: name -> tokens that are held out of the sources
        validation: name -> tokens of data.validation
        tokenizer: of all of them
        description: for the screen
        fingerprint: of everything that the order of the training sequences hangs on, apart from the seed
    """

    sources: tuple[Source, ...]
    held_out: dict[str, TokenStream]
    validation: dict[str, TokenStream]
    tokenizer: TokenizerInfo
    description: str
    fingerprint: str


def load_corpus(config: DataConfig) -> Corpus:
    """The data that a config names. Raises DataError where it cannot be used."""
    folders = {source: find_folder(source, config) for source in trained_on(config)}
    validation = {
        name: find_folder(source, config, held_out=0.0) for name, source in config.validation.items()
    }
    manifests = {folder: read_manifest(folder) for folder in (*folders.values(), *validation.values())}
    tokenizer = _one_tokenizer({folder: manifest.tokenizer for folder, manifest in manifests.items()}, config)
    for folder in manifests if config.verify == "full" else ():
        verify_once(folder, cache_root(config) / "verified")
    # In an order of their own, so that neither their names nor who comes first in the config decide what is
    # drawn when.
    hashes = {
        source: [shard.sha256 for shard in manifests[folder].splits["train"]]
        for source, folder in folders.items()
    }
    folders = {source: folders[source] for source in sorted(folders, key=lambda source: hashes[source])}
    names = _short_names(list(folders))
    held_out = {
        names[source] if config.mixture else "held_out": open_split(folder, manifests[folder], "held_out")
        for source, folder in folders.items()
        if manifests[folder].splits["held_out"]
    }
    if twice := held_out.keys() & validation.keys():
        raise DataError(
            f"data.validation.{min(twice)} is also the name of what is held out of the data: name it "
            "otherwise"
        )
    weights = [config.mixture.get(source, 1.0) for source in folders]
    order = json.dumps([[hashes[source] for source in folders], shares(tuple(weights)), config.packing])
    return Corpus(
        sources=tuple(
            Source(names[source], weight, open_split(folder, manifests[folder], "train"))
            for (source, folder), weight in zip(folders.items(), weights, strict=True)
        ),
        held_out=held_out,
        validation={
            name: open_split(folder, manifests[folder], *SPLITS) for name, folder in validation.items()
        },
        tokenizer=tokenizer,
        description="; ".join(
            _describe(source, folder, manifests[folder]) for source, folder in folders.items()
        ),
        fingerprint=hashlib.sha256(order.encode()).hexdigest()[:16],
    )


def trained_on(config: DataConfig) -> list[str]:
    """The sources that a run learns from."""
    return list(config.mixture) or [config.source]


def find_folder(source: str, config: DataConfig, held_out: float | None = None) -> Path:
    """The prepared folder of a source: the source itself, or one in the cache, where it is made if need be.

    The cache's name is a fingerprint of the source (names, sizes, times), the tokenizer and the settings.
    """
    if is_prepared(source):
        return user_path(source, "data.source")

    files = [(name, s.st_size, s.st_mtime_ns) for name, path in find_files(source) for s in [path.stat()]]
    share = config.eval_fraction if held_out is None else held_out
    tokenizer = load_tokenizer(config.tokenizer, config.bos, config.eos).info
    made_of = [FORMAT, vars(tokenizer), share, config.text_field, files]
    folder = cache_root(config) / f"tokens-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}"
    if not folder.exists():
        from meshwright.train.data.prepare.prepare import PrepareSettings, prepare

        settings = PrepareSettings(held_out=share, text_field=config.text_field)
        prepare(source, config.tokenizer, config.bos, config.eos, folder, settings)
    return folder


def find_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a config's data: the one data.tokenizer names, else that of the prepared data. Raises
    DataError."""
    source = next(iter(config.mixture), config.source)
    if config.tokenizer != "auto" or not is_prepared(source):
        return load_tokenizer(config.tokenizer, config.bos, config.eos)
    folder = user_path(source, "data.source")
    info = read_manifest(folder).tokenizer
    return JsonTokenizer(folder, info=info) if info.sha256 else ByteTokenizer()


def is_prepared(source: str) -> bool:
    """Whether tools.prepare_data has made this folder."""
    return not source.startswith(HF_PREFIX) and (user_path(source, "data.source") / MANIFEST).is_file()


def cache_root(config: DataConfig) -> Path:
    """Where tokenised text is kept."""
    return (
        user_path(config.cache_dir, "data.cache_dir")
        if config.cache_dir
        else Path.home() / ".cache" / "meshwright"
    )


def _one_tokenizer(of: dict[Path, TokenizerInfo], config: DataConfig) -> TokenizerInfo:
    """The tokenizer of all sources. DataError where they have several, or another than data.tokenizer
    says."""
    (first, tokenizer), *others = of.items()
    for source, other in others:
        if not _same(tokenizer, other):
            raise DataError(
                f"{first} was made with the tokenizer {_in_words(tokenizer)}, {source} with "
                f"{_in_words(other)}: prepare one of them again"
            )
    if config.tokenizer != "auto":
        asked = load_tokenizer(config.tokenizer, config.bos, config.eos).info
        if not _same(asked, tokenizer):
            raise DataError(
                f"data.tokenizer={config.tokenizer} is {_in_words(asked)}, but {first} was made with "
                f"{_in_words(tokenizer)}: prepare it again, or leave data.tokenizer at auto"
            )
    return tokenizer


def _same(a: TokenizerInfo, b: TokenizerInfo) -> bool:
    return dataclasses.replace(a, name="") == dataclasses.replace(b, name="")  # a folder may have moved


def _in_words(tokenizer: TokenizerInfo) -> str:
    file = f", sha256 {tokenizer.sha256[:12]}" if tokenizer.sha256 else ""
    return f"{tokenizer.name} ({tokenizer.vocab_size:,} ids{file}, bos {tokenizer.bos}, eos {tokenizer.eos})"


def _short_names(sources: list[str]) -> dict[str, str]:
    """The last part of each source's path, or all of it where two have the same."""
    last = {source: Path(source).name or source for source in sources}
    return {source: name if list(last.values()).count(name) == 1 else source for source, name in last.items()}


def _describe(source: str, folder: Path, manifest: TokenStoreManifest) -> str:
    train, held_out = (manifest.splits[split] for split in ("train", "held_out"))
    documents = sum(shard.documents for shard in (*train, *held_out))
    counts = [sum(shard.tokens for shard in split) for split in (train, held_out)]
    unit = "byte tokens" if manifest.tokenizer.name == "bytes" else f"tokens of {manifest.tokenizer.name}"
    return (
        f"{source}: {documents:,} documents, {counts[0]:,} training and {counts[1]:,} held-out {unit} in "
        f"{folder}"
    )


MAX_RAW_BYTES = 2 * 2**30  # minutes of tokenising, while the other processes wait


def check_data(config: DataConfig, vocab_size: int) -> None:
    """DataError for a source that is not there, or a model with fewer ids than a tokenizer; nothing is
    tokenised yet."""
    total = sum(config.mixture.values())
    for source, weight in config.mixture.items():
        if weight * CYCLE < total:
            raise DataError(
                f"data.mixture: {source} has the weight {weight} of {total}, but shares count to one in "
                f"{CYCLE:,}: leave it out, or give it more"
            )
    for name, source in config.validation.items():
        if source in trained_on(config):
            raise DataError(
                f"data.validation.{name}={source} is trained on; what it holds out is evaluated anyway"
            )
    for source in (*trained_on(config), *config.validation.values()):
        if not is_prepared(source):
            check_raw(source)
            check_vocabulary(load_tokenizer(config.tokenizer, config.bos, config.eos).info, vocab_size)
            continue
        manifest = read_manifest(user_path(source, "data.source"))
        check_vocabulary(manifest.tokenizer, vocab_size)
        for shard in (
            shard for split in SPLITS for shard in manifest.splits[split] if shard.max_id >= vocab_size
        ):
            raise DataError(
                f"{source}/{shard.name}.bin has the token id {shard.max_id}, beyond "
                f"model.vocab_size={vocab_size}: prepare the data again, with this model's tokenizer"
            )


def check_raw(source: str) -> None:
    """DataError for text that is not there, or so much that a run should not begin with tokenising it."""
    size_bytes = sum(path.stat().st_size for _, path in find_files(source))
    if size_bytes > MAX_RAW_BYTES:
        size, most = (f"{n / 2**30:.1f} GiB" for n in (size_bytes, MAX_RAW_BYTES))
        raise DataError(
            f"{source} has {size} of text, more than the {most} that a run tokenises by itself: "
            f"python -m tools.prepare_data {source} OUT_DIR, then name OUT_DIR"
        )


def check_sequences(split: TokenStream, shape: SequenceShape, name: str) -> int:
    """How many sequences there are to train on; DataError if none."""
    if count := count_sequences(split, shape):
        return count
    raise DataError(
        f"{name}: {split.tokens} training tokens are fewer than one sequence of "
        f"train.seq_len={shape.seq_len} + 1: use more text or a shorter sequence"
    )


def check_evaluation(corpus: Corpus) -> None:
    """DataError where nothing is there to evaluate, or a set is too small to predict a token of."""
    sets = {**corpus.held_out, **corpus.validation}
    if not sets:
        raise DataError(
            "train.eval_every asks for evaluations, but no document is held out: use a larger "
            "data.eval_fraction, "
            "name a data.validation, or train.eval_every=0"
        )
    for name, split in sets.items():
        if split.tokens < 2:
            raise DataError(
                f"{name} has {split.tokens} tokens to evaluate: use more text, or train.eval_every=0"
            )


def load_together(config: DataConfig, ranks: RankInfo, resume_from: Path | None) -> Corpus:
    """One process per node writes the cache and compares checksums, the others wait. A DataError reaches all
    alike, also where ranks see different text or checkpoints."""
    corpus, problem = None, ""
    if ranks.local_rank == 0:
        try:
            corpus = load_corpus(config)
        except DataError as error:
            problem = str(error)
    if problems := [one for one in gather_from_all(problem) if one]:
        raise DataError(problems[0])
    corpus = corpus or load_corpus(config)
    sizes = {name: split.tokens for name, split in {**corpus.held_out, **corpus.validation}.items()}
    seen = gather_from_all((corpus.fingerprint, sizes, resume_from and resume_from.name))
    if any(what != seen[0] for what in seen):
        raise DataError(
            "the processes see different data or checkpoints (fingerprint, tokens to evaluate, checkpoint): "
            f"{sorted(set(map(str, seen)))}. data.source and run.dir must be the same on every node"
        )
    return corpus
