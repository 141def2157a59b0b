"""Runs on a streamed corpus: every step reads the same text on every mesh, through failing requests and
kills; a stop while data is late; and what a signed URL contains is written nowhere."""

import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.flaky_server import Fault, FlakyServer, Request, flaky_server
from tests.support.launch import EAGER, TINY, Launch, family, kill, read_metrics, run, started
from tests.support.run_faults import check_stopped, wait

SECRET = "S3CRETTOKEN"
QUIET = ("--metrics.tensorboard=false", "--optim.schedule=constant", "--data.workers=1")


@contextmanager
def corpus(folder: Path, files: int = 8, lines: int = 60) -> Iterator[tuple[FlakyServer, Path]]:
    """A server of files of JSON lines, and a list of their signed URLs."""
    chosen, served = random.Random(0), folder / "served"
    served.mkdir()
    for number in range(files):
        texts = [f"line {n} of {number} squares to {n * n}" * chosen.randrange(1, 4) for n in range(lines)]
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (served / f"{number}.jsonl").write_text(content)
    with flaky_server(served) as server:
        urls = f"{server.url}/{{0..{files - 1}}}.jsonl?X-Signature={SECRET}\n"
        (folder / "list.urls").write_text(urls)
        yield server, folder / "list.urls"


def arguments(folder: Path, source: Path, *more: str) -> list[str]:
    places = (f"--data.source={source}", f"--data.cache_dir={folder / 'cache'}")
    return [*TINY, *EAGER, *QUIET, *places, "--train.global_batch_size=4", *more]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows of steps so far, in the order of the file, whose last line may be incomplete."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "data_hash" in row]


def hashes(folder: Path) -> dict[int, str]:
    return {row["step"]: row["data_hash"] for row in rows_of(folder)}


def contents(*folders: Path) -> list[str]:
    """Files below the folders that contain the secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_run_on_other_ranks_reads_the_same_and_writes_no_secret(tmp_path: Path) -> None:
    outputs = list[str]()
    with corpus(tmp_path) as (server, source):
        server.fault_of = lambda request: Fault(status=503) if request.number % 5 == 0 else None
        for name, parts in (("whole", ((1, 6),)), ("parts", ((1, 3), (2, 6)))):
            for ranks, steps in parts:
                keys = (f"--train.steps={steps}", f"--run.dir={tmp_path / 'runs' / name}")
                result = run(ranks, *arguments(tmp_path / name, source, *keys, "--checkpoint.every=3"))
                assert result.returncode == 0, result.stderr
                outputs += [result.stdout, result.stderr]
    whole, parts = (hashes(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert whole == parts
    assert len(set(whole.values())) == 6
    assert SECRET not in "".join(outputs)
    assert not contents(tmp_path / "runs", tmp_path / "whole", tmp_path / "parts")
    assert "X-Signature" in server.requests[0].path


def stands_still(folder: Path) -> bool:
    """Whether no step has ended for a second. If a machine is so busy that the run does not wait for data,
    the stop is an ordinary one."""
    before = len(hashes(folder))
    time.sleep(1)
    return len(hashes(folder)) == before


def test_a_stop_while_data_is_late_saves_the_last_step(tmp_path: Path) -> None:
    folder, late = tmp_path / "run", threading.Event()
    keys = ("--train.steps=100000", "--checkpoint.every=100000", "--data.lanes=2", f"--run.dir={folder}")
    with corpus(tmp_path, files=40, lines=8) as (server, source):
        server.fault_of = lambda request: Fault(stall_s=600) if late.is_set() else None
        with started(2, *arguments(tmp_path, source, *keys), output=tmp_path / "output.txt") as running:
            wait(running, lambda: hashes(folder))
            late.set()
            asked = len(server.requests)
            wait(running, lambda: len(server.requests) > asked)
            wait(running, lambda: stands_still(folder))
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 0, running.output()
    assert check_stopped(folder, "signal SIGINT") == len(hashes(folder))


def kill_all(running: Launch) -> None:
    """Kill all ranks and what they have started, as if the machine had gone down."""
    kill([pid for rank in running.ranks for pid in family(rank.pid)])
    for rank in running.ranks:
        rank.wait()


def fails_often(request: Request) -> Fault | None:
    faults = [Fault(status=503), Fault(truncate=100), Fault(close=True), Fault(status=429)]
    return faults[request.number // 3 % 4] if request.number % 3 == 0 else None


KILLS = int(os.environ.get("MESHWRIGHT_STREAM_KILLS", "6"))


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_killed_runs_on_other_ranks_read_the_same(tmp_path: Path) -> None:
    chosen, keys = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"]), [f"--train.steps={4 * KILLS}"]
    keys += ["--train.global_batch_size=8", "--checkpoint.every=1", "--data.lanes=4"]
    whole, folder, during = tmp_path / "whole", tmp_path / "run", 0
    with corpus(tmp_path, files=24, lines=8) as (server, source):
        result = run(1, *arguments(tmp_path / "0", source, *keys, f"--run.dir={whole}"))
        assert result.returncode == 0, result.stderr
        server.fault_of = fails_often
        places = itertools.cycle([tmp_path / name for name in ("1", "1", "2")])
        ranks = itertools.cycle([1, 4, 2])
        for number in range(KILLS):
            place = next(places)
            if chosen.random() < 0.5:
                shutil.rmtree(place, ignore_errors=True)  # another machine, without a cache
            output = tmp_path / f"{number}.txt"
            run_keys = arguments(place, source, *keys, f"--run.dir={folder}")
            before, more = len(rows_of(folder)), chosen.randrange(4)
            with started(next(ranks), *run_keys, output=output) as running:
                wait(running, lambda: len(rows_of(folder)) >= before + more)  # noqa: B023
                time.sleep(chosen.random() * 0.1)
                during += running.running() and len(rows_of(folder)) > before
                kill_all(running)
        result = run(2, *arguments(tmp_path / "1", source, *keys, f"--run.dir={folder}"))
        assert result.returncode == 0, result.stderr
    print(f"{KILLS} kills, {during} of them during training")
    assert hashes(folder) == hashes(whole)
    assert all(row["data_hash"] == hashes(whole)[row["step"]] for row in rows_of(folder))
    losses = [read_metrics(each)[4 * KILLS]["loss"] for each in (folder, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-5)
