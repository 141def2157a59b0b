"""Eager steps on the fake H100: no memory access races with another stream, and the checks of this folder
detect faults."""

import re
from pathlib import Path

import pytest

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import FakeGpu
from meshwright.tools.dryrun.log import steady_step
from tests.fake_gpu.controls import NO_WAIT, READ, WRONG_STREAM, broken_copy
from tests.fake_gpu.record import run_steps
from tests.fake_gpu.test_steps import check_offload

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
    result = run_steps(
        fake_gpu, tmp_path, ARGUMENTS, broken_copy(tmp_path / "broken", NO_WAIT), TORCH_CUDA_SANITIZER="1"
    )
    assert RACE in result.stderr
    assert re.search(r"parallel/activation_offload.py", result.stderr)


def test_a_read_and_a_wrong_stream_are_noticed(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    calls = {}
    for fault in (READ, WRONG_STREAM):
        scratch = tmp_path / fault.name
        result = run_steps(fake_gpu, scratch, ARGUMENTS, broken_copy(scratch / "broken", fault))
        assert result.returncode == 0, result.stderr
        calls[fault] = steady_step(log.read_log(scratch))
    assert "stream_sync" in {call.kind for call in log.host_waits(calls[READ])}
    with pytest.raises(AssertionError, match="on the stream on which the step computes"):
        check_offload(calls[WRONG_STREAM])
