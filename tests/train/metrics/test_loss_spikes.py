"""Loss spikes: which losses count as spikes, and how a run reports them."""

import math
import random
from pathlib import Path

import pytest
import torch

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.sequences import StepData
from meshwright.train.metrics.collector import MIN_REPORTS, THRESHOLD, SpikeDetector
from meshwright.train.step import StepResult
from tests.support.launch import rows_in
from tests.support.metrics import board_steps, make_metrics, open_rows, read_board
from tests.support.steps import step_done


def noise(count: int, mean: float, deviation: float, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, deviation) for _ in range(count)]


def spikes_in(losses: list[float]) -> list[int]:
    detector = SpikeDetector()
    return [i for i, loss in enumerate(losses) if detector.add(loss)]


def test_noise_a_falling_loss_and_values_that_are_not_finite_are_no_spikes_and_a_new_level_is_one() -> None:
    assert spikes_in(noise(3000, 2.5, 0.05)) == []
    assert spikes_in([11 * 0.99**i + 2 for i in range(500)]) == []
    losses = noise(40, 2.5, 0.05)
    assert spikes_in([*losses, math.nan, math.inf, *losses, 5.0]) == [82]
    spikes = spikes_in([*noise(100, 2.5, 0.02), *noise(200, 4.0, 0.02, seed=1)])
    assert spikes[0] == 100
    assert spikes[-1] < 160, "the new level becomes usual"


@pytest.mark.parametrize("above", [8.0, 20.0])
def test_a_loss_far_above_is_measured_in_deviations_though_spikes_stand_before_it(above: float) -> None:
    before = noise(100, 2.5, 0.05)
    before[10] = before[50] = 9.0
    spike = SpikeDetector(before).add(2.5 + above * 0.05)
    assert spike["loss_spike"] == pytest.approx(above, rel=0.25)
    assert spike["usual_loss"] == pytest.approx(2.5, abs=0.02)
    assert not SpikeDetector(before).add(2.5 + 5 * 0.05), "a little above"
    assert not SpikeDetector(before).add(1.0), "far below"


def test_few_reports_are_not_judged_and_constant_losses_may_vary_in_their_last_digits() -> None:
    assert not SpikeDetector([1.0] * (MIN_REPORTS - 1)).add(100.0)
    assert SpikeDetector([1.0] * MIN_REPORTS).add(100.0)
    assert not SpikeDetector([2.0] * 50).add(2.0 + 0.9 * THRESHOLD * 2e-3)
    assert SpikeDetector([2.0] * 50).add(2.0 + 1.1 * THRESHOLD * 2e-3)
    assert not SpikeDetector([0.0] * 50).add(0.0)


def test_a_spike_is_a_column_of_its_row_and_a_text_in_tensorboard(group: None, tmp_path: Path) -> None:
    zero, rows = torch.zeros(()), open_rows(tmp_path)
    metrics = make_metrics(rows, about={"epoch": 0.75, "data_hash": "ab12"})
    metrics.start(TrainPosition())
    for step, loss in enumerate([*noise(30, 2.5, 0.05), 4.0, math.nan, 2.5], 1):
        result = StepResult(torch.tensor(loss), torch.tensor(1.25), zero, zero)
        metrics.after_step(step_done(step, result, StepData([], 0, 0.0)))
    rows.close()
    written = rows_in(tmp_path)
    assert [row["step"] for row in written if "loss_spike" in row] == [31]
    assert written[30]["loss_spike"] == pytest.approx(30, rel=0.3)
    (text,) = read_board(tmp_path / "tb").Tensors("loss_spikes")
    description = text.tensor_proto.string_val[0].decode()
    assert text.step == 31
    facts = (
        "step 31: loss 4.0000",
        "usual loss 2.4",
        "grad_norm 1.25",
        "lr 0.0003",
        "epoch 0.75",
        "data_hash ab12",
    )
    assert [fact for fact in facts if fact not in description] == []
    assert board_steps(tmp_path / "tb", "loss/spike") == [31]
    assert len(board_steps(tmp_path / "tb", "loss/train")) == 33
