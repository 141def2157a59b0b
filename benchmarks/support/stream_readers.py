"""Readers of one text for `benchmarks.streaming`, each run in a process of its own, which reads packed
sequences and prints its figures: the streamed loader, prepared tokens, and Hugging Face `datasets`."""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

SEQ_LEN, BATCH = 2048, 8
SHUFFLE_BUFFER = 1000  # documents


@dataclass(frozen=True)
class ReadCase:
    """What one process reads.

    Args:
        reader: streamed, prepared, datasets, or datasets workers: through a torch DataLoader
        source: a file of paths or URLs, one a line; or a prepared folder
        tokenizer: bytes, or a tokenizer.json
        tokens: to read at least
        workers: processes that tokenize
        cache: folder of the streamed loader
        cache_gib: size of that
    """

    reader: str
    source: str
    tokenizer: str
    tokens: int
    workers: int
    cache: str
    cache_gib: float = 32.0


def read_case(case: ReadCase) -> dict[str, float]:
    """Read as many tokens as a case wants; return tokens/s, and seconds to the first batch, of wall clock and
    of all CPUs. Imports are not counted, the start of processes and the listing of the source are."""
    batches = {"streamed": _streamed, "prepared": _prepared}.get(case.reader, _datasets)(case)
    next(batches)  # imports
    start_s, start_cpu_s = time.perf_counter(), tree_cpu_s()
    tokens, first_s = 0, 0.0
    with closing(batches):
        for rows in batches:
            first_s = first_s or time.perf_counter() - start_s
            tokens += rows * SEQ_LEN
            if tokens >= case.tokens:
                break
        wall_s, cpu_s = time.perf_counter() - start_s, tree_cpu_s() - start_cpu_s
    figures = {"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "first_s": first_s}
    return figures | {"tokens_per_s": tokens / wall_s, "tokens_per_cpu_s": tokens / cpu_s}


def tree_cpu_s() -> float:
    """CPU seconds of this process and those that it started and that run or have been waited for."""
    me = psutil.Process()
    ended = me.cpu_times()
    times = [ended, *(child.cpu_times() for child in me.children(recursive=True))]
    return sum(each.user + each.system for each in times) + ended.children_user + ended.children_system


def _streamed(case: ReadCase) -> Generator[int]:
    import torch.distributed as dist

    from meshwright.train.checkpoint.manifest import TrainPosition
    from meshwright.train.config import Config, DataConfig
    from meshwright.train.data.corpus import find_prepared, open_corpus
    from meshwright.train.data.sequences import BatchShape, SequenceShape
    from meshwright.train.data.stream.order import load_stream
    from meshwright.train.distributed.ranks import ALONE

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield 0
    data = DataConfig(
        source=case.source,
        stream=True,
        tokenizer=case.tokenizer,
        cache_dir=case.cache,
        cache_gib=case.cache_gib,
        workers=case.workers,
    )
    corpus, start = open_corpus(data, find_prepared(data)), TrainPosition()
    order, corpus = load_stream(Config(data=data), corpus, 1, ALONE, start, lambda line: None)
    batch = BatchShape(BATCH, 1, 0, 1)
    shape = SequenceShape(SEQ_LEN, True, False, None, corpus.tokenizer.vocab_size)
    with closing(order.reader(start, batch, shape)) as reader:
        for first in range(0, sys.maxsize, BATCH):
            yield sum(len(each.tokens) for each in reader.read(first, pinned=False))


def _prepared(case: ReadCase) -> Generator[int]:
    from meshwright.train.config import DataConfig
    from meshwright.train.data.corpus import find_prepared, open_corpus
    from meshwright.train.data.sample_order import SampleOrder
    from meshwright.train.data.sequences import SequenceShape

    yield 0
    data = DataConfig(source=case.source, tokenizer="auto")
    corpus = open_corpus(data, find_prepared(data))
    shape = SequenceShape(SEQ_LEN, True, False, None, corpus.tokenizer.vocab_size)
    order = SampleOrder(corpus.sources, shape, 0)
    for first in range(0, sys.maxsize, BATCH):
        yield len(order.read(first, BATCH, shape).tokens)


def _datasets(case: ReadCase) -> Generator[int]:
    """As its users write it: shuffled through a buffer, tokenized in batches, packed by hand."""
    import torch
    from datasets import load_dataset  # type: ignore[import-untyped]

    encode = _encoder(case.tokenizer)

    class Packed(torch.utils.data.IterableDataset[NDArray[np.int64]]):
        def __iter__(self) -> Iterator[NDArray[np.int64]]:
            waiting, size = list[NDArray[np.int64]](), 0
            for row in stream:
                waiting.append(row["ids"])
                size += len(waiting[-1])
                if size > SEQ_LEN:
                    joined = np.concatenate(waiting)
                    last = (size - 1) // SEQ_LEN * SEQ_LEN
                    yield from (joined[at : at + SEQ_LEN + 1] for at in range(0, last, SEQ_LEN))
                    waiting, size = [joined[last:]], size - last

    yield 0
    files = Path(case.source).read_text(encoding="utf-8").split()
    kind = "parquet" if files[0].endswith(".parquet") else "json"
    with tempfile.TemporaryDirectory() as cache:
        raw = load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=cache)
        stream = raw.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER).map(
            lambda rows: {"ids": encode(rows["text"])}, batched=True, remove_columns=["text"]
        )
        workers = case.workers if case.reader == "datasets workers" else 0
        loader = torch.utils.data.DataLoader(Packed(), batch_size=BATCH, num_workers=workers)
        yield from map(len, loader)
    raise RuntimeError(f"{case.source} has fewer than {case.tokens:,} tokens")


def _encoder(tokenizer: str) -> Any:
    """A function of texts to the ids of each, with the end of a document."""
    if tokenizer == "bytes":
        end = np.array([256])
        return lambda texts: [
            np.concatenate((np.frombuffer(text.encode(), np.uint8), end)).astype(np.int64) for text in texts
        ]
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(tokenizer)
    eos = library.token_to_id("<|endoftext|>")
    return lambda texts: [np.array([*each.ids, eos]) for each in library.encode_batch_fast(list(texts))]


@contextmanager
def sample_tree(process: psutil.Process, cache: Path) -> Iterator[dict[str, float]]:
    """Sample four times a second; the yielded peaks have `peak_gib`, of the memory of a process and those
    below it, where pages that several share count once (PSS), and `cache_gib`, of the files in a folder."""
    peaks, ended = {"peak_gib": 0.0, "cache_gib": 0.0}, threading.Event()

    def sample() -> None:
        while not ended.wait(0.25):
            size = sum(_size(path) for path in cache.rglob("*"))
            peaks["cache_gib"] = max(peaks["cache_gib"], size / 2**30)
            with contextlib.suppress(psutil.NoSuchProcess):  # one has just ended
                tree = [process, *process.children(recursive=True)]
                used = sum(each.memory_full_info().pss for each in tree)
                peaks["peak_gib"] = max(peaks["peak_gib"], used / 2**30)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def _size(path: Path) -> int:
    """The bytes that a file takes on the disk, 0 if it has just been deleted."""
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def start_case(case: ReadCase) -> Sequence[str]:
    """Return the command of a case."""
    return [sys.executable, "-m", __name__, json.dumps(vars(case))]


if __name__ == "__main__":
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    print(json.dumps(read_case(ReadCase(**json.loads(sys.argv[1])))))
