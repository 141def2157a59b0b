"""The metrics of a run without its training, and TensorBoard's reader of their event files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.train.hooks import Hook, Hooks, Score
from meshwright.train.metrics import writer
from meshwright.train.metrics.collector import Metrics, StepClock, scores_row
from meshwright.train.metrics.run_summary import RunSummary
from meshwright.train.metrics.writer import RowWriter
from tests.support.launch import rows_in

writer.HANGS_S = 240.0  # no disk hangs here, but the machine may be busy


def make_metrics(*hooks: Hook, about: dict[str, Any] | None = None) -> Metrics:
    """What makes the row of every step on a CPU, without predictions, and reports it to `hooks`. `about`: the
    columns of the data."""
    run, listening, cpu = Mock(), Hooks(), torch.device("cpu")
    run.planned.device, run.planned.predicted = cpu, {}
    run.data.describe_step.return_value = about or {}
    listening.extend(hooks, pytest.fail)
    return Metrics(run, listening, StepClock(cpu), lambda step_time_s: {"tokens_per_s": 100 / step_time_s})


def open_rows(
    folder: Path,
    warn: Callable[[str], None] = pytest.fail,
    shown: RunSummary | None = None,
    tensorboard: bool = True,
) -> RowWriter:
    """The rows of a run in this folder."""
    return RowWriter(folder, tensorboard, shown or RunSummary(), warn)


def log_losses(rows: RowWriter, losses: dict[int, float]) -> None:
    """Log an evaluation with this loss at each step."""
    for step, loss in losses.items():
        rows.on_report({"step": step, **scores_row({"held_out": Score(loss, 1, 1.0)})})


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in rows_in(folder)]


def read_board(folder: Path) -> EventAccumulator:
    """What TensorBoard reads of a folder of event files."""
    sizes = dict.fromkeys(("scalars", "tensors", "images"), 0)
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def board_steps(folder: Path, tag: str = "loss/eval") -> list[int]:
    return [event.step for event in read_board(folder).Scalars(tag)]
