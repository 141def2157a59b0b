"""A run with float8 all-gathers saves plain weights, and resumes without float8 on another mesh."""

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.launch import EAGER, TINY, read_metrics, read_status, run, write_text

pytest.importorskip("torchao")

FLOAT8 = [
    "--parallel.float8.recipe=tensorwise",
    "--parallel.float8.min_dim=16",
    "--parallel.float8.all_gather=true",
]


def test_weights_are_saved_plain_and_read_without_float8(tmp_path: Path) -> None:
    common = [*TINY, *EAGER, *write_text(tmp_path), "--checkpoint.every=2", f"--run.dir={tmp_path / 'run'}"]
    first = run(2, *common, *FLOAT8, "--train.steps=2")
    assert first.returncode == 0, first.stderr
    dtypes = {}
    for path in sorted((tmp_path / "run" / "checkpoints" / "step-00000002").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    weights = {
        name: dtype for name, dtype in dtypes.items() if "attention.w" in name or "feed_forward.w" in name
    }
    assert len({name.split("layers.1.")[1] for name in weights if name.startswith("model.layers.1.")}) == 7
    assert set(weights.values()) == {"F32"}
    second = run(1, *common, "--train.steps=4")
    assert second.returncode == 0, second.stderr
    assert read_status(tmp_path / "run")["resumed_from"] == 2
    losses = {step: row["loss"] for step, row in read_metrics(tmp_path / "run").items()}
    assert losses[4] < losses[1]
