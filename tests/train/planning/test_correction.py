"""A machine's own runs correct the planner."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools import calibrate
from meshwright.tools.plan import show
from meshwright.tools.plan.__main__ import read_options
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.metrics.collector import Metrics
from meshwright.train.planning.correction import Correction, find_correction

CPU, KIND = torch.device("cpu"), load_hardware()["cpu"]


def job_with(cache: Path, *keys: str) -> TrainingJob:
    return parse_config(["--config=llama_debug", f"--parallel.compile.cache_dir={cache}", *keys]).job


def found(cache: Path, *keys: str) -> Correction:
    return find_correction(job_with(cache, *keys), KIND, CPU)


def test_runs_of_a_dtype_compiled_or_not_are_kept_apart_and_their_median_corrects(tmp_path: Path) -> None:
    assert found(tmp_path).factor == 1.0
    for share in (0.5, 0.8, 2.0):
        found(tmp_path).with_run(share)
    kept = found(tmp_path)
    assert (kept.factor, kept.shares) == (0.8, (0.5, 0.8, 2.0))
    # of predictions 100% and 25% too fast and half as fast; with the factor 60% too fast, right, 60% too slow
    assert "last 3 runs: error 58.3% without, 40.0% with it" in kept.describe()
    for other in ("--parallel.compile.enabled=false", "--parallel.param_dtype=float32"):
        assert found(tmp_path, other).shares == ()


@pytest.mark.parametrize(("every", "shares"), [(4, ()), (5, (0.25,))])
def test_a_run_of_ten_steps_is_kept_by_rank_0(tmp_path: Path, every: int, shares: tuple[float, ...]) -> None:
    """Predicted 2 s with a factor of 0.5, hence 1 s without; measured 4 s."""
    earlier = dataclasses.replace(found(tmp_path), shares=(0.5,))
    for is_main in (False, True):
        metrics = Metrics.__new__(Metrics)
        planned = SimpleNamespace(prediction=SimpleNamespace(correction=earlier))
        config = SimpleNamespace(metrics=SimpleNamespace(every=every))
        metrics._run = SimpleNamespace(planned=planned, config=config, ranks=SimpleNamespace(is_main=is_main))
        metrics._predicted = {"step_time_s": 2.0}
        metrics._reported = [{"step_time_s": seconds} for seconds in (9.0, 4.0, 4.0)]
        lines = metrics.compare_with_predicted()
        assert lines[0].endswith("step_time_s 2 against 4 (-50.0%)")
        assert len(lines) == 1 + (is_main and bool(shares))
        assert found(tmp_path).shares[1:] == (shares if is_main else ())


def test_a_plan_for_this_machine_is_corrected_unless_asked_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "measure_this_machine", lambda *_: (KIND, ""))
    found(tmp_path).with_run(0.5)
    keys = ["--config=llama_debug", f"--parallel.compile.cache_dir={tmp_path}", "--gpus=1"]
    for flags, factor in (([], 0.5), (["--uncorrected"], 1.0)):
        options, job = read_options([*keys, f"--gpu={calibrate.HERE}", *flags])
        assert show._find_hardware(options, job, 1).correction == factor
        assert ("0.5 times the predicted speed" in capsys.readouterr().err) == (not flags)
    with pytest.raises(ConfigError, match=r"--uncorrected needs --gpu here"):
        read_options([*keys, "--gpu=h200", "--uncorrected"])
