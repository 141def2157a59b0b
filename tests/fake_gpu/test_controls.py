"""Eager steps on the fake H100: no memory access races with another stream, and a race would be noticed."""

import shutil
from pathlib import Path

import pytest

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import ROOT, FakeGpu
from meshwright.tools.dryrun.log import steady_step
from tests.fake_gpu.record import run_steps
from tests.fake_gpu.test_steps import check_offload
from tests.soak.faults.source import PRODUCT

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, day=8)]
ARGUMENTS = (
    "--config=llama_debug.yaml",
    "--model.n_layers=3",
    "--parallel.param_dtype=bfloat16",
    "--parallel.compile.enabled=false",
    "--parallel.activation_checkpoint=offload",
)
RACE = "CSAN detected a possible data race"


def test_no_two_streams_race(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    result = run_steps(fake_gpu, tmp_path, ARGUMENTS, TORCH_CUDA_SANITIZER="1")
    assert result.returncode == 0, result.stderr
    assert RACE not in result.stderr
    step = steady_step(log.read_log(tmp_path))
    assert log.host_waits(step) == []
    assert all(check_offload(step))


def test_a_race_is_noticed_and_its_line_named(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    root, waits = tmp_path / "broken", "self._torch_device.current_stream().wait_event(block.copied)"
    for name in (*PRODUCT, "configs", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
    offload = root / "parallel" / "activation_offload.py"
    text = offload.read_text()
    assert text.count(waits) == 1
    offload.write_text(text.replace(waits, "pass"))
    result = run_steps(fake_gpu, tmp_path, ARGUMENTS, root, TORCH_CUDA_SANITIZER="1")
    assert RACE in result.stderr
    assert "parallel/activation_offload.py" in result.stderr
