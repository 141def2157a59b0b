"""How fast text is tokenised into shards, against the tokenizers library alone on the same texts, which is
the limit."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.train.data.prepare.prepare import PrepareSettings, prepare
from meshwright.train.data.sources import find_files

ROUNDS = 3
VOCAB_SIZE = 32_000  # of Llama 2
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
    figures: dict[str, Any] = {"text_mb": text_bytes / 1e6, "vocab_size": VOCAB_SIZE}
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
        vocab_size=VOCAB_SIZE,
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
