"""Measures the index of a streamed source of many small shards, read from a server that counts requests."""

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.support.forked_ranks import run_forked
from meshwright.train.data.stream.index import read_index
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.distributed.ranks import RankInfo


def write_shards(folder: Path, shards: int, groups: int) -> str:
    """Write equal parquet files of `groups` row groups of one document; return what names them in a URL."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    folder.mkdir(parents=True)
    table = pyarrow.table({"text": [f"document {number}" for number in range(groups)]})
    pyarrow.parquet.write_table(table, folder / "first", row_group_size=1)
    for number in range(shards):
        shutil.copyfile(folder / "first", folder / f"{number:06d}.parquet")
    return f"{{000000..{shards - 1:06d}}}.parquet"


def measure_index(url: str, ranks: int, cache: Path, requests: Callable[[], int]) -> dict[str, float]:
    """Read the index on `ranks` ranks of this machine, and again from the cache. Returns seconds of rank 0,
    wall clock and of its CPU, by how many MiB its memory grew, and the requests of all ranks a shard."""
    figures = dict[str, float]()
    for start in ("first", "second"):
        before = requests()
        of_start = run_forked(ranks, _read, url, cache)
        figures |= {f"{start}_{name}": value for name, value in of_start.items() if name != "shards"}
        figures[f"{start}_requests_per_shard"] = (requests() - before) / of_start["shards"]
    figures["file_mib"] = sum(path.stat().st_size for path in (cache / "stream").iterdir()) / 2**20
    return figures


def _read(url: str, cache: Path) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    rss_bytes, start_s, start_cpu_s = (
        psutil.Process().memory_info().rss,
        time.perf_counter(),
        time.process_time(),
    )
    info = RankInfo(rank, ranks, rank, ranks, False)
    index = read_index(url, find_shards(url), "text", Remote(60.0), cache, info)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "growth_mib": (peak_bytes - rss_bytes) / 2**20,
        "shards": len(index.shards),
        "groups": len(index.groups),
    }
