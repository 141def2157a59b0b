"""How fast data comes: tokenised (against the tokenizers library alone on the same texts, which is the
limit), checked, read in shuffled order; and how long a training step waits for it."""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.tools.bench.harness import BenchResult, Measurement, check_room, spread
from meshwright.tools.cli import format_table
from meshwright.train.config import DataConfig
from meshwright.train.data.loader import BatchShape, TrainLoader
from meshwright.train.data.prepare.prepare import PrepareSettings, prepare
from meshwright.train.data.prepare.shard_writer import ShardWriter
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import SequenceShape, read_batch
from meshwright.train.data.sources import find_files
from meshwright.train.data.token_store import (
    Source,
    TokenStoreManifest,
    manifest_to_json,
    open_split,
    read_manifest,
    verify,
)
from meshwright.train.data.tokenizer import TokenizerInfo

# of the pretend step: a node, and torchtitan's 8B of 8,192 tokens
NODE_GPUS, MICRO_BATCH = 8, 2
# the most tokens/s of a GPU that was published for an 8B (tools/bench/planner/published_runs.csv)
PUBLISHED_TOKENS_S = 10_471
# tools.prepare_data makes a shard of 64 MiB of text, at 4 bytes a token
SHARD_TOKENS, BYTES_PER_TOKEN = 16 * 2**20, 4
MEAN_DOCUMENT = 1000  # tokens
VOCAB_SIZE = 2**16
MOST_WAIT = 0.01  # of the step time, asked of the loader
CACHES = ("cold", "warm") if hasattr(os, "posix_fadvise") else ("warm",)


@dataclass(frozen=True)
class Size:
    """How much is measured: text for tokenising, size of the prepared folder, seconds of each timing of
    reads, rounds of every figure, pretend steps, and tokens of a sequence."""

    text_mb: int
    store_gb: float
    read_s: float
    rounds: int
    steps: int
    seq_len: int


FULL = Size(text_mb=32, store_gb=10.0, read_s=3.0, rounds=3, steps=20, seq_len=8192)
QUICK = Size(text_mb=1, store_gb=0.01, read_s=0.1, rounds=2, steps=3, seq_len=1024)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options of `data`."""
    parser.add_argument(
        "--gb", type=float, metavar="GB", help=f"size of the prepared folder (default {FULL.store_gb:g})"
    )
    parser.add_argument(
        "--text_mb", type=int, metavar="MB", help=f"text to tokenise (default {FULL.text_mb})"
    )
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="where the temporary folder is made: a disk, not memory (default %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few megabytes and seconds: to see that it works"
    )


def measure_data(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Figures and a text. Raises BenchError where the disk has no room."""
    given = {"store_gb": options.gb, "text_mb": options.text_mb}
    size = Size(
        **asdict(QUICK if options.quick else FULL) | {key: value for key, value in given.items() if value}
    )
    check_room(Path(options.folder), size.store_gb)
    tokenising = measure_tokenising(size.text_mb)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=options.folder) as name:
        folder = Path(name)
        start_s = time.perf_counter()
        write_store(folder, int(size.store_gb * 1e9))
        figures = {
            "size": asdict(size),
            "tokenising": tokenising,
            "write_gb_s": size.store_gb / (time.perf_counter() - start_s),
            "verify_gb_s": {
                cache: spread([verify_gb_s(folder, cache) for _ in range(size.rounds)]) for cache in CACHES
            },
            "sequence_read_us": {cache: time_reads(folder, cache, size) for cache in CACHES},
            "loader_tokens_s": {cache: time_loaders(folder, cache, size) for cache in CACHES},
            "data_wait": measure_waits(folder, size),
        }
    return BenchResult(None, figures, data_text(figures))


def write_store(folder: Path, size_bytes: int) -> TokenStoreManifest:
    """A prepared folder of random uint16 ids, in documents of random lengths."""
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
    return manifest


def set_cache(folder: Path, cache: str) -> None:
    """Take the folder's files out of the page cache (cold), or read them all (warm), as far as there is
    memory."""
    for path in sorted(folder.iterdir()):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(2**24):
                pass


def verify_gb_s(folder: Path, cache: str) -> float:
    """Speed of comparing every file with its checksum."""
    set_cache(folder, cache)
    size_gb = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    start_s = time.perf_counter()
    verify(folder)
    return size_gb / (time.perf_counter() - start_s)


def time_reads(folder: Path, cache: str, size: Size) -> dict[str, Any]:
    """Microseconds of reading one sequence at a random place, one after another: median and 99th percentile
    of each round."""
    shape, rounds = sequence_shape(size), []
    for turn in range(size.rounds):
        set_cache(folder, cache)
        order, read_us = open_order(folder, shape), list[float]()
        first, end_s = turn * 1_000_000, time.perf_counter() + size.read_s
        while time.perf_counter() < end_s:
            rows = order.rows(first + len(read_us), 100)
            for row in rows:
                start_s = time.perf_counter()
                read_batch(order.splits, row[None], shape)
                read_us.append(1e6 * (time.perf_counter() - start_s))
        rounds.append((statistics.median(read_us), float(np.percentile(read_us, 99))))
    return {"median": spread([median for median, _ in rounds]), "p99": spread([p99 for _, p99 in rounds])}


