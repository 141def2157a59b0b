"""metrics.jsonl, without a process group."""

import math
import threading
from pathlib import Path

import pytest

from meshwright.train.evaluation import Score
from tests.support.metrics import log_losses, open_metrics, rows_in, steps_in


def test_a_flushed_row_can_be_read_and_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    for steps in ((0, 5), (5, 10)):
        metrics = open_metrics(tmp_path, tensorboard=False)
        for step in steps:
            metrics.log_eval(step, {"a": Score(8.0 * step, 8, 2.0), "b": Score(0.0, 8, 1.0)})
            metrics.flush()
            row = rows_in(tmp_path)[-1]
            assert row == row | {"step": step, "eval_loss": step / 2, "eval/a/loss": step, "eval/b/loss": 0.0}
            assert row["eval/a/perplexity"] == pytest.approx(math.exp(step))
            assert row["eval/a/bits_per_byte"] == pytest.approx(step * math.log2(math.e) / 2)
        metrics.close()
    assert steps_in(tmp_path) == [0, 5, 5, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"], "without TensorBoard"


def test_without_a_flush_rows_are_written_in_order_and_later_jobs_run_after_them(tmp_path: Path) -> None:
    metrics, seen, all_seen = open_metrics(tmp_path, tensorboard=False), list[int](), threading.Event()
    for step in range(200):
        log_losses(metrics, {step: 1.0})
        metrics.later(lambda: seen.append(len(rows_in(tmp_path))))
    metrics.later(all_seen.set)
    assert all_seen.wait(60)
    assert seen == list(range(1, 201)), "each job ran when exactly the rows before it were there"
    assert steps_in(tmp_path) == list(range(200))
    metrics.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics" and thread.is_alive()]


def test_an_error_that_is_not_the_disks_is_raised_by_the_next_call(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    metrics.later(lambda: [][0])
    with pytest.raises(IndexError):
        metrics.flush()
    metrics.close()


def test_other_ranks_write_nothing_and_run_later_jobs_immediately(tmp_path: Path) -> None:
    metrics, seen = open_metrics(tmp_path, is_main=False), list[int]()
    log_losses(metrics, {1: 2.0})
    metrics.later(lambda: seen.append(1))
    assert seen == [1]
    metrics.close()
    assert list(tmp_path.iterdir()) == []
