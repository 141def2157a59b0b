"""`parallel.plan=auto` in real runs: it plans, trains, and compares with its prediction."""

import statistics
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.parallel.plan.serialize import load_plan
from meshwright.train.metrics.tensorboard import tag_of
from tests.e2e.conftest import SMALL
from tests.support.launch import run
from tests.support.run_faults import curve, rows

FIGURES = ("step_time_s", "peak_memory_gib")


def test_a_run_plans_for_itself_compares_itself_with_the_prediction_and_runs_again_as_a_file(
    data, tmp_path: Path
) -> None:
    folder, again = tmp_path / "auto", tmp_path / "file"
    keys = [*SMALL, *data, "--train.steps=4", "--checkpoint.every=0"]
    result = run(2, *keys, "--parallel.plan=auto", f"--run.dir={folder}")
    assert result.returncode == 0, result.stderr
    plan = load_plan(folder / "plan.yaml")
    assert plan.mesh.world_size == 2
    assert "plans tried" in result.stdout
    assert (
        f"mesh: dp_replicate {plan.mesh.dp_replicate} x dp_shard {plan.mesh.dp_shard} x tp {plan.mesh.tp}"
        in result.stdout
    )
    metrics = rows(folder)
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

    second = run(
        2,
        *keys,
        f"--parallel.plan={folder / 'plan.yaml'}",
        "--metrics.tensorboard=false",
        f"--run.dir={again}",
    )
    assert second.returncode == 0, second.stderr
    assert curve(again) == curve(folder)


def test_what_cannot_be_planned_is_one_message_and_nothing_is_written(data, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run(2, *SMALL, *data, "--parallel.plan=auto", "--parallel.tp=3", f"--run.dir={folder}")
    assert result.returncode != 0
    assert result.stderr.count("PlanError: ") >= 1
    assert "parallel.tp=3" in result.stderr
    assert "Traceback" not in result.stderr.split("PlanError: ")[0]
    assert not (folder / "plan.yaml").exists()
