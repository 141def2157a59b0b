"""What can be wrong with a run's data, found before anything is tokenised, and before the first step."""

from meshwright.train.data.config import DataConfig, DataError
from meshwright.train.data.mixture import CYCLE
from meshwright.train.data.paths import user_path
from meshwright.train.data.sequences import SequenceShape, count_sequences
from meshwright.train.data.sources import find_files
from meshwright.train.data.split import Split
from meshwright.train.data.store import SPLITS, read_manifest
from meshwright.train.data.tokenizer import check_vocabulary, load_tokenizer
from meshwright.train.data.tokens import Corpus, is_prepared, trained_on

MAX_RAW_BYTES = 2 * 2**30  # minutes of tokenising, while the other processes wait


def check_data(config: DataConfig, vocab_size: int) -> None:
    """DataError for a source that is not there, or a model with fewer ids than a tokenizer; nothing is
    tokenised yet."""
    total = sum(config.mixture.values())
    for source, weight in config.mixture.items():
        if weight * CYCLE < total:
            raise DataError(
                f"data.mixture: {source} has the weight {weight} of {total}, but shares count to one in "
                f"{CYCLE:,}: "
                "leave it out, or give it more"
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
                f"model.vocab_size={vocab_size}: "
                "prepare the data again, with this model's tokenizer"
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


def check_sequences(split: Split, shape: SequenceShape, name: str) -> int:
    """How many sequences there are to train on; DataError if none."""
    if count := count_sequences(split, shape):
        return count
    raise DataError(
        f"{name}: {split.tokens} training tokens are fewer than one sequence of "
        f"train.seq_len={shape.seq_len} + 1: "
        "use more text or a shorter sequence"
    )


def check_evaluation(corpus: Corpus) -> None:
    """DataError where nothing is there to evaluate, or a set is too small to predict a token of."""
    sets = {**corpus.held_out, **corpus.validation}
    if not sets:
        raise DataError(
            "train.eval_every asks for evaluations, but no document is held out: use a larger data.held_out, "
            "name a "
            "data.validation, or train.eval_every=0"
        )
    for name, split in sets.items():
        if split.tokens < 2:
            raise DataError(
                f"{name} has {split.tokens} tokens to evaluate: use more text, or train.eval_every=0"
            )
