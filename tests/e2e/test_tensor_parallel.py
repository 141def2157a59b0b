"""A run with tensor and context parallelism: its plan file can be run again, and its checkpoints resume bit
for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.tools.checkpoint.convert import export_file
from tests.e2e.conftest import SMALL
from tests.support.launch import read_metrics, read_status, run

BATCH = ["--train.micro_batch_size=2", "--train.global_batch_size=4"]
STEPS = [
    "--train.steps=4",
    "--train.eval_every=2",
    "--train.eval_sequences=8",
    "--checkpoint.every=2",
    "--metrics.tensorboard=false",
    "--data.document_mask=true",
]
TP = ["--parallel.tp=2", "--parallel.activation_checkpoint=selective", "--parallel.forward_prefetch=2"]
CP = ["--parallel.cp=2", "--parallel.cp_exchange=gather"]
CURVE = ("loss", "eval_loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """An uninterrupted run of four steps on tp 2 x cp 2."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run(4, *SMALL, *BATCH, *data, *TP, *CP, *STEPS, f"--run.dir={folder}")
    assert result.returncode == 0, result.stderr
    return folder


def curve(folder: Path) -> dict[int, list[float]]:
    """Metrics of steps 3 and 4."""
    return {
        step: [row[key] for key in CURVE if key in row]
        for step, row in read_metrics(folder).items()
        if step > 2
    }


def weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Consolidated weights of the newest checkpoint of a run."""
    newest = max((folder / "checkpoints").iterdir())
    return load_file(export_file(newest, out, force=False, dtype="float32"))


@pytest.mark.sampled(3, day=2)
def test_resumed_by_its_plan_file_the_curve_and_the_weights_are_the_uninterrupted_ones_bit_for_bit(
    whole, data, tmp_path
):
    # the batch and all other planned values come from the file
    keys = [key for key in SMALL if "batch_size" not in key]
    keys += [f"--checkpoint.resume={whole / 'checkpoints' / 'step-00000002'}", *data, *STEPS]
    result = run(4, *keys, f"--parallel.plan={whole / 'plan.yaml'}", f"--run.dir={tmp_path / 'again'}")
    assert result.returncode == 0, result.stderr
    assert read_status(tmp_path / "again")["resumed_from"] == 2
    assert (tmp_path / "again" / "plan.yaml").read_text() == (whole / "plan.yaml").read_text()
    assert len(curve(whole)) == 2
    assert curve(tmp_path / "again") == curve(whole)
    resumed, expected = weights(tmp_path / "again", tmp_path / "a"), weights(whole, tmp_path / "b")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
