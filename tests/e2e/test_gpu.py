"""The same command on a GPU. Initial weights are drawn on the device, so curves are compared on the GPU alone."""

import pytest
import torch

from tests.launch import EAGER, TINY, read_metrics, run, write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MODES = {"eager": EAGER, "compiled": [], "bfloat16": ["--parallel.param_dtype=bfloat16"]}


def test_one_gpu_trains_alike_eager_compiled_and_in_bfloat16(tmp_path):
    data = write_text(tmp_path)
    curves = {}
    for name, mode in MODES.items():
        steps = ["--train.steps=10", "--train.eval_every=5", "--checkpoint.every=5", "--run.device=cuda"]
        result = run(1, *TINY, *data, *mode, *steps, f"--run.dir={tmp_path / name}")
        assert result.returncode == 0, result.stderr
        rows = read_metrics(tmp_path / name)
        assert [rows[step]["recompiles"] for step in range(1, 11)] == [0] * 10
        assert 0 < rows[10]["peak_memory_gib"] <= rows[10]["reserved_memory_gib"]
        curves[name] = [rows[step]["loss"] for step in range(1, 11)]
    assert curves["compiled"] == pytest.approx(curves["eager"], abs=5e-5)
    assert curves["bfloat16"] == pytest.approx(curves["eager"], abs=5e-2)  # 8 bits of mantissa, ten steps
