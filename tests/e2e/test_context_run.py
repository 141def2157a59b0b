"""Context parallelism of models that are not ours, in runs. Those of our Llama: test_tensor_parallel.py."""

from pathlib import Path

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.distributed.parity import LOSS, NORM
from tests.support.factories import RUN, causal_lm
from tests.support.launch import EAGER, read_metrics, run

OWN = ["--model.factory=tests.support.factories:Positioned"]
SHORT = ["--train.steps=2", "--metrics.tensorboard=false", "--train.eval_every=0"]
COMPILED = ["--parallel.compile.backend=aot_eager"]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([*OWN, *EAGER], id="own", marks=[pytest.mark.slow, pytest.mark.sampled(6)]),
        pytest.param(
            [*causal_lm("qwen3"), *COMPILED],
            id="transformers",
            marks=[pytest.mark.slow, pytest.mark.sampled(10)],
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
        (causal_lm("mistral", sliding_window=16), "do not attend to all earlier tokens"),
    ],
)
def test_models_whose_attention_cannot_be_divided_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_run(parse_config([*RUN, *keys, "--parallel.cp=2"]).job, 2)
