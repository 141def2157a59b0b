"""Context parallelism in runs: resumed on other degrees, 2 -> 1 -> 4, a run goes on as if it had not been
divided."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.distributed.parity import LOSS, NORM
from tests.e2e.conftest import SMALL
from tests.support.factories import RUN, causal_lm
from tests.support.launch import EAGER, read_metrics, read_status, run

STEPS = [
    "--train.steps=6",
    "--train.micro_batch_size=2",
    "--train.global_batch_size=4",
    "--train.eval_every=3",
    "--train.eval_sequences=8",
    "--checkpoint.every=2",
    "--checkpoint.keep=5",
    "--metrics.tensorboard=false",
    "--data.document_mask=true",
]
TWO = ["--parallel.cp=2"]
FOUR = ["--parallel.cp=4", "--parallel.cp_exchange=gather"]


def train(
    processes: int, folder: Path, arguments: list[str], resume: Path | None = None
) -> dict[int, dict[str, Any]]:
    """Train, or resume a checkpoint, and return the metrics by step."""
    resumed = [f"--checkpoint.resume={resume}"] if resume else []
    result = run(processes, *SMALL, *STEPS, *arguments, *resumed, f"--run.dir={folder}")
    assert result.returncode == 0, result.stderr
    assert bool(read_status(folder)["resumed_from"]) is bool(resume)
    return read_metrics(folder)


@pytest.mark.slow
@pytest.mark.sampled(5)
def test_resumed_on_other_degrees_the_curve_goes_on(data: list[str], tmp_path: Path) -> None:
    def saved(run: str, step: int) -> Path:
        return tmp_path / run / "checkpoints" / f"step-{step:08d}"

    whole = train(2, tmp_path / "two", [*data, *TWO])
    one = train(1, tmp_path / "one", data, saved("two", 2))
    four = train(4, tmp_path / "four", [*data, *FOUR], saved("one", 4))
    assert (min(one), min(four)) == (3, 5)
    for step, row in (*one.items(), *four.items()):
        for key in ("loss", "eval_loss"):
            assert row.get(key, 0.0) == pytest.approx(whole[step].get(key, 0.0), abs=LOSS, rel=0)
        assert row["grad_norm"] == pytest.approx(whole[step]["grad_norm"], rel=NORM)
        assert row["data_hash"] == whole[step]["data_hash"]


OWN = ["--model.factory=tests.support.factories:Positioned"]
SHORT = ["--train.steps=2", "--metrics.tensorboard=false", "--train.eval_every=0"]
COMPILED = ["--parallel.compile.backend=aot_eager"]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([*OWN, *EAGER], id="own"),
        pytest.param(
            [*causal_lm("qwen3"), *COMPILED],
            id="transformers",
            marks=[pytest.mark.slow, pytest.mark.sampled(5)],
        ),
    ],
)
def test_models_of_others_train_the_same(keys: list[str], data: list[str], tmp_path: Path) -> None:
    """One whose class names its cores, and one whose attention is in transformers' registry."""
    curves = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        degree = f"--parallel.cp={processes}"
        of_run = EAGER if processes == 1 else keys  # what is compiled is compared with what is not
        result = run(processes, *RUN, *data, *keys, *of_run, degree, *SHORT, f"--run.dir={folder}")
        assert result.returncode == 0, result.stderr
        curves.append([(row["loss"], row["grad_norm"]) for row in read_metrics(folder).values()])
    assert len(curves[0]) == 2
    for (loss, norm), (expected, expected_norm) in zip(*curves, strict=True):
        assert loss == pytest.approx(expected, abs=LOSS, rel=0)
        assert norm == pytest.approx(expected_norm, rel=NORM)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--model.factory=tests.support.factories:mixer", "--model.blocks=[12]"], "where its attention is"),
        ([*OWN, "--parallel.cp_exchange=gather"], "is for models with kernels of ours"),
    ],
)
def test_models_whose_attention_cannot_be_divided_are_refused(
    keys: list[str], message: str, data: list[str], tmp_path: Path
) -> None:
    result = run(1, *RUN, *data, *keys, "--parallel.cp=2", f"--run.dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert message in result.stderr


def test_windows_that_do_not_reach_all_earlier_tokens_are_refused() -> None:
    config = parse_config([*RUN, *causal_lm("mistral", sliding_window=16), "--parallel.cp=2"])
    with pytest.raises(PlanError, match="do not attend to all earlier tokens"):
        plan_run(config.job, 2)
