"""Data and runs that several test files share, made once per session."""

from pathlib import Path

import pytest

from tests.support.launch import EAGER, TINY, run, write_text

SMALL = [*TINY, *EAGER, "--optim.schedule=constant"]  # a constant rate: a run may be lengthened


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for a learnable text."""
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def two_ranks(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a run of six steps on two ranks, and its stdout and stderr. Copy the folder instead of
    changing it.

    Thirteen held-out sequences do not divide evenly over the ranks.
    """
    folder = tmp_path_factory.mktemp("runs") / "two"
    keys = [
        "--train.steps=6",
        "--train.eval_every=3",
        "--train.eval_sequences=13",
        "--checkpoint.every=2",
        "--checkpoint.keep=2",
    ]
    result = run(2, *SMALL, *data, *keys, f"--run.dir={folder}")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout, result.stderr