def time_loaders(folder: Path, cache: str, size: Size) -> dict[str, Any]:
    """Tokens/s of one loader when each step asks for the next at once: documents seeing one another, and kept
    apart."""
    return {
        name: spread(
            [loader_tokens_s(folder, cache, size, document_mask, turn) for turn in range(size.rounds)]
        )
        for name, document_mask in (("packed", False), ("document_mask", True))
    }


def loader_tokens_s(folder: Path, cache: str, size: Size, document_mask: bool, turn: int) -> float:
    """One round of it, each on other sequences."""
    set_cache(folder, cache)
    shape, batch = sequence_shape(size, document_mask), node_batch()
    loader = open_loader(folder, shape, turn * 1_000_000 * batch.global_batch_size)
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
    """The share of the step time spent waiting, while the process sleeps through a step, as one that waits
    for its GPU, and while it holds the interpreter all the time; cold cache, after the first step."""
    rate = NODE_GPUS * PUBLISHED_TOKENS_S
    step_s = node_batch().global_batch_size * size.seq_len / rate
    waits = {
        "sleeping": measure_wait(folder, size, time.sleep, step_s),
        "computing": measure_wait(folder, size, spin, step_s),
    }
    return {
        "tokens_s": rate,
        "pretend_step_s": step_s,
        **waits,
        "within": all(w["share"] < MOST_WAIT for w in waits.values()),
    }


def measure_wait(
    folder: Path, size: Size, pretend: Callable[[float], None], step_s: float
) -> dict[str, float]:
    """`share` over all steps, and the share of the worst."""
    set_cache(folder, CACHES[0])
    loader = open_loader(folder, sequence_shape(size), 0)
    try:
        loader.next()
        waits, steps = list[float](), list[float]()
        for _ in range(size.steps):
            start_s = time.perf_counter()
            waits.append(loader.next().wait_s)
            pretend(step_s)
            steps.append(time.perf_counter() - start_s)
    finally:
        loader.close()
    return {
        "share": sum(waits) / sum(steps),
        "worst_share": max(w / s for w, s in zip(waits, steps, strict=True)),
    }


def spin(seconds: float) -> None:
    """Hold the interpreter for so long."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def node_batch() -> BatchShape:
    """The batch of a whole node, for one loader."""
    return BatchShape(MICRO_BATCH, NODE_GPUS, 0, 1)


def sequence_shape(size: Size, document_mask: bool = False) -> SequenceShape:
    """Packed sequences."""
    return SequenceShape(size.seq_len, True, document_mask, None, VOCAB_SIZE)


def open_order(folder: Path, shape: SequenceShape) -> SampleOrder:
    """The shuffled order of the folder's sequences."""
    split = open_split(folder, read_manifest(folder), "train")
    return SampleOrder((Source("random", 1.0, split),), shape, seed=0)


def open_loader(folder: Path, shape: SequenceShape, first_sample: int) -> TrainLoader:
    """The loader of training, as many steps ahead as by default."""
    return TrainLoader(
        open_order(folder, shape),
        shape,
        node_batch(),
        first_sample,
        torch.device("cpu"),
        DataConfig().prefetch,
    )


def data_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    size, wait, tokenising = figures["size"], figures["data_wait"], figures["tokenising"]
    rows = [_row(f"checking checksums, {cache}", figures["verify_gb_s"][cache], "GB/s") for cache in CACHES]
    for cache in CACHES:
        reads, loaders = figures["sequence_read_us"][cache], figures["loader_tokens_s"][cache]
        rows += [
            _row(f"reading a random sequence, {cache}, {what}", reads[what], "us")
            for what in ("median", "p99")
        ]
        rows += [_row(f"loader, {cache}, {what}", loaders[what], "tokens/s") for what in loaders]
    speeds = [(f"tokenising, {name}", f"{mb_s:.2f}", "", "MB/s") for name, mb_s in tokenising["mb_s"].items()]
    head = format_table(("figure", "median", "range", "unit"), [*speeds, *rows])
    shares = ", ".join(
        f"{wait[how]['share']:.4%} {how} (worst step {wait[how]['worst_share']:.4%})"
        for how in ("sleeping", "computing")
    )
    return (
        f"{head}\n\n{size['store_gb']:g} GB of uint16, sequences of {size['seq_len']}, {size['rounds']} "
        f"rounds\ntokenising with 2 workers: {tokenising['mb_s_ratio_of_2_workers']:.1%} of the library with "
        f"2 threads\ndata wait of a step of {wait['pretend_step_s']:.2f} s at {wait['tokens_s']:,.0f} "
        f"tokens/s: {shares}; {'' if wait['within'] else 'NOT '}within {MOST_WAIT:.0%}"
    )


