"""Preparations that are killed, stopped, or run at the same time: finished shards are kept, and the result is
the same."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.train.data.prepare.prepare import Progress, prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.errors import DataError
from tests.support.forks import Fork, fork
from tests.support.texts import (
    files_of,
    odd_texts,
    prepare_texts,
    processes_of,
    spawned_workers,
    train_bpe,
    write_jsonl,
)

SETTINGS = {"held_out": 0.1, "shard_bytes": 20_000}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", odd_texts(10_000, seed=7, mean_bits=15))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def whole(source: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed preparation."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    prepare_texts(source, folder, tokenizer, **SETTINGS)
    assert len(list(folder.glob("train-*.bin"))) > 20
    return files_of(folder)


def start(
    source: Path, tokenizer: Path, out: Path, workers: int, stop_at: int, act: Callable[[], object]
) -> Fork:
    """Start a process that prepares, with its workers in a separate session; it calls `act` once `stop_at`
    shards are finished."""
    return fork(
        run_preparation, source, tokenizer, out, workers, stop_at, act, output=out.with_name("output")
    )


def run_preparation(
    source: Path, tokenizer: Path, out: Path, workers: int, stop_at: int, act: Callable[[], object]
) -> None:
    os.setsid()

    def watch(_progress: Progress) -> None:
        if len(results(out)) >= stop_at:
            act()

    settings = PrepareSettings(**SETTINGS, workers=workers)  # type: ignore[arg-type]
    try:
        prepare(str(source), str(tokenizer), "auto", "auto", out, settings, watch)
    except DataError as error:
        raise SystemExit(f"DataError: {error}") from None


def kill_self() -> None:
    """Kill this process; its workers then exit, because their parent has ended."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_a_worker() -> None:
    os.kill(spawned_workers(os.getpid())[0], signal.SIGKILL)


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def results(out: Path) -> list[Path]:
    return sorted(out.with_name(f".{out.name}.partial").glob("results/*.json"))


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_twice_it_keeps_finished_shards_and_ends_the_same(
    workers: int, source: Path, tokenizer: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, kept = tmp_path / "out", {}
    for _ in range(2):
        process = start(source, tokenizer, out, workers, len(kept) + 3, kill_self)
        assert process.wait(60) == -signal.SIGKILL
        wait_for(lambda: not processes_of(process.pid))  # noqa: B023
        assert not out.exists()
        shards = out.with_name(".out.partial") / "data"
        done = {f"train-{path.stem}.bin": (shards / f"train-{path.stem}.bin").stat() for path in results(out)}
        assert len(done) >= len(kept) + 3
        assert all(os.path.samestat(done[name], stat) for name, stat in kept.items())
        assert all(done[name].st_mtime_ns == stat.st_mtime_ns for name, stat in kept.items())
        kept = done
    prepare_texts(source, out, tokenizer, **SETTINGS, workers=3 - workers)
    assert all(os.path.samestat((out / name).stat(), stat) for name, stat in kept.items())
    assert files_of(out) == whole
    assert [path.name for path in tmp_path.iterdir() if path.name != "output"] == ["out"]


def test_a_dead_worker_is_an_error_that_says_so(
    source: Path, tokenizer: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(source, tokenizer, out, 2, 1, kill_a_worker)
    assert process.wait(60) == 1
    output = (tmp_path / "output").read_text()
    assert re.search(
        "DataError: a worker .* killed .*memory.*finished shards are kept$", output, re.MULTILINE
    ), output
    wait_for(lambda: not processes_of(process.pid))
    assert results(out)
    prepare_texts(source, out, tokenizer, **SETTINGS)
    assert files_of(out) == whole


def test_a_kept_shard_that_was_damaged_is_made_again(
    source: Path, tokenizer: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert start(source, tokenizer, out, 1, 3, kill_self).wait(60) == -signal.SIGKILL
    shards = out.with_name(".out.partial") / "data"
    (shards / "train-00000.bin").write_bytes(whole["train-00000.bin"][:-2] + b"\0\0")
    (shards / "train-00001.ends").unlink()
    (shards / ".train-00009.bin.1-1.tmp").write_bytes(b"cut off")
    results(out)[2].write_text("{")
    prepare_texts(source, out, tokenizer, **SETTINGS)
    assert files_of(out) == whole


@pytest.mark.parametrize("change", ["tokenizer", "bos", "held_out", "text_field", "content"])
def test_what_was_begun_with_other_settings_is_not_used(change: str, tokenizer: Path, tmp_path: Path) -> None:
    """The second file is invalid at first, so that the shards of the first are finished and kept."""
    folder, out = tmp_path / "source", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        "".join(f'{{"text": "text {i}", "body": "body {i}"}}\n' for i in range(100))
    )
    (folder / "b.jsonl").write_text("no JSON\n")
    changed = {"tokenizer": str(tokenizer), "bos": "auto", "held_out": 0.3, "text_field": "body"}
    plain = {"tokenizer": "bytes", "bos": "none", "held_out": 0.0, "text_field": "text"}
    first, second = {key: changed[key] if key == change else plain[key] for key in plain}, dict(plain)
    if change == "bos":  # the byte tokenizer has no BOS
        first, second = ({**plain, "tokenizer": str(tokenizer), "bos": bos} for bos in ("auto", "none"))

    def attempt(where: Path, tokenizer: str, bos: str, held_out: float, text_field: str) -> None:
        prepare(str(folder), tokenizer, bos, "auto", where, PrepareSettings(held_out, text_field, 400))

    with pytest.raises(DataError, match="not JSON"):
        attempt(out, **first)
    assert len(results(out)) > 3
    write_jsonl(folder / "b.jsonl", ["last"])
    if change == "content":  # of the same size
        path = folder / "a.jsonl"
        path.write_text(path.read_text().replace("text 0", "TEXT 0"))
    attempt(out, **second)
    attempt(tmp_path / "afresh", **second)
    assert files_of(out) == files_of(tmp_path / "afresh")


def test_prepared_data_below_the_source_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".out.partial" / "results").mkdir(parents=True)
    (tmp_path / ".out.partial" / "results" / "00000.json").write_text("{}")
    first = prepare_texts(tmp_path, tmp_path / "out", held_out=0.0)
    assert [file.name for file in first.sources] == ["a.txt"]
    assert prepare_texts(tmp_path, tmp_path / "out", held_out=0.0) == first
