"""A plan file edited by hand: each unit follows its entry."""

import json

import pytest
import yaml

from tests.e2e.conftest import SMALL
from tests.support.launch import run
from tests.support.run_faults import curve

STEPS = ["--train.steps=2", "--metrics.tensorboard=false", "--checkpoint.every=0"]
KEYS = [*(key for key in SMALL if "batch_size" not in key), *STEPS]


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_unit_of_a_hand_edited_plan_keeps_float32_among_bfloat16_ones(two_ranks, data, tmp_path):
    whole = two_ranks[0]
    plan = yaml.safe_load((whole / "plan.yaml").read_text())
    embedding, blocks, head = plan["units"]
    for unit in (embedding, blocks):
        unit["param_dtype"] = "bfloat16"
    last = {**blocks, "unit": "layers.1", "output_dtype": "float32"}
    first = {**blocks, "unit": "layers.0", "param_dtype": "float32"}
    plan["units"] = [embedding, first, last, head]
    # JSON is YAML; safe_dump would write repeated values as aliases
    (tmp_path / "mixed.yaml").write_text(json.dumps(plan))
    mixed = run(
        2, *KEYS, *data, f"--parallel.plan={tmp_path / 'mixed.yaml'}", f"--run.dir={tmp_path / 'mixed'}"
    )
    assert mixed.returncode == 0, mixed.stderr
    rounded = curve(tmp_path / "mixed")
    exact = {step: row for step, row in curve(whole).items() if step in rounded}
    assert len(rounded) == 2
    assert rounded != exact
    # Hidden states are rounded to 8 bits of mantissa, the logits and the loss are not.
    assert [loss for loss, _ in rounded.values()] == pytest.approx(
        [loss for loss, _ in exact.values()], abs=2e-3
    )
