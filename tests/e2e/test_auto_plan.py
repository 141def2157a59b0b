"""`parallel.plan=auto` in real runs: it plans, trains, and says what it had predicted."""

import json
import statistics
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel.plan_file import load_plan
from tests.support.launch import EAGER, TINY, run, write_text
from train.board_tags import tag_of

FIGURES = ("step_time_s", "peak_memory_gib")


def test_a_run_plans_for_itself_and_compares_itself_with_the_prediction(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = ["--parallel.plan=auto", "--train.steps=6", "--metrics.every=2", "--checkpoint.every=0", f"--run.dir={folder}"]
    result = run(2, *TINY, *EAGER, *write_text(tmp_path), *keys)
    assert result.returncode == 0, result.stderr
    plan = load_plan(folder / "plan.yaml")
    assert plan.mesh.world_size == 2
    assert "planner: of " in result.stdout
    assert f"mesh: dp_replicate {plan.mesh.dp_replicate} x dp_shard {plan.mesh.dp_shard} x tp {plan.mesh.tp}" in result.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    predicted = {name: rows[-1][f"predicted_{name}"] for name in FIGURES}
    assert all(value > 0 for value in predicted.values())
    board = EventAccumulator(str(folder / "tb")).Reload()
    for name in FIGURES:
        assert board.Scalars(tag_of(f"predicted_{name}"))[-1].value == pytest.approx(predicted[name], rel=1e-6)
    assert board.Images("predicted_step")
    last = next(line for line in result.stdout.splitlines() if line.startswith("predicted against measured: "))
    measured_s = statistics.median(row["step_time_s"] for row in rows[1:])
    off = predicted["step_time_s"] / measured_s - 1
    assert f"step_time_s {predicted['step_time_s']:.3g} against {measured_s:.3g} ({off:+.1%})" in last


def test_the_plan_that_was_chosen_runs_again_as_a_file(tmp_path: Path) -> None:
    data, folders = write_text(tmp_path), (tmp_path / "auto", tmp_path / "file")
    keys = [*TINY, *EAGER, *data, "--train.steps=2", "--checkpoint.every=0", "--metrics.every=1"]
    first = run(2, *keys, "--parallel.plan=auto", f"--run.dir={folders[0]}")
    assert first.returncode == 0, first.stderr
    second = run(2, *keys, f"--parallel.plan={folders[0] / 'plan.yaml'}", f"--run.dir={folders[1]}")
    assert second.returncode == 0, second.stderr
    losses = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    assert losses[0] == losses[1]


def test_what_cannot_be_planned_is_one_message_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run(2, *TINY, *EAGER, *write_text(tmp_path), "--parallel.plan=auto", "--parallel.tp=3", f"--run.dir={folder}")
    assert result.returncode != 0
    assert result.stderr.count("PlanError: ") >= 1
    assert "parallel.tp=3" in result.stderr
    assert "Traceback" not in result.stderr.split("PlanError: ")[0]
    assert not (folder / "plan.yaml").exists()
