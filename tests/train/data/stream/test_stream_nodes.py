"""Ranks and nodes of a streamed run that do not have the same files, or no file locks."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import torch.distributed as dist

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import DataConfig
from meshwright.train.data.corpus import load_on_all_ranks
from meshwright.train.data.sequences import BatchShape
from meshwright.train.data.stream import fetch, token_cache
from meshwright.train.data.stream.index import read_index
from meshwright.train.data.stream.order import StreamReader
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.distributed.ranks import ALONE, RankInfo
from meshwright.train.errors import DataError
from tests.support.texts import train_bpe
from tests.support.worlds import run_ranks
from tests.train.data.stream.test_stream_order import PACKED, order_of, write_text


def index_of(text: Path, cache: Path, ranks: RankInfo = ALONE) -> str:
    return read_index(str(text), find_shards(str(text)), "text", Remote(1.0), cache, ranks).fingerprint


def index_of_node(text: Path, caches: Path) -> str:
    rank = dist.get_rank()
    return index_of(text, caches / str(rank), RankInfo(rank, 3, 0, 1, True))


@pytest.mark.parametrize("kept", ["one node", "nodes with other ones"])
def test_all_nodes_use_one_index(tmp_path: Path, kept: str) -> None:
    text = tmp_path / "text"
    write_text(text, files=3)
    now = index_of(text, tmp_path / "1")
    if kept != "one node":
        (path,) = (tmp_path / "1" / "stream").iterdir()
        old = json.loads(path.read_bytes())
        old[0]["content"] = "as it was before"
        for node in "02":
            (tmp_path / node / "stream").mkdir(parents=True)
            (tmp_path / node / "stream" / path.name).write_text(json.dumps(old))
    assert run_ranks(3, index_of_node, text, tmp_path) == [now] * 3
    assert [index_of(text, tmp_path / node) for node in "012"] == [now] * 3


def load_refused(folder: Path) -> str:
    rank = dist.get_rank()
    config = DataConfig(source=str(folder / "text"), stream=True, tokenizer=str(folder / f"tokenizer{rank}"))
    with pytest.raises(DataError) as caught:
        load_on_all_ranks(config, RankInfo(rank, 2, 0, 1, True), None, print)
    return str(caught.value)


def test_nodes_with_other_tokenizers_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "text", files=1)
    for rank in range(2):
        train_bpe(tmp_path / f"tokenizer{rank}", 300 + rank)
    first, second = run_ranks(2, load_refused, tmp_path)
    assert first == second
    assert "tokenizer" in first


class NoLock:
    """A lock of a file system without locks."""

    def __init__(self, path: Path) -> None:
        pass

    def acquire(self) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def release(self) -> None:
        pass


def test_ranks_that_make_the_same_groups_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "make_lock", NoLock)
    monkeypatch.setattr(token_cache, "start_workers", ThreadPoolExecutor)
    monkeypatch.setattr(fetch, "is_local", lambda location: False)
    write_text(tmp_path / "text", files=12, lines=200)

    def read(_: int) -> list[list[int]]:
        order = order_of(tmp_path / "cache", tmp_path / "text")
        with closing(StreamReader(order, TrainPosition(), BatchShape(6, 1, 0, 1), PACKED)) as reader:
            return [reader.read(6 * step, pinned=False)[0].tokens.tolist() for step in range(8)]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(read, range(4))
    assert others == [first] * 3


def test_a_nested_field_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a"], ["b"]]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"a\.parquet.*data\.text_field"):
        index_of(tmp_path, tmp_path / "cache")
