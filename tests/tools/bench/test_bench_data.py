"""tools.bench data: a small measurement is complete and deletes its files, and its parts measure what their
names state."""

import json
import os
from pathlib import Path

import pytest

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.speed.data import QUICK, set_cache, write_store

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-data")]


def test_the_whole_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "--quick", f"--folder={tmp_path}", "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert list(tmp_path.iterdir()) == []
    assert figures["size"]["store_gb"] == QUICK.store_gb
    assert all(figures["loader_tokens_s"][cache]["median"] > 0 for cache in ("cold", "warm"))
    assert figures["data_wait"]["pretend_step_s"] == pytest.approx(16 * 1024 / (8 * 10_471))
    assert all(figures["tokenising"]["mb_s"][name]["min"] > 0 for name in ("library", "prepare"))


@pytest.mark.skipif(
    not Path("/proc/thread-self/io").exists(), reason="needs /proc to count bytes read from the disk"
)
def test_cold_is_read_from_the_disk_and_warm_is_not(tmp_path: Path) -> None:
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
