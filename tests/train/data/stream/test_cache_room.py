"""The first windows of a streamed run are made at once, and its cache is seldom looked through."""

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.sequences import BatchShape
from meshwright.train.data.stream import token_cache
from meshwright.train.data.stream.order import StreamReader
from meshwright.train.data.stream.token_cache import CacheLimits
from tests.train.data.stream.test_stream_order import PACKED, order_of, write_text

ALONE_SHAPE = BatchShape(2, 1, 0, 1)


def results(cache: Path) -> list[Path]:
    return list((cache / "stream" / "results").iterdir())


def test_the_first_windows_of_all_lanes_are_made_before_the_first_step(tmp_path: Path) -> None:
    write_text(tmp_path / "text", files=9)
    order = order_of(tmp_path / "cache", tmp_path / "text", lanes=6)
    with closing(StreamReader(order, TrainPosition(), ALONE_SHAPE, PACKED)):
        while len(results(tmp_path / "cache")) < 6:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(results(tmp_path / "cache")) == 6  # none of the windows that follow, before a step is read


def test_first_windows_larger_than_the_cache_are_not_made_at_once(tmp_path: Path) -> None:
    write_text(tmp_path / "text", files=9)
    sizes = order_of(tmp_path / "cache", tmp_path / "text").sources[0].index.sizes
    limits = CacheLimits(1.0, float(5 * sizes.max()), workers=1)
    order = order_of(tmp_path / "cache", tmp_path / "text", lanes=6, limits=limits)
    with closing(StreamReader(order, TrainPosition(), ALONE_SHAPE, PACKED)):
        while not results(tmp_path / "cache"):
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(results(tmp_path / "cache")) <= 3


def test_a_cache_with_room_is_not_looked_through_for_every_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "text", files=40, lines=4)
    looks, scan = list[Any](), os.scandir

    def looking(folder: Any) -> Any:
        looks.extend([folder] * (folder == tmp_path / "cache" / "stream" / "data"))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", looking)
    order = order_of(tmp_path / "cache", tmp_path / "text", lanes=40)
    with closing(StreamReader(order, TrainPosition(), ALONE_SHAPE, PACKED)) as reader:
        for first in range(0, 80, 2):
            reader.read(first, pinned=False)
        assert len(results(tmp_path / "cache")) == 40
    assert 0 < len(looks) <= token_cache.FETCHERS
