"""A run with tensor and context parallelism: its plan file can be run again, and its checkpoints resume on
the same mesh bit for bit, and on one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.models.llama import Llama
from meshwright.tools.checkpoint.convert import export_plain_names
from meshwright.train.config_parser import load_config
from tests.distributed.parity import LOSS, NORM
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


def resume_run(processes: int, whole: Path, folder: Path, *arguments: str) -> None:
    resume = f"--checkpoint.resume={whole / 'checkpoints' / 'step-00000002'}"
    result = run(processes, *arguments, *STEPS, resume, f"--run.dir={folder}")
    assert result.returncode == 0, result.stderr
    assert read_status(folder)["resumed_from"] == 2


def weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Consolidated weights of the newest checkpoint of a run."""
    newest = max((folder / "checkpoints").iterdir())
    return load_file(export_plain_names(newest, out, force=False, dtype="float32"))


@pytest.mark.sampled(3, day=2)
def test_resumed_by_its_plan_file_the_curve_and_the_weights_are_the_uninterrupted_ones_bit_for_bit(
    whole, data, tmp_path
):
    # the batch and all other planned values come from the file
    keys = [key for key in SMALL if "batch_size" not in key]
    resume_run(4, whole, tmp_path / "again", *keys, *data, f"--parallel.plan={whole / 'plan.yaml'}")
    assert (tmp_path / "again" / "plan.yaml").read_text() == (whole / "plan.yaml").read_text()
    assert len(curve(whole)) == 2
    assert curve(tmp_path / "again") == curve(whole)
    resumed, expected = weights(tmp_path / "again", tmp_path / "a"), weights(whole, tmp_path / "b")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_resumed_by_one_process_the_curve_goes_on(whole, data, tmp_path):
    resume_run(1, whole, tmp_path, *SMALL, *BATCH, *data)
    got, expected = curve(tmp_path), curve(whole)
    assert got.keys() == expected.keys()
    for step, (loss, *others) in got.items():
        assert loss == pytest.approx(expected[step][0], abs=LOSS, rel=0)
        assert others == pytest.approx(expected[step][1:], rel=NORM)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_split_runs_exported_weights_are_whole_and_what_they_were_made_as(data, tmp_path):
    zero_lr = [
        *SMALL,
        *BATCH,
        *data,
        *TP,
        "--train.steps=1",
        "--checkpoint.every=1",
        "--optim.lr=0",
        "--metrics.tensorboard=false",
    ]
    result = run(2, *zero_lr, f"--run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    config = load_config(tmp_path / "run" / "config.yaml")
    model = Llama(config.model)
    model.initialise(config.run.seed)
    got = weights(tmp_path / "run", tmp_path / "out")
    assert got.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(got[name], p) for name, p in model.named_parameters())
