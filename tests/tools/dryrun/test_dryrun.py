"""The command `tools.dryrun`: its JSON, its errors, what remains after an interrupt, and its message where
the fake GPU cannot be installed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
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
    command = [sys.executable, "-m", "tools.dryrun", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*arguments: str, **env: str) -> tuple[int, str, str]:
    with start(*arguments, **env) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        (["--parallel.tpp=2"], ConfigError, ["parallel.tpp", "parallel.tp"]),
        (["--parallel.tp=3"], PlanError, ["parallel.tp=3"]),
        (["--keep", "{tmp}"], ConfigError, ["--keep={tmp}", "empty"]),
    ],
)
def test_a_mistake_is_found_before_anything_is_downloaded(
    arguments: Sequence[str], error: type[Exception], parts: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(error) as raised:
        main([*DEBUG, "--cache", str(tmp_path / "cache"), *given])
    assert all(part.format(tmp=tmp_path) in str(raised.value) for part in parts), raised.value
    assert not (tmp_path / "cache").exists()


def test_wheels_that_cannot_be_downloaded_are_one_sentence(tmp_path: Path) -> None:
    """Exit code 2, and nothing remains of the attempt."""
    code, out, err = run(*DEBUG, "--cache", str(tmp_path / "cache"), PIP_NO_INDEX="1")
    assert (code, out) == (2, "")
    assert f"to {tmp_path / 'cache'}: {install.SIZE}" in err, "announced before the download"
    (reason,) = [line for line in err.splitlines() if line.startswith("FakeGpuError")]
    assert all(part in reason for part in (install.TORCH, install.TRITON, "cannot be downloaded"))
    assert "Traceback" not in err
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"lock"}


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
def test_a_step_of_llama_debug(cache: str, tmp_path: Path) -> None:
    """On more GPUs than NCCL initializes with the id of one rank."""
    kept, ranks = tmp_path / "kept", 256
    job = ["--config", "llama_debug.yaml", "--gpus", str(ranks), f"--train.global_batch_size={ranks}"]
    code, out, err = run(*job, "--cache", cache, "--keep", str(kept), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["host_waits"] == document["device_allocations"] == 0
    assert document["launches"] == sum(document["launches_by_library"].values()) > 200
    assert document["launches"] == sum(kernel["calls"] for kernel in document["kernels"])
    assert {c["axis"] for c in document["collectives"]} == {"dp_shard", "world"}
    assert sum(total["count"] for total in document["totals"]) == len(document["collectives"])
    assert document["launches_of_unknown_bytes"] < 0.05 * document["launches"]
    graphs = {(graph["units"][0], graph["phase"]): graph["calls"] for graph in document["graphs"]}
    assert sorted(graphs.values()) == [1, 1, 6, 6]
    assert {phase for _, phase in graphs} == {"forward", "backward"}
    assert 0 < document["peak_memory_gib"] <= document["reserved_memory_gib"]
    assert document["predicted"].keys() == {"peak_memory_gib", "reserved_memory_gib"}
    assert document["plan"]["mesh"]["dp_shard"] == ranks
    assert "step 3 of 3" in err
    assert {"trace.json", "operators.json", "inductor"} <= {path.name for path in kept.iterdir()}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(cache: str, tmp_path: Path) -> None:
    with start(*DEBUG, "--cache", cache, TMPDIR=str(tmp_path)) as process:
        assert process.stderr is not None
        assert any("building the model" in line for line in process.stderr)
        (scratch,) = tmp_path.glob("dryrun-*")
        (log,) = scratch.glob("log.*")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert list(tmp_path.glob("dryrun-*")) == []
    child = int(log.suffix[1:])
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
