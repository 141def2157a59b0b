"""The command `tools.dryrun`: its JSON, its errors, what remains after an interrupt, and its message where
the fake GPU cannot be installed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.tools.dryrun import install
from meshwright.tools.dryrun.__main__ import main
from meshwright.tools.dryrun.install import FakeGpuError
from meshwright.train.errors import ConfigError, PlanError
from tests.fake_gpu.commands import install_for_tests
from tests.support.launch import LIMIT_S, ROOT

DEBUG = ("--config", "llama_debug.yaml", "--gpus", "2")


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.dryrun", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_mistake_is_found_before_anything_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, error, message in (
        (["--parallel.tpp=2"], ConfigError, r"parallel\.tpp.*parallel\.tp"),
        (["--parallel.tp=3"], PlanError, r"parallel\.tp=3"),
        (["--keep", str(tmp_path)], ConfigError, rf"--keep={tmp_path}.*empty"),
    ):
        with pytest.raises(error, match=message):
            main([*DEBUG, "--cache", str(tmp_path / "cache"), *arguments])
    assert not (tmp_path / "cache").exists()


def test_wheels_that_cannot_be_downloaded_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip fails as it does without a network, and nothing remains of the attempt."""
    python, cache, lines = tmp_path / "python", tmp_path / "cache", list[str]()
    python.write_text('#!/bin/sh\necho "ERROR: No matching distribution found: $*" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FakeGpuError, match=r"cannot be downloaded .*No matching distribution") as error:
        install.install(cache, lines.append)
    assert "\n" not in str(error.value)
    assert f"torch==={install.TORCH} triton==={install.TRITON}" in str(error.value)
    (announced,) = lines
    assert f"to {cache}: {install.SIZE}" in announced
    assert {path.name for path in cache.iterdir()} <= {"lock"}


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FakeGpuError, match=r"g\+\+|gcc"):
        install.install(tmp_path / "cache", print)
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_installation_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install.make_whole(tmp_path / "torch", fill)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def cache() -> str:
    try:
        return str(install_for_tests().site.parent)
    except FakeGpuError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_step_of_llama_debug(cache: str, tmp_path: Path) -> None:
    """On more GPUs than NCCL initializes with the id of one rank."""
    kept, ranks = tmp_path / "kept", 256
    job = ["--config", "llama_debug.yaml", "--gpus", str(ranks), f"--train.global_batch_size={ranks}"]
    with start(*job, "--cache", cache, "--keep", str(kept), "--json") as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["host_waits"] == document["device_allocations"] == 0
    assert document["launches"] == sum(document["launches_by_library"].values()) > 200
    assert document["launches"] == sum(kernel["calls"] for kernel in document["kernels"])
    assert {c["axis"] for c in document["collectives"]} == {"dp_shard", "world"}
    assert sum(total["count"] for total in document["totals"]) == len(document["collectives"])
    assert document["launches_of_unknown_bytes"] < 0.05 * document["launches"]
    assert 0 < document["peak_memory_gib"] <= document["reserved_memory_gib"]
    assert document["plan"]["mesh"]["dp_shard"] == ranks
    assert {"trace.json", "operators.json", "inductor"} <= {path.name for path in kept.iterdir()}


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_ctrl_c_leaves_nothing(cache: str, tmp_path: Path) -> None:
    with start(*DEBUG, "--cache", cache, TMPDIR=str(tmp_path)) as process:
        assert process.stderr is not None
        assert any("building the model" in line for line in process.stderr)
        (log,) = tmp_path.glob("dryrun-*/log.*")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert list(tmp_path.glob("dryrun-*")) == []
    child = int(log.suffix[1:])
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
