"""Measure the data pipeline: tokenizing (compared with the tokenizers library alone on the same texts, which
is the upper limit), reading in shuffled order, and the time that a training step waits for data."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.tools.bench.harness import BenchResult, Measurement, check_disk_space, spread
from meshwright.tools.cli import format_table
from meshwright.train.config import DataConfig
from meshwright.train.data.loader import BatchShape, TrainLoader
from meshwright.train.data.prepare.prepare import PrepareSettings, prepare
from meshwright.train.data.prepare.shard_writer import ShardWriter
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import SequenceShape
from meshwright.train.data.sources import find_files
from meshwright.train.data.token_store import (
    Source,
    TokenStoreManifest,
    manifest_to_json,
    open_split,
    read_manifest,
)
from meshwright.train.data.tokenizer import TokenizerInfo

# The simulated step: the GPUs of a node, and the micro batch of torchtitan's 8B with 8,192 tokens.
NODE_GPUS, MICRO_BATCH = 8, 2
# the highest published tokens/s per GPU of an 8B (tools/bench/planner/published_runs.csv)
PUBLISHED_TOKENS_S = 10_471
# tools.prepare_data writes shards of 64 MiB of text, about 4 bytes per token
SHARD_TOKENS, BYTES_PER_TOKEN = 16 * 2**20, 4
MEAN_DOCUMENT = 1000  # tokens
VOCAB_SIZE = 2**16
MOST_WAIT = 0.01  # target: maximum share of the step time spent waiting for data
CACHES = ("cold", "warm") if hasattr(os, "posix_fadvise") else ("warm",)


@dataclass(frozen=True)
class Size:
    """The size of the measurement: text to tokenize, size of the prepared folder, seconds of each loader
    timing, rounds of every figure, simulated steps, and tokens of a sequence."""

    text_mb: int
    store_gb: float
    read_s: float
    rounds: int
    steps: int
    seq_len: int


FULL = Size(text_mb=32, store_gb=10.0, read_s=3.0, rounds=3, steps=20, seq_len=8192)
QUICK = Size(text_mb=1, store_gb=0.01, read_s=0.1, rounds=2, steps=3, seq_len=1024)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `data`."""
    add = parser.add_argument
    add("--gb", type=float, metavar="GB", help=f"size of the prepared folder (default {FULL.store_gb:g})")
    text = "parent of the temporary folder: on a disk, not in memory (default %(default)s)"
    add("--folder", default=tempfile.gettempdir(), metavar="DIR", help=text)
    add("--quick", action="store_true", help="a few megabytes and seconds, to test the command")


