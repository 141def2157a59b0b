"""`python -m tools.prepare_data SOURCE OUT_DIR`: tokenizes text into a folder of shards for training."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from meshwright.tools.cli import format_table, natural, new_parser, number_from, positive, run_tool
from meshwright.train.data.prepare.prepare import Progress, exists_nonempty, prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.sources import HF_PREFIX, describe_unread, find_unread
from meshwright.train.data.token_store import MANIFEST, SPLITS, TokenStoreManifest
from meshwright.train.data.tokenizer import padded_vocab_size
from meshwright.train.distributed.process_group import usable_threads
from meshwright.train.errors import DataError
from meshwright.train.files import user_path

DESCRIPTION = """examples:
  python -m tools.prepare_data books/ data/books --tokenizer tokenizer.json
  python -m tools.prepare_data "logs/*.jsonl.gz" data/logs --text_field body --held_out 0.01

Tokenize text into a folder of shards for data.source. After a stop or a kill, the same command continues with
the unfinished shards. The result does not depend on the number of workers.
"""
MIB = 2**20
LINE_EVERY_S = 10.0  # seconds between progress lines, if stderr is not a terminal
SOURCES = (
    "a file, folder or glob of text (.txt, .md, source code ...: one document each) or of records (.jsonl, "
    ".json, .csv, all three also as .gz or .zst, .parquet, .arrow: a document each); stdlib for this "
    "Python's source code; hf:NAME[:CONFIG[:SPLIT]] for a Hugging Face dataset (split train), hf:FOLDER for "
    "one on disk"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare data and print the result. Raises DataError."""
    options = make_parser().parse_args(arguments)
    folder, source = user_path(options.out_dir, "OUT_DIR"), options.source
    if not source.startswith(HF_PREFIX) and (user_path(source, "SOURCE") / MANIFEST).is_file():
        raise DataError(f"{source} is already prepared data: use data.source={source}")
    shard_bytes, skip_bad = options.shard_mb * MIB, options.skip_bad
    settings = PrepareSettings(options.held_out, options.text_field, shard_bytes, options.workers, skip_bad)
    already_there, start_s = exists_nonempty(folder), time.perf_counter()
    with show_progress(sys.stderr.isatty()) as progress:
        try:
            manifest = prepare(
                source, options.tokenizer, options.bos, options.eos, folder, settings, progress
            )
        except KeyboardInterrupt:
            print("stopped: the same command continues with the unfinished shards", file=sys.stderr)
            raise
    figures = make_figures(manifest, folder, already_there, time.perf_counter() - start_s)
    figures["unread_files"] = find_unread(source)
    print(json.dumps(figures, indent=2) if options.json else to_text(figures))


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("prepare_data", "SOURCE OUT_DIR", DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help=SOURCES)
    parser.add_argument("out_dir", metavar="OUT_DIR", help="folder to create; it appears when it is complete")
    about = "a tokenizer.json or its folder; bytes, the default, is built in"
    parser.add_argument("--tokenizer", default="bytes", metavar="bytes|PATH", help=about)
    about = (
        "token in front of each document, such as <s>; auto, the default, is the one that the "
        "tokenizer puts in front of a text; none adds none"
    )
    parser.add_argument("--bos", default="auto", metavar="TOKEN", help=about)
    about = "token after each document (default auto)"
    parser.add_argument("--eos", default="auto", metavar="TOKEN", help=about)
    about = "field of a record that contains its text (default text)"
    parser.add_argument("--text_field", default="text", metavar="NAME", help=about)
    about = "leave out and report up to N records without usable text; one more is an error (default 0)"
    parser.add_argument("--skip_bad", type=natural, default=0, metavar="N", help=about)
    share = number_from(0, below=1)
    about = "share of documents kept for evaluation (default 0.02): at least one document, none with 0"
    parser.add_argument("--held_out", type=share, default=0.02, metavar="SHARE", help=about)
    about = "processes (default: one for each hardware thread, within a container's quota)"
    parser.add_argument("--workers", type=positive, default=usable_threads(), metavar="N", help=about)
    about = "approximate MiB of source per shard (default 64; less for a small source)"
    parser.add_argument("--shard_mb", type=positive, default=64, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document")
    return parser


@contextmanager
def show_progress(on_terminal: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on stderr: a bar on a terminal, else a line every LINE_EVERY_S."""
    if not on_terminal:
        yield PlainLines()
        return
    columns = (
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def update(progress: Progress) -> None:
            if not bar.tasks:
                bar.add_task("", total=progress.total_bytes, completed=progress.kept_bytes)
            bar.update(bar.tasks[0].id, completed=progress.done_bytes)

        yield update


class PlainLines:
    """Prints progress as lines of text."""

    def __init__(self) -> None:
        self._next_s = LINE_EVERY_S

    def __call__(self, progress: Progress) -> None:
        if progress.done_bytes == progress.kept_bytes > 0:
            message = f"continuing after {progress.kept_bytes / 1e6:,.1f} MB that are already finished"
            print(message, file=sys.stderr, flush=True)
        if progress.elapsed_s >= self._next_s:
            self._next_s = progress.elapsed_s + LINE_EVERY_S
            print(to_line(progress), file=sys.stderr, flush=True)


def to_line(progress: Progress) -> str:
    mb_s = (progress.done_bytes - progress.kept_bytes) / 1e6 / progress.elapsed_s
    left_s = (progress.total_bytes - progress.done_bytes) / 1e6 / mb_s if mb_s else float("inf")
    return (
        f"{progress.done_bytes / 1e6:,.1f} of {progress.total_bytes / 1e6:,.1f} MB, {mb_s:,.1f} MB/s, "
        f"{left_s:,.0f} s left, {progress.tokens:,} tokens"
    )


def make_figures(
    manifest: TokenStoreManifest, folder: Path, already_there: bool, elapsed_s: float
) -> dict[str, Any]:
    """Return counts, sizes and speed of a preparation for --json; mb_per_s is null if the folder existed."""
    shards = {split: manifest.splits[split] for split in SPLITS}
    tokens = {split: sum(shard.tokens for shard in shards[split]) for split in SPLITS}
    documents = {split: sum(shard.documents for shard in shards[split]) for split in SPLITS}
    text_bytes = sum(shard.text_bytes for split in SPLITS for shard in shards[split])
    return {
        "folder": str(folder),
        "already_there": already_there,
        "documents": documents,
        "empty_documents": manifest.settings["empty_documents"],
        "bad_records": vars(manifest.bad_records),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / sum(tokens.values()),
        "mb_per_s": None if already_there else text_bytes / 1e6 / elapsed_s,
        "elapsed_s": elapsed_s,
        "tokenizer": manifest.tokenizer.name,
        "dtype": manifest.dtype,
        "vocab_size": manifest.tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(manifest.tokenizer.vocab_size),
    }


def to_text(figures: dict[str, Any]) -> str:
    """Return the figures as text, with the keys for a config."""
    vocab_size, padded = figures["vocab_size"], figures["padded_vocab_size"]
    made, speed = f"{figures['folder']} already exists, made from the same text, tokenizer and settings", ""
    if not figures["already_there"]:
        made = f"wrote {figures['folder']}"
        speed = f", {figures['mb_per_s']:,.1f} MB/s in {figures['elapsed_s']:,.1f} s"
    rows = [[split, f"{figures['documents'][split]:,}", f"{figures['tokens'][split]:,}"] for split in SPLITS]
    bad, unread = figures["bad_records"], figures["unread_files"]
    return "\n".join(
        (
            made,
            format_table(("split", "documents", "tokens"), rows),
            f"{figures['text_bytes'] / 1e6:,.1f} MB of text{speed}, {figures['bytes_per_token']:.2f} bytes "
            f"per token; {figures['empty_documents']:,} documents without text and {bad['count']:,} bad "
            "records were left out",
            *(f"left out: {record}" for record in bad["first"]),
            *([describe_unread(unread)] if unread else ()),
            f"tokenizer {figures['tokenizer']}: {vocab_size:,} ids, stored as {figures['dtype']}",
            f"in a config: data.source: {figures['folder']}, model.vocab_size: {padded} (at least "
            f"{vocab_size}; a multiple of 128 suits tensor parallelism and GPUs)",
        )
    )


if __name__ == "__main__":
    run_tool(main)
