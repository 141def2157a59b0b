"""Checkpoints of a run that is sharded and split by tensor parallelism: they go on, there and on another mesh."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.llama import Llama, init_weights
from tests.distributed.parity import LOSS, NORM
from tests.support.launch import EAGER, TINY, read_metrics, read_status, run, write_text
from train.config import load_config

STEPS = ["--train.steps=8", "--train.eval_every=4", "--checkpoint.every=4", "--metrics.tensorboard=false", *EAGER]
TP = ["--parallel.tp=2", "--parallel.activation_checkpoint=selective"]
CURVE = ("loss", "eval_loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run of 8 steps on dp_shard 2 x tp 2 that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run(4, *TINY, *data, *TP, *STEPS, f"--run.dir={folder}", timeout_s=300)
    assert result.returncode == 0, result.stderr
    return folder


def curve(folder: Path) -> dict[int, list[float]]:
    """Steps 5 to 8."""
    return {step: [row[key] for key in CURVE if key in row] for step, row in read_metrics(folder).items() if step > 4}


def go_on(processes: int, whole: Path, folder: Path, *arguments: str) -> None:
    resume = f"--checkpoint.resume={whole / 'checkpoints' / 'step-00000004'}"
    result = run(processes, *TINY, *arguments, *STEPS, resume, f"--run.dir={folder}", timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert read_status(folder)["resumed_from"] == 4


def consolidate(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    result = run(1, "consolidate", str(folder), str(out), module="tools.checkpoint")
    assert result.returncode == 0, result.stderr
    return load_file(out / "model.safetensors")


def test_resumed_on_the_same_mesh_the_curve_and_the_weights_are_the_uninterrupted_ones_bit_for_bit(whole, data, tmp_path):
    go_on(4, whole, tmp_path / "again", *data, *TP)
    assert len(curve(whole)) == 4
    assert curve(tmp_path / "again") == curve(whole)
    ours, theirs = consolidate(tmp_path / "again", tmp_path / "a"), consolidate(whole, tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resumed_by_one_process_the_curve_goes_on(whole, data, tmp_path):
    go_on(1, whole, tmp_path, *data)
    got, expected = curve(tmp_path), curve(whole)
    assert got.keys() == expected.keys()
    for step, (loss, *others) in got.items():
        assert loss == pytest.approx(expected[step][0], abs=LOSS, rel=0)
        assert others == pytest.approx(expected[step][1:], rel=NORM)


def test_a_split_runs_consolidated_weights_are_whole_and_what_they_were_made_as(data, tmp_path):
    still = [*TINY, *data, *TP, *EAGER, "--train.steps=1", "--checkpoint.every=1", "--optim.lr=0"]
    result = run(2, *still, f"--run.dir={tmp_path / 'run'}", timeout_s=300)
    assert result.returncode == 0, result.stderr
    config = load_config(tmp_path / "run" / "config.yaml")
    model = Llama(config.model)
    init_weights(model, config.run.seed)
    got = consolidate(tmp_path / "run", tmp_path / "out")
    assert got.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(got[name], p) for name, p in model.named_parameters())
