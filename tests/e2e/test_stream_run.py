"""Runs on a streamed corpus: every step reads the same text on every mesh, through failing requests and
kills; a stop while data is late; and what a signed URL contains is written nowhere."""

import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from tests.support.flaky_server import Fault, FlakyServer, Request, flaky_server
from tests.support.launch import EAGER, TINY, family, kill, read_metrics, run, started

SECRET = "S3CRETTOKEN"
QUIET = ("--metrics.tensorboard=false", "--optim.schedule=constant", "--data.workers=1")


@contextmanager
def corpus(folder: Path) -> Iterator[tuple[FlakyServer, Path]]:
    """A server of files of JSON lines, and a list of their signed URLs."""
    chosen, served = random.Random(0), folder / "served"
    served.mkdir()
    for number in range(8):
        texts = [f"line {n} of {number} squares to {n * n}" * chosen.randrange(1, 4) for n in range(60)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (served / f"{number}.jsonl").write_text(lines)
    with flaky_server(served) as server:
        urls = f"{server.url}/{{0..7}}.jsonl?X-Signature={SECRET}\n"
        (folder / "list.urls").write_text(urls)
        yield server, folder / "list.urls"


def arguments(folder: Path, source: Path, *more: str) -> list[str]:
    places = (f"--data.source={source}", f"--data.cache_dir={folder / 'cache'}")
    return [*TINY, *EAGER, *QUIET, *places, "--train.global_batch_size=4", *more]


def hashes(folder: Path) -> dict[int, str]:
    return {step: row["data_hash"] for step, row in read_metrics(folder).items() if "data_hash" in row}


def contents(*folders: Path) -> list[str]:
    """Files below the folders that contain the secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


def test_a_run_on_other_ranks_reads_the_same_and_writes_no_secret(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
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
