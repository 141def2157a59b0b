"""Measure the streamed loader beside prepared tokens and Hugging Face `datasets`, the index of many shards,
and how much memory and disk a long source takes."""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from benchmarks.support.stream_index import measure_index, write_shards
from benchmarks.support.stream_readers import ReadCase, sample_tree, start_case
from benchmarks.support.stream_text import served, write_text, write_tokenizer
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError
from meshwright.train.data.prepare.prepare import prepare
from meshwright.train.data.prepare.worker import PrepareSettings

READERS = ("streamed, cold", "streamed, cached", "datasets", "datasets workers", "prepared")


def add_streaming_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `streaming`."""
    add, studies = parser.add_argument, ("rates", "index", "bounded")
    add("--studies", nargs="+", choices=studies, default=list(studies), help="default: all three")
    add("--mib", type=positive, default=128, metavar="N", help="text of `rates`, MiB (default 128)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each reader (default 3)")
    add("--workers", type=positive, default=2, metavar="N", help="processes that tokenize (default 2)")
    add("--tokenizers", nargs="+", choices=("bytes", "bpe"), default=["bytes", "bpe"], help="default: both")
    add("--from", nargs="+", choices=("http", "files"), default=["http", "files"], help="default: both")
    add("--shards", type=positive, default=10_000, metavar="N", help="of `index` (default 10,000)")
    add("--bounded_mib", type=positive, default=1024, metavar="N", help="text of `bounded` (default 1,024)")


def measure_streaming(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Run the studies. Raises BenchError if a reader fails."""
    studies = {"rates": measure_rates, "index": measure_indexes, "bounded": measure_bounded}
    figures, parts = dict[str, Any](), list[str]()
    for name in options.studies:
        with tempfile.TemporaryDirectory(prefix="meshwright-streaming-") as folder:
            figures[name], text = studies[name](Path(folder), options)
        parts.append(text)
    figures["load_1min_at_end"] = os.getloadavg()[0]
    return BenchResult(None, figures, "\n\n".join(parts))


def measure_rates(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read 90% of an epoch of the text with each reader in turn, in rounds."""
    names = write_text(folder / "text", options.mib)
    tokenizers = {"bytes": "bytes", "bpe": write_tokenizer(folder / "tokenizer.json")}
    settings = PrepareSettings(held_out=0.0, workers=options.workers)
    rows, figures = list[list[str]](), dict[str, Any]()
    with served(folder / "text") as (url, _):
        places = {"http": f"{url}/", "files": f"{folder / 'text'}/"}
        for kind in options.tokenizers:
            start_s = time.perf_counter()
            manifest = prepare(
                str(folder / "text"), tokenizers[kind], "auto", "auto", folder / kind, settings
            )
            figures[f"{kind}, prepare_s"] = time.perf_counter() - start_s
            # at the end of an epoch datasets sleeps for 5 s, which is not counted
            tokens = sum(shard.tokens for shard in manifest.splits["train"]) * 9 // 10
            for place in getattr(options, "from"):
                source = folder / f"{place}.urls"
                source.write_text("".join(f"{places[place]}{name}\n" for name in names))
                base = ReadCase("", str(source), tokenizers[kind], tokens, options.workers, "")
                rounds = [
                    _read_all(folder / f"{kind}-{place}-{n}", base, kind) for n in range(options.rounds)
                ]
                cell = {reader: medians([each[reader] for each in rounds]) for reader in READERS}
                figures[f"{kind}, {place}"] = {"median": cell, "rounds": rounds}
                rows += [_row(f"{kind}, {place}", reader, median) for reader, median in cell.items()]
    head = ("tokens, source", "reader", "tokens/s", "tokens/CPU s", "first batch s", "peak GiB", "load")
    return figures, format_table(head, rows)


def _read_all(folder: Path, base: ReadCase, kind: str) -> dict[str, dict[str, float]]:
    """The figures of each reader, in the order of READERS; the second finds what the first has cached."""
    folder.mkdir()
    prepared = str(folder.parent / kind)
    return {
        name: run_case(
            dataclasses.replace(
                base,
                reader=name.partition(",")[0],
                source=prepared if name == "prepared" else base.source,
                cache=str(folder),
            )
        )
        for name in READERS
    }


def run_case(case: ReadCase) -> dict[str, float]:
    """Run a case in its own process; its figures, the peak of memory and cache, and the load. Raises
    BenchError."""
    load = os.getloadavg()[0]
    process = subprocess.Popen(start_case(case), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with sample_tree(psutil.Process(process.pid), Path(case.cache)) as peaks:
        output, errors = process.communicate()
    if process.returncode:
        raise BenchError(f"{case.reader} failed: {errors.strip().splitlines()[-1:]}")
    return json.loads(output.splitlines()[-1]) | peaks | {"load": load}


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _row(case: str, reader: str, median: Mapping[str, float]) -> list[str]:
    rates = [f"{median[name]:,.0f}" for name in ("tokens_per_s", "tokens_per_cpu_s")]
    return [case, reader, *rates, *(f"{median[name]:.2f}" for name in ("first_s", "peak_gib", "load"))]


def measure_indexes(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read the index of many small shards, and of 200 of 500 row groups."""
    figures = dict[str, Any]()
    for shards, groups in ((options.shards, 1), (200, 500)):
        text = folder / f"text-{groups}"
        names = write_shards(text, shards, groups)
        with served(text) as (url, count):
            for ranks in (1, 2):
                name = f"{shards:,} shards x {groups:,}, {ranks} ranks"
                cache = folder / f"{groups}-{ranks}"
                figures[name] = measure_index(f"{url}/{names}", ranks, cache, count)
    columns = tuple(next(iter(figures.values())))
    rows = [[name, *(f"{each[column]:,.2f}" for column in columns)] for name, each in figures.items()]
    return figures, format_table(("index", *columns), rows)


def measure_bounded(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read one epoch of much text through a small cache, which the open windows of all lanes must fit."""
    names = write_text(folder / "text", options.bounded_mib, group_rows=100)
    source, cache = folder / "files.urls", folder / "cache"
    source.write_text("".join(f"{folder / 'text' / name}\n" for name in names))
    cache.mkdir()
    tokens = options.bounded_mib * 2**20
    figures = run_case(ReadCase("streamed", str(source), "bytes", tokens, options.workers, str(cache), 0.2))
    lines = [(name, f"{value:,.3f}") for name, value in figures.items()]
    return figures, format_table((f"{options.bounded_mib} MiB through 0.2 GiB", "value"), lines)


MEASUREMENT = Measurement(
    "streaming",
    add_streaming_options,
    measure_streaming,
    description=__doc__ or "",
    epilog="Needs the extras hf and stream, and psutil.",
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
