"""tools/bench/speed/data.py: a small measurement is complete and deletes its files, and its parts measure
what their names state."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.harness import check_disk_space, spread
from meshwright.tools.bench.planner.published import published_rows
from meshwright.tools.bench.speed.data import (
    PUBLISHED_TOKENS_S,
    QUICK,
    VOCAB_SIZE,
    measure_wait,
    node_batch,
    open_loader,
    set_cache,
    write_store,
)
from meshwright.tools.processes import BenchError
from meshwright.train.data.token_store import open_split, read_manifest, verify
from meshwright.train.errors import DataError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(folder, int(QUICK.store_gb * 1e9))
    return folder


@pytest.mark.slow
def test_the_whole_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "--quick", f"--folder={tmp_path}", "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert list(tmp_path.iterdir()) == []
    assert figures["size"]["store_gb"] == QUICK.store_gb
    for cache in ("cold", "warm"):
        assert figures["loader_tokens_s"][cache]["median"] > 1e5
    assert figures["data_wait"]["tokens_s"] == 8 * 10_471
    assert figures["data_wait"]["pretend_step_s"] == pytest.approx(16 * 1024 / (8 * 10_471))
    tokenising = figures["tokenising"]
    assert all(tokenising["mb_s"][name]["min"] > 0.01 for name in ("library", "prepare"))
    assert 0 < tokenising["ratio"] < 10


def test_the_store_is_one_that_training_reads(store: Path) -> None:
    verify(store)
    manifest = read_manifest(store)
    split = open_split(store, manifest, "train")
    assert split.tokens == int(QUICK.store_gb * 1e9) // 2
    ends = split.ends_between(0, split.tokens)
    assert (len(ends), ends[-1]) == (split.documents, split.tokens)
    assert 900 < split.tokens / split.documents < 1100
    ids = np.empty(100_000, np.int64)
    split.read(1_000_000, ids)
    assert abs(ids.mean() / VOCAB_SIZE - 0.5) < 0.01
    loader = open_loader(store, QUICK, 0)
    batches = loader.next().micro_batches
    loader.close()
    assert len(batches) * batches[0].tokens.shape[0] == node_batch().global_batch_size == 16
    changed = store / "train-00000.bin"
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train-00000\.bin has changed"):
        verify(store)
    changed.write_bytes(content)


@pytest.mark.skipif(
    not Path("/proc/thread-self/io").exists(), reason="needs /proc to count bytes read from the disk"
)
def test_cold_is_read_from_the_disk_and_warm_is_not(tmp_path: Path) -> None:
    """A store of its own: the kernel keeps pages that a reader of another test may still have mapped."""
    write_store(tmp_path, int(QUICK.store_gb * 1e9))
    shard = tmp_path / "train-00000.bin"
    with shard.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if disk_bytes_of(shard) == 0:
        pytest.skip("the temporary folder is in memory")
    set_cache(tmp_path, "cold")
    cold_bytes = disk_bytes_of(shard)
    set_cache(tmp_path, "warm")
    warm_bytes = disk_bytes_of(shard)
    size = shard.stat().st_size
    assert cold_bytes > 0.9 * size
    assert warm_bytes < 0.1 * size  # a machine without free memory evicts some


def disk_bytes_of(path: Path) -> int:
    """Return the bytes that the disk delivers to this thread while it reads a file."""
    counts = []
    for _ in range(2):
        counts.append(int(Path("/proc/thread-self/io").read_text().split("\nread_bytes: ")[1].split()[0]))
        path.read_bytes()
    return counts[1] - counts[0]


def test_a_step_that_is_too_short_waits(store: Path) -> None:
    """A step without duration waits for every batch; a step of a quarter of a second for a far smaller share
    of its time."""
    short_share = measure_wait(store, QUICK, lambda step_s: None, 0.0)
    long_share = measure_wait(store, QUICK, time.sleep, 0.25)
    assert 0.1 < short_share <= 1
    assert long_share < short_share / 2


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=r"GB free.* --gb 1e\+09 needs 1.1e\+09: use a smaller --gb.*--folder"
    ):
        check_disk_space(tmp_path, 1e9)
    with pytest.raises(BenchError, match=r"--folder .*gone: no such folder"):
        check_disk_space(tmp_path / "gone", 1)


def test_the_pretend_step_is_the_fastest_that_was_published() -> None:
    rates = [run.tokens_per_s_per_gpu for run in published_rows() if run.model == "llama3-8b"]
    assert max(rates) == PUBLISHED_TOKENS_S


def test_small_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(SystemExit, match="2"):
        main(["data", "--train.steps=3"])
    assert "no config keys: --train.steps=3" in capsys.readouterr().err
