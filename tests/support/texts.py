"""Texts, tokenizers and files for the tests of data preparation."""

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from meshwright.tools.processes import children
from meshwright.train.data.prepare.prepare import prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.token_store import SPLITS, TokenStoreManifest, open_split

BITS = [
    "a",
    "Z",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\0",
    "\x1f",
    "\x7f",
    "\x85",
    "\xa0",
    "é",
    "ß",
    "e\u0301",
    "\u200b",
    "\u200d",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\ufffd",
    "\uffff",
    "\ue000",
    "漢字",
    "한",
    "ก็",
    "अनु",
    "שלום",
    "مرحبا",
    "😀",
    "👩\u200d👩\u200d👧",
    "\U0001d518",
    "\U0010ffff",
    '"',
    "\\",
    "\\n",
    "{}",
    "</s>",
    "<s>",
    "def f(x):\n    return x",
    "the quick brown fox ",
    "0123456789",
]


def odd_texts(count: int, seed: int, mean_bits: int = 12) -> list[str]:
    """Texts of odd characters; some are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / mean_bits, count) - 1
    return ["".join(BITS[i] for i in rng.integers(0, len(BITS), length)) for length in lengths]


def train_bpe(folder: Path, vocab_size: int = 600) -> Path:
    """Train a small byte-level tokenizer.json with </s> in `folder`, which puts <s> in front of a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(odd_texts(500, seed=99), trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_jsonl(
    path: Path, texts: Sequence[str | None], field: str = "text", ascii_only: bool = False
) -> Path:
    """Write one record per line; compressed if the name ends in .gz."""
    lines = [
        json.dumps({"id": i, field: text}, ensure_ascii=ascii_only) + "\n" for i, text in enumerate(texts)
    ]
    content = "".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def prepare_texts(
    source: Path | str, folder: Path, tokenizer: object = "bytes", **settings: object
) -> TokenStoreManifest:
    """Prepare with the byte tokenizer or another."""
    return prepare(str(source), str(tokenizer), "auto", "auto", folder, PrepareSettings(**settings))  # type: ignore[arg-type]


def documents_of(folder: Path, manifest: TokenStoreManifest, split: str) -> list[NDArray[np.int64]]:
    """The ids of every document of a split."""
    opened = open_split(folder, manifest, split)
    documents = []
    for index in range(opened.documents):
        first, end = opened.document(index)
        documents.append(np.empty(end - first, np.int64))
        opened.read(first, documents[-1])
    return documents


def texts_of(folder: Path, manifest: TokenStoreManifest) -> dict[str, list[str]]:
    """The texts of both splits of data made with the byte tokenizer."""
    documents = {split: documents_of(folder, manifest, split) for split in SPLITS}
    assert all(ids[-1] == 256 for split in SPLITS for ids in documents[split])
    return {
        split: [bytes(ids[:-1].astype(np.uint8)).decode() for ids in documents[split]] for split in SPLITS
    }


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def processes_of(session: int) -> list[int]:
    """The living processes of a session, from /proc."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, state, _, _, process_session = re.sub(r"\(.*\)", "()", stat.read_text()).split()[1:6]
        except OSError:  # the process has ended
            continue
        if int(process_session) == session and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def spawned_workers(parent: int) -> list[int]:
    """The worker processes that Python's multiprocessing started for a process, without its resource
    tracker."""
    return [pid for pid in children(parent) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
