"""The metrics of a run without its training, and TensorBoard's reader of their event files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.train.config import MetricsConfig
from meshwright.train.evaluation import Score
from meshwright.train.metrics import writer
from meshwright.train.metrics.collector import Metrics, Throughput
from meshwright.train.metrics.tensorboard import RunSummary

writer.HANGS_S = 240.0  # no disk hangs here, but the machine may be busy
THROUGHPUT = Throughput(100, flops_per_token=1.0, flops_per_token_causal=0.5, world_size=1, peak_flops=None)


def open_metrics(
    folder: Path,
    warn: Callable[[str], object] = pytest.fail,
    is_main: bool = True,
    shown: RunSummary | None = None,
    **config: Any,
) -> Metrics:
    """The metrics of a run in this folder, as rank 0 or another rank opens them. `config`: keys of
    metrics."""
    cpu = torch.device("cpu")
    return Metrics(MetricsConfig(**config), THROUGHPUT, folder, cpu, is_main, {}, shown or RunSummary(), warn)


def log_losses(metrics: Metrics, losses: dict[int, float]) -> None:
    """Log an evaluation with this loss at each step."""
    for step, loss in losses.items():
        metrics.log_eval(step, {"held_out": Score(loss, 1, 1.0)})


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in rows_in(folder)]


def read_board(folder: Path) -> EventAccumulator:
    """What TensorBoard reads of a folder of event files."""
    sizes = dict.fromkeys(("scalars", "tensors", "images"), 0)
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def board_steps(folder: Path, tag: str = "loss/eval") -> list[int]:
    return [event.step for event in read_board(folder).Scalars(tag)]