def measure_data(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure tokenizing, the loader and data waits. Raises BenchError if the disk lacks space."""
    size = QUICK if options.quick else FULL
    size = replace(size, store_gb=options.gb or size.store_gb)
    check_disk_space(Path(options.folder), size.store_gb)
    tokenising = measure_tokenising(size)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=options.folder) as name:
        folder = Path(name)
        write_store(folder, int(size.store_gb * 1e9))
        figures = {
            "size": asdict(size),
            "tokenising": tokenising,
            "loader_tokens_s": {
                cache: spread([loader_tokens_s(folder, cache, size, turn) for turn in range(size.rounds)])
                for cache in CACHES
            },
            "data_wait": measure_waits(folder, size),
        }
    return BenchResult(None, figures, data_text(figures))


def write_store(folder: Path, size_bytes: int) -> None:
    """Write a prepared folder of random uint16 ids, in documents of random lengths."""
    rng = np.random.default_rng(0)
    block, tokens = rng.integers(0, VOCAB_SIZE, SHARD_TOKENS, np.uint16), size_bytes // 2
    infos = []
    for index in range(-(-tokens // SHARD_TOKENS)):
        count = min(SHARD_TOKENS, tokens - index * SHARD_TOKENS)
        ends = np.cumsum(rng.geometric(1 / MEAN_DOCUMENT, 2 * count // MEAN_DOCUMENT + 1))
        lengths = np.diff(np.concatenate(([0], ends[ends < count], [count]))).tolist()
        writer = ShardWriter(folder, f"train-{index:05d}", np.dtype(np.uint16))
        writer.add([block[:count] ^ np.uint16(index % VOCAB_SIZE)], lengths, count * BYTES_PER_TOKEN)
        infos.append(writer.finish())
    splits = {"train": tuple(info for info in infos if info), "held_out": ()}
    manifest = TokenStoreManifest(TokenizerInfo("random", "", VOCAB_SIZE, None, 0), "uint16", (), splits)
    (folder / "manifest.json").write_text(manifest_to_json(manifest), encoding="utf-8")


def set_cache(folder: Path, cache: str) -> None:
    """Remove the folder's files from the page cache (cold), or read them into it as memory allows (warm)."""
    for path in sorted(folder.iterdir()):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(2**24):
                pass


def loader_tokens_s(folder: Path, cache: str, size: Size, turn: int) -> float:
    """Return the tokens/s of a loader whose batches are taken without pause; rounds read other sequences."""
    set_cache(folder, cache)
    batch = node_batch()
    loader = open_loader(folder, size, turn * 1_000_000 * batch.global_batch_size)
    try:
        loader.next()
        steps, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < size.read_s:
            loader.next()
            steps += 1
        return steps * batch.global_batch_size * size.seq_len / (time.perf_counter() - start_s)
    finally:
        loader.close()


def measure_waits(folder: Path, size: Size) -> dict[str, Any]:
    """Return the share of later steps' time spent waiting for data, with a cold cache: while the process
    sleeps during a step, as if waiting for its GPU, and while it holds the interpreter lock."""
    rate = NODE_GPUS * PUBLISHED_TOKENS_S
    step_s = node_batch().global_batch_size * size.seq_len / rate
    shares = {
        "sleeping": measure_wait(folder, size, time.sleep, step_s),
        "computing": measure_wait(folder, size, spin, step_s),
    }
    within = all(share < MOST_WAIT for share in shares.values())
    return {"tokens_s": rate, "pretend_step_s": step_s, "share": shares, "within": within}


def measure_wait(folder: Path, size: Size, pretend: Callable[[float], None], step_s: float) -> float:
    """Return the share of the time of all steps spent waiting; `pretend` simulates a step of `step_s`."""
    set_cache(folder, CACHES[0])
    loader = open_loader(folder, size, 0)
    try:
        loader.next()
        wait_s, start_s = 0.0, time.perf_counter()
        for _ in range(size.steps):
            wait_s += loader.next().wait_s
            pretend(step_s)
        return wait_s / (time.perf_counter() - start_s)
    finally:
        loader.close()


def spin(seconds: float) -> None:
    """Hold the interpreter lock for `seconds`."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def node_batch() -> BatchShape:
    """Return the batch of an entire node, for one loader."""
    return BatchShape(MICRO_BATCH, NODE_GPUS, 0, 1)


def open_loader(folder: Path, size: Size, first_sample: int) -> TrainLoader:
    """Open the training loader on the shuffled folder: packed sequences without document masks, the default
    number of steps ahead."""
    shape = SequenceShape(size.seq_len, True, False, None, VOCAB_SIZE)
    split = open_split(folder, read_manifest(folder), "train")
    order = SampleOrder((Source("random", 1.0, split),), shape, seed=0)
    ahead = DataConfig().prefetch
    return TrainLoader(order, shape, node_batch(), first_sample, torch.device("cpu"), ahead)


def data_text(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    size, wait, tokenising = figures["size"], figures["data_wait"], figures["tokenising"]
    rows = [
        _row(f"loader, {cache}", figures["loader_tokens_s"][cache], ",.0f", "tokens/s") for cache in CACHES
    ]
    rows += [
        _row(f"tokenizing, {name}", tokenising["mb_s"][name], ".2f", "MB/s") for name in tokenising["mb_s"]
    ]
    shares = " and ".join(f"{share:.4%} {how}" for how, share in wait["share"].items())
    return (
        f"{format_table(('figure', 'median', 'range', 'unit'), rows)}\n\n"
        f"{size['store_gb']:g} GB of uint16, sequences of {size['seq_len']}, {size['rounds']} rounds\n"
        f"tokenizing with {WORKERS} workers: {tokenising['ratio']:.1%} of the library with as many threads\n"
        f"data wait of a step of {wait['pretend_step_s']:.2f} s at {wait['tokens_s']:,.0f} tokens/s: "
        f"{shares}; {'' if wait['within'] else 'NOT '}within {MOST_WAIT:.0%}"
    )


def _row(name: str, figure: dict[str, float], form: str, unit: str) -> tuple[str, str, str, str]:
    return name, format(figure["median"], form), f"{figure['min']:{form}} - {figure['max']:{form}}", unit


WORKERS = 2
BPE_VOCAB_SIZE = 32_000  # as in Llama 2
DOCUMENT_BYTES = 4000  # about the mean size of a web page
_LIBRARY_SCRIPT = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
start_s = time.perf_counter()
for i in range(0, len(texts), 1000):
    tokenizer.encode_batch_fast(texts[i : i + 1000], add_special_tokens=False)
print(time.perf_counter() - start_s)
"""


def measure_tokenising(size: Size) -> dict[str, Any]:
    """Return the MB/s of text of the library alone, with texts in memory, and of preparing a folder from a
    .jsonl file, including the start and end of its processes; and the median of their ratios within each
    round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_mb = _write_text(folder / "text.jsonl", size.text_mb * 1_000_000) / 1e6
        _train_tokenizer(folder)
        rounds = [
            {"library": text_mb / _library_s(folder), "prepare": text_mb / _prepare_s(folder)}
            for _ in range(size.rounds)
        ]
    return {
        "text_mb": text_mb,
        "vocab_size": BPE_VOCAB_SIZE,
        "workers": WORKERS,
        "mb_s": {name: spread([speeds[name] for speeds in rounds]) for name in ("library", "prepare")},
        "ratio": statistics.median(speeds["prepare"] / speeds["library"] for speeds in rounds),
    }


def _write_text(path: Path, size_bytes: int) -> int:
    """Write the standard library as records of DOCUMENT_BYTES, repeated up to the size; return the bytes."""
    texts = [text for _, file in find_files("stdlib") if (text := file.read_bytes().decode(errors="ignore"))]
    corpus, written = "".join(texts), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size_bytes:
            for i in range(0, min(len(corpus), size_bytes - written), DOCUMENT_BYTES):
                text = corpus[i : i + DOCUMENT_BYTES]
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
    return written


def _train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer, the kind of Llama 3 and GPT-2, on a part of the text."""
    import tokenizers

    with open(folder / "text.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(3000), strict=False)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=BPE_VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _library_s(folder: Path) -> float:
    """Return the seconds of the library alone, in a process: it reads its number of threads only once."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(WORKERS), "TOKENIZERS_PARALLELISM": "true"}
    command = [
        sys.executable,
        "-c",
        _LIBRARY_SCRIPT,
        str(folder / "tokenizer.json"),
        str(folder / "text.jsonl"),
    ]
    return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def _prepare_s(folder: Path) -> float:
    """Return the seconds of preparing the folder from the file."""
    text, tokenizer, out = (folder / name for name in ("text.jsonl", "tokenizer.json", "out"))
    start_s = time.perf_counter()
    prepare(str(text), str(tokenizer), "auto", "auto", out, PrepareSettings(workers=WORKERS))
    taken_s = time.perf_counter() - start_s
    shutil.rmtree(out)
    return taken_s


MEASUREMENT = Measurement(
    "data",
    add_data_options,
    measure_data,
    summary="tokenizing, shuffled reading, and a step's wait for data",
    description=(
        "Tokenize text with a byte-level BPE and compare with the tokenizers library alone. Then, on a "
        "prepared folder of random ids (--gb; written to disk and deleted at the end), measure the loader's "
        "maximum rate in shuffled order, and the time that a simulated step waits for it. That step takes as "
        f"long as {NODE_GPUS} GPUs need for {MICRO_BATCH} sequences each at the highest rate published for "
        "an 8B (tools/bench/planner/published_runs.csv). One loader, a thread of one process, reads for all "
        "of them; a run has one loader per GPU. cold: the files are not in the page cache. The full size "
        "takes about ten minutes."
    ),
    takes_keys=False,
)
