"""`parallel.plan=auto` in real runs: it plans, trains, and compares with its prediction."""

import shutil
import statistics
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.planner.hardware import HARDWARE_FOLDER
from meshwright.train.calibration.measure import kept_path
from meshwright.train.config_parser import parse_config
from meshwright.train.metrics.tensorboard import tag_of
from tests.e2e.conftest import SMALL
from tests.support.launch import rows_in, run

FIGURES = ("step_time_s", "peak_memory_gib")
AUTO = [*SMALL, "--train.seq_len=16", "--parallel.plan=auto"]
# of the planner's choices only dp_replicate is left open: two plans
FIXED = ["--parallel.tp=1", "--parallel.activation_checkpoint=none", "--parallel.reshard_after_forward=true"]
FIXED += ["--parallel.forward_prefetch=1", "--parallel.backward_prefetch=1", "--train.global_batch_size=4"]


def keep_measurements(keys: list[str], processes: int) -> None:
    """Write the file of measurements of a run with these keys, as if it had measured this machine."""
    path = kept_path(parse_config(keys).job, processes, 1, torch.device("cpu"))
    path.parent.mkdir(parents=True)
    shutil.copy(HARDWARE_FOLDER / "cpu.yaml", path)


@pytest.mark.sampled(3, day=0)
def test_a_run_plans_for_itself_and_compares_itself_with_the_prediction(data, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = [*AUTO, *FIXED, *data, f"--parallel.compile.cache_dir={tmp_path / 'cache'}"]
    keys += ["--train.steps=3", "--checkpoint.every=0", f"--run.dir={folder}"]
    keep_measurements(keys, 2)
    result = run(2, *keys)
    assert result.returncode == 0, result.stderr
    assert "this machine as it measured itself" in result.stdout
    mesh = load_plan(folder / "plan.yaml").mesh
    assert mesh.world_size == 2
    assert "2 plans tried" in result.stdout
    assert f"mesh: dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp 1" in result.stdout
    metrics = rows_in(folder)
    predicted = {name: metrics[-1][f"predicted_{name}"] for name in FIGURES}
    assert all(value > 0 for value in predicted.values())
    board = EventAccumulator(str(folder / "tb")).Reload()
    for name in FIGURES:
        assert board.Scalars(tag_of(f"predicted_{name}"))[-1].value == pytest.approx(
            predicted[name], rel=1e-6
        )
    assert board.Images("predicted_step")
    last = next(
        line for line in result.stdout.splitlines() if line.startswith("predicted against measured: ")
    )
    measured_s = statistics.median(row["step_time_s"] for row in metrics[1:])
    off = predicted["step_time_s"] / measured_s - 1
    assert f"step_time_s {predicted['step_time_s']:.3g} against {measured_s:.3g} ({off:+.1%})" in last


def test_what_cannot_be_planned_is_one_message_without_measuring_and_nothing_is_written(
    data, tmp_path: Path
) -> None:
    folder, cache = tmp_path / "run", tmp_path / "cache"
    keys = ["--parallel.tp=3", f"--parallel.compile.cache_dir={cache}", f"--run.dir={folder}"]
    result = run(2, *AUTO, *data, *keys)
    assert result.returncode != 0
    assert result.stderr.count("PlanError: ") >= 1
    assert "parallel.tp=3" in result.stderr
    assert "Traceback" not in result.stderr.split("PlanError: ")[0]
    assert "measuring" not in result.stdout
    assert not list(cache.glob("hardware-*"))
    assert not folder.exists()
