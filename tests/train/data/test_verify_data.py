"""Ranks on two nodes check prepared data together, once; later starts look at each file once per node."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.train.data import verify
from meshwright.train.data.token_store import MANIFEST, read_manifest
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError
from tests.support.stores import write_store
from tests.support.worlds import run_ranks

SHARDS = 9
RANKS = 4  # on two nodes with one disk


def start(folder: Path, cache: Path) -> dict[str, Any]:
    """Verify on this rank; return what was hashed, the folders listed, the lines on rank 0, and the error."""
    rank = dist.get_rank()
    ranks = RankInfo(rank, RANKS, rank % 2, 2, True)
    hashed, listed, lines, error = list[str](), list[Any](), list[str](), ""
    with pytest.MonkeyPatch.context() as patch:
        hash_file, scandir = verify.hash_file, os.scandir
        patch.setattr(verify, "hash_file", lambda path: (hashed.append(path.name), hash_file(path))[1])
        patch.setattr(os, "scandir", lambda path: (listed.append(path), scandir(path))[1])
        try:
            verify.verify_together({folder: read_manifest(folder)}, True, cache, ranks, lines.append)
        except DataError as problem:
            error = str(problem)
    return {"hashed": hashed, "listed": len(listed), "lines": lines, "error": error}


def starts(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """A first start, a second one, and one after two files have changed."""
    results = [start(folder, cache), start(folder, cache)]
    if dist.get_rank() == 0:
        for name in ("train-00003.bin", "train-00004.ends"):
            path = folder / name
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    dist.barrier()
    return [*results, start(folder, cache)]


def test_all_ranks_read_every_file_once_and_later_starts_none(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write_store(folder, [[[number, 1, 2]] for number in range(SHARDS - 1)], [[[7, 8]]])
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    first, second, changed = zip(*run_ranks(RANKS, starts, folder, tmp_path / "cache"), strict=True)
    assert sorted(name for rank in first for name in rank["hashed"]) == names
    assert all(4 <= len(rank["hashed"]) <= 5 for rank in first), "each its share"
    assert "18 files" in first[0]["lines"][0]
    assert [rank["hashed"] for rank in second] == [[]] * RANKS
    for ranks in (first, second):
        assert [rank["listed"] > 0 for rank in ranks] == [True, False] * 2, (
            "one rank of each node asks the disk"
        )
        assert [rank["error"] for rank in ranks] == [""] * RANKS
    (error,) = {rank["error"] for rank in changed}
    assert "has changed since it was prepared" in error
    assert "train-00003.bin" in error or "train-00004.ends" in error
