"""The tools that a new user with a GPU would run, and the tests marked `gpu`, on a fake GPU."""

import re
from pathlib import Path

import pytest

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import FakeGpu
from tests.fake_gpu.calls import unimplemented
from tests.fake_gpu.commands import run

pytestmark = pytest.mark.slow


@pytest.mark.sampled(10, day=4)
def test_the_doctor_looks_at_everything(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    code, output = run(fake_gpu, tmp_path, "tools.doctor", devices=2)
    assert code == 1, output
    assert "gpus_of_torch: 2" in output
    failures = [line for line in output.splitlines() if "FAILS" in line]
    assert len(failures) == 2, output
    assert "Tensor-likes are not close" in failures[0]  # the fake GPU computes nothing
    assert "all-reduce of two processes" in failures[1]
    assert [unimplemented(log.read_calls(path)) for path in tmp_path.glob("log.*")] == [[]] * 3


@pytest.mark.sampled(10, day=2)
def test_the_benchmark_of_a_gpu_runs_its_cases(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    names = ["8 layers", "float8 rowwise", "fsdp, prefetch 2"]
    keys = ["--parallel.compile.backend=aot_eager", "--model.n_layers=2"]
    options = ["--tiny", "--minutes=8", "--json", *keys, "--only", *names]
    code, output = run(fake_gpu, tmp_path, "benchmarks.gpu", *options, devices=2)
    assert code == 0, output
    assert output.count(" done, ") == len(names), output
    assert [name for path in tmp_path.glob("log.*") for name in unimplemented(log.read_calls(path))] == []


@pytest.mark.sampled(10, day=0)
def test_gpu_tests_whose_subject_is_not_a_value_pass(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    """Only a part of them: all of them take minutes (README.md in this folder has the command)."""
    compiled = ("compiled", "full", "selective", "half_matmul", "budget", "no-expandable-segments")
    left_out = ("max-autotune", "documents", *compiled)
    tests = [
        "tests/e2e/test_gpu.py",
        "tests/train/fault_tolerance/test_nonfinite.py",
        "tests/models/test_kernels_on_gpu.py",
    ]
    code, output = run(
        fake_gpu,
        tmp_path,
        "pytest",
        "-m",
        "gpu",
        "-k",
        " and ".join(f"not {name}" for name in left_out),
        "-p",
        "no:cacheprovider",
        *tests,
        MESHWRIGHT_TESTS_HOME=str(tmp_path / "home"),
    )
    assert code == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= 6, output