def _row(name: str, of: dict[str, float], unit: str) -> tuple[str, str, str, str]:
    digits = ",.0f" if of["median"] >= 100 else ".3g"
    return name, format(of["median"], digits), f"{of['min']:{digits}} - {of['max']:{digits}}", unit


ROUNDS = 3
BPE_VOCAB_SIZE = 32_000  # of Llama 2
DOCUMENT_BYTES = 4000  # about the mean of a page of the web
_ALONE = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
start_s, start_cpu_s = time.perf_counter(), time.process_time()
for i in range(0, len(texts), 1000):
    tokenizer.encode_batch_fast(texts[i : i + 1000], add_special_tokens=False)
print(time.perf_counter() - start_s, time.process_time() - start_cpu_s)
"""


def measure_tokenising(megabytes: int) -> dict[str, Any]:
    """MB/s of text: the library alone with 1 and 2 threads, texts in memory, and from a .jsonl file to a
    prepared folder with 1 and 2 workers, start and end of the processes included.

    Medians of interleaved rounds, and the ratio of the two with 2. `mb_cpu_s` is MB for each second of one
    core: other programs on the machine disturb it less.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = _write_text(folder / "text.jsonl", megabytes * 1_000_000)
        tokenizer = _train_tokenizer(folder)
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            "library_1_thread": lambda: _alone_s(folder, 1),
            "library_2_threads": lambda: _alone_s(folder, 2),
            "prepare_1_worker": lambda: _prepare_s(folder, tokenizer, 1),
            "prepare_2_workers": lambda: _prepare_s(folder, tokenizer, 2),
        }
        rounds = [{name: run() for name, run in contenders.items()} for _ in range(ROUNDS)]
    figures: dict[str, Any] = {"text_mb": text_bytes / 1e6, "vocab_size": BPE_VOCAB_SIZE}
    for index, unit in enumerate(("mb_s", "mb_cpu_s")):
        speeds = [{name: text_bytes / 1e6 / taken[index] for name, taken in of.items()} for of in rounds]
        ratios = [of["prepare_2_workers"] / of["library_2_threads"] for of in speeds]
        figures[unit] = {name: statistics.median(of[name] for of in speeds) for name in contenders}
        figures[f"{unit}_rounds"] = speeds
        figures[f"{unit}_ratio_of_2_workers"] = statistics.median(ratios)
    return figures


def _write_text(path: Path, size_bytes: int) -> int:
    """The standard library as records of DOCUMENT_BYTES each, again and again up to the size; bytes of
    text."""
    texts = [text for _, file in find_files("stdlib") if (text := file.read_bytes().decode(errors="ignore"))]
    whole, written = "".join(texts), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size_bytes:
            for i in range(0, min(len(whole), size_bytes - written), DOCUMENT_BYTES):
                text = whole[i : i + DOCUMENT_BYTES]
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
    return written


def _train_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer as Llama 3 and GPT-2 have one, made from some of the text."""
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
    return folder / "tokenizer.json"


def _alone_s(folder: Path, threads: int) -> tuple[float, float]:
    """Seconds, and seconds of a core, of the library, in a process of its own, as it reads the number of
    threads once."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", _ALONE, str(folder / "tokenizer.json"), str(folder / "text.jsonl")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return float(said[0]), float(said[1])


def _prepare_s(folder: Path, tokenizer: Path, workers: int) -> tuple[float, float]:
    """Seconds, and seconds of a core, from the file to the folder."""
    out = folder / "out"
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    prepare(str(folder / "text.jsonl"), str(tokenizer), "auto", "auto", out, PrepareSettings(workers=workers))
    taken = time.perf_counter() - start_s, _cpu_s() - start_cpu_s
    shutil.rmtree(out)
    return taken


def _cpu_s() -> float:
    """Seconds of a core that this process and those it has waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


MEASUREMENT = Measurement(
    "data",
    add_data_options,
    measure_data,
    summary="tokenising, checking shards, shuffled reading, and what a step waits for data",
    description=(
        "Tokenise text with a byte-level BPE against the tokenizers library alone. Then, on a prepared "
        "folder of random ids (--gb; made on disk and deleted at the end): check its checksums, read "
        "sequences in shuffled order, let the loader deliver as fast as it can, and count what a pretend "
        f"step waits for it. That step takes as long as {NODE_GPUS} GPUs need for {MICRO_BATCH} sequences "
        "each at the fastest rate published for an 8B (tools/bench/planner/published_runs.csv), and one "
        "loader, a thread of one process, reads for all of them, where a run has one for each GPU. cold: the "
        "files are not in the page cache. Takes about ten minutes at full size."
    ),
    takes_keys=False,
)
