"""More shards than a process may open files, and files that change during a run."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from meshwright.train.data.token_store import open_split, read_manifest
from meshwright.train.errors import DataError
from tests.support.launch import EAGER, TINY, read_metrics, run
from tests.support.limited import LIMITED
from tests.support.stores import write_store
from tests.support.worlds import run_ranks


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_2000_shards_are_trained_on_where_256_files_may_be_open(tmp_path: Path) -> None:
    shards = [[[number % 251] * 40] for number in range(2000)]
    write_store(tmp_path / "store", shards[:1900], shards[1900:])
    keys = [
        "--train.seq_len=64",
        "--train.micro_batch_size=8",
        "--train.global_batch_size=64",
        "--train.steps=4",
    ]
    keys += ["--train.eval_every=4", "--data.document_mask=true", f"--run.dir={tmp_path / 'run'}"]
    arguments = [*TINY, *EAGER, f"--data.source={tmp_path / 'store'}", *keys]
    result = run(1, "NOFILE=256", "train.main", *arguments, module=LIMITED)
    assert result.returncode == 0, result.stderr
    assert list(read_metrics(tmp_path / "run")) == [0, 1, 2, 3, 4]


def test_a_limit_that_does_not_do_is_said(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[[1, 2, 3]]] * 3)
    (message,) = run_ranks(1, load_with_no_file_left, tmp_path / "store")
    assert re.search(r"train-00000\.bin .*\(Too many open files\): .* \d+ files .*ulimit -n", message), (
        message
    )


def load_with_no_file_left(folder: Path) -> str:
    manifest = read_manifest(folder)
    try:
        with no_file_left():
            open_split(folder, manifest, "train").read(0, np.empty(1, np.int64))
    except DataError as error:
        return str(error)
    return ""


@contextmanager
def no_file_left() -> Iterator[None]:
    """A context in which this process has no free file descriptor."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in taken:
            os.close(number)


@pytest.mark.parametrize("change", ["touched", "rewritten", "longer", "shorter, of the same time", "gone"])
def test_a_shard_that_changes_before_it_is_read_is_not_read(change: str, tmp_path: Path) -> None:
    """Except a touched file: users touch files so that their cluster does not delete them."""
    split = open_split(
        tmp_path / "store", write_store(tmp_path / "store", [[[1, 2, 3]], [[4, 5, 6]]]), "train"
    )
    path, out = tmp_path / "store/train-00001.bin", np.empty(6, np.int64)
    before_ns = path.stat().st_mtime_ns
    if change == "gone":
        path.unlink()
    else:
        content = {"touched": [4, 5, 6], "rewritten": [4, 5, 7], "longer": [4, 5, 6, 7]}
        np.array(content.get(change, [4]), "<u2").tofile(path)
        os.utime(path, ns=(0, 1 if change in content else before_ns))
    if change == "touched":
        split.read(0, out)
        assert out.tolist() == [1, 2, 3, 4, 5, 6]
    else:
        message = r"train-00001\.bin (has changed .*start the run again|cannot be opened \(No such file)"
        with pytest.raises(DataError, match=message):
            split.read(0, out)
