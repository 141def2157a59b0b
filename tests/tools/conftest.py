"""Two finished runs of the real trainer: one process with tied embeddings, and two processes with uneven
shards."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.launch import run as launch
from tests.support.nested import ForkingPopen

CONFIG = """
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 64, vocab_size: 265, max_seq_len: 64}
parallel: {compile: {enabled: false}}
optim: {lr: 0.01, warmup_steps: 0}
train: {steps: 2, seq_len: 32, global_batch_size: 4, eval_every: 2, eval_sequences: 8}
checkpoint: {every: 1}
"""
TEXT = "def f(x):\n    return x + 1  # é\n"


@pytest.fixture(scope="session")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("tied"), 1, "--model.tie_embeddings=true", "--train.z_loss=0.01")


@pytest.fixture(scope="session")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes: a vocabulary of 265 is not divisible by 2, so the shards differ in size."""
    return _train(tmp_path_factory.mktemp("sharded"), 2)


@pytest.fixture(params=["tied_run", "sharded_run"])
def run(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the `python -m MODULE` commands of a test forks."""
    monkeypatch.setattr(subprocess, "Popen", ForkingPopen)


@pytest.fixture
def tool() -> Callable[..., CompletedProcess[str]]:
    """Run a tool as `python -m tools.NAME ...` does."""

    def call(name: str, *arguments: str) -> CompletedProcess[str]:
        done: CompletedProcess[str] = launch(1, *arguments, module=f"tools.{name}")
        return done

    return call


def _train(folder: Path, processes: int, *overrides: str) -> Path:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "text").mkdir()
    for i in range(6):
        (folder / "text" / f"{i}.txt").write_text(TEXT * (20 + i), encoding="utf-8")
    done = launch(
        processes,
        f"--config={folder / 'config.yaml'}",
        f"--run.dir={folder / 'run'}",
        f"--data.source={folder / 'text'}",
        f"--data.cache_dir={folder / 'cache'}",
        *overrides,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"
