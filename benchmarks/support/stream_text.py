"""A text of any size for `benchmarks.streaming`, a tokenizer of it, and a server of files by HTTP."""

import multiprocessing
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

DOCUMENT_CHARACTERS, GROUP_ROWS = 1500, 1000  # on average; of a row group, unless told
VOCAB = 8192


def serve(folder: Path, parent: Connection) -> None:
    """Serve a folder by HTTP: send the URL, then the number of requests so far for each message."""
    from tests.support.flaky_server import Fault, flaky_server

    # readers that end reset their connections, of which the server would tell
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # a given ETag: otherwise each answer would hash its file
    with flaky_server(folder, lambda request: Fault(etag="same")) as server:
        parent.send(server.url)
        while parent.recv():
            parent.send(len(server.requests))


def texts(mib: int) -> Iterator[str]:
    """Yield documents: pieces of random length of the standard library's sources, in ever other ways."""
    chosen, left = random.Random(0), mib * 2**20
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    while left > 0:
        for path in chosen.sample(files, len(files)):
            text, at = path.read_bytes().decode(errors="ignore"), 0
            while at < len(text) and left > 0:
                end = text.find("\n", at + 64 + int(chosen.expovariate(1 / DOCUMENT_CHARACTERS))) + 1
                yield text[at : end or len(text)]
                left -= (end or len(text)) - at
                at = end or len(text)


def write_text(folder: Path, mib: int, group_rows: int = GROUP_ROWS) -> list[str]:
    """Write the texts as parquet files of 5,000 rows, and row groups of `group_rows`; return their names."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    folder.mkdir()
    documents, names = texts(mib), list[str]()
    while rows := list(islice(documents, 5 * GROUP_ROWS)):
        names.append(f"{len(names):05d}.parquet")
        table = pyarrow.table({"text": rows})
        pyarrow.parquet.write_table(table, folder / names[-1], row_group_size=group_rows)
    return names


def write_tokenizer(path: Path) -> str:
    """Train a small byte-level BPE tokenizer on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts(4), trainer)
    tokenizer.save(str(path))
    return str(path)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """Serve a folder in a process of its own: its URL, and what counts the requests so far."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, theirs), daemon=True)
    server.start()

    def count() -> int:
        ours.send(True)
        return int(ours.recv())

    try:
        yield ours.recv(), count
    finally:
        ours.send(None)
        server.join()
