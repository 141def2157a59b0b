"""A plan file runs: the same plan and seed are the same run, and what one unit's entry says is what that unit does."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.launch import EAGER, TINY, read_metrics, run, write_text

STEPS = ["--train.steps=4", "--metrics.tensorboard=false"]
SHAPE = [argument for argument in TINY if "batch_size" not in argument]


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, list[str]]:
    """A run of FSDP x TP from config keys, and the arguments of its data."""
    folder = tmp_path_factory.mktemp("plan")
    data = write_text(folder)
    keys = ["--parallel.tp=2", "--parallel.forward_prefetch=2", "--parallel.activation_checkpoint=full"]
    result = run(4, *TINY, *data, *EAGER, *keys, *STEPS, f"--run.dir={folder / 'first'}")
    assert result.returncode == 0, result.stderr
    return folder / "first", data


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(folder).values()]


def test_the_same_plan_file_and_seed_are_the_same_run(first, tmp_path):
    folder, data = first
    result = run(4, *SHAPE, *data, f"--parallel.plan={folder / 'plan.yaml'}", *STEPS, f"--run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == losses(folder)
    assert (tmp_path / "plan.yaml").read_text() == (folder / "plan.yaml").read_text()


def test_a_unit_of_a_hand_edited_plan_keeps_float32_among_bfloat16_ones(first, tmp_path):
    folder, data = first
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    embedding, blocks, head = plan["units"]
    for unit in (embedding, blocks):
        unit["param_dtype"] = "bfloat16"
    last = {**blocks, "unit": "layers.1", "output_dtype": "float32"}
    plan["units"] = [embedding, {**blocks, "unit": "layers.0"}, last, head]
    # JSON is YAML, and repeats what safe_dump would write as an alias
    (tmp_path / "mixed.yaml").write_text(json.dumps(plan))
    mixed = run(4, *SHAPE, *data, f"--parallel.plan={tmp_path / 'mixed.yaml'}", *STEPS, f"--run.dir={tmp_path / 'mixed'}")
    assert mixed.returncode == 0, mixed.stderr
    exact, rounded = losses(folder), losses(tmp_path / "mixed")
    assert rounded != exact
    # Hidden states are rounded to 8 bits of mantissa, the logits and the loss are not.
    assert [loss for loss, _ in rounded] == pytest.approx([loss for loss, _ in exact], abs=2e-3)

    last["output_dtype"] = "same"
    (tmp_path / "broken.yaml").write_text(json.dumps(plan))
    broken = run(1, *SHAPE, *data, f"--parallel.plan={tmp_path / 'broken.yaml'}", f"--run.dir={tmp_path / 'broken'}")
    assert broken.returncode == 2
    assert "unit layers.1 hands on bfloat16, but unit head computes in float32" in broken.stderr
