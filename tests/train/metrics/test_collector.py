"""metrics.jsonl, without a process group."""

import math
import threading
import time
from pathlib import Path

import pytest
import torch

from meshwright.parallel.errors import PlanError
from meshwright.train.config_parser import parse_config
from meshwright.train.hooks import Score
from meshwright.train.metrics import collector
from meshwright.train.metrics.collector import StepClock, make_rates, scores_row
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import rows_in
from tests.support.metrics import log_losses, open_rows, steps_in


def test_a_flushed_row_can_be_read_and_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    for steps in ((0, 5), (5, 10)):
        rows = open_rows(tmp_path, tensorboard=False)
        for step in steps:
            scores = {"a": Score(8.0 * step, 8, 2.0), "b": Score(0.0, 8, 1.0)}
            rows.on_report({"step": step, **scores_row(scores)})
            rows.flush()
            row = rows_in(tmp_path)[-1]
            assert row == row | {"step": step, "eval_loss": step / 2, "eval/a/loss": step, "eval/b/loss": 0.0}
            assert row["eval/a/perplexity"] == pytest.approx(math.exp(step))
            assert row["eval/a/bits_per_byte"] == pytest.approx(step * math.log2(math.e) / 2)
        rows.close()
    assert steps_in(tmp_path) == [0, 5, 5, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"], "without TensorBoard"


def test_a_model_whose_operations_cannot_be_counted_has_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    job, lines = parse_config(["--config=llama_debug"]).job, list[str]()
    case = job, plan_run(job, 1), "NVIDIA H100 80GB HBM3", lines.append
    assert make_rates(*case)(1.0)["mfu"] > 0

    def fail(_: object) -> None:
        raise PlanError("an unknown operator")

    monkeypatch.setattr(collector, "training_flops", fail)
    assert make_rates(*case)(1.0).keys() == {"tokens_per_s", "tokens_per_s_per_gpu"}
    assert [line.startswith("no MFU: ") for line in lines] == [True]


def test_without_a_flush_rows_are_written_in_order_and_later_jobs_run_after_them(tmp_path: Path) -> None:
    rows, seen, all_seen = open_rows(tmp_path, tensorboard=False), list[int](), threading.Event()
    for step in range(200):
        log_losses(rows, {step: 1.0})
        rows.later(lambda: seen.append(len(rows_in(tmp_path))))
    rows.later(all_seen.set)
    assert all_seen.wait(60)
    assert seen == list(range(1, 201)), "each job ran when exactly the rows before it were there"
    assert steps_in(tmp_path) == list(range(200))
    rows.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics" and thread.is_alive()]


def test_an_error_that_is_not_the_disks_is_raised_by_the_next_call(tmp_path: Path) -> None:
    rows = open_rows(tmp_path)
    rows.later(lambda: [][0])
    with pytest.raises(IndexError):
        rows.flush()
    rows.close()


def test_time_within_pauses_counts_once_and_is_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save may be part of an evaluation, as after the last step."""
    now = iter([10.0, 15.0, 100.0, 103.0, 200.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    clock.start()
    with clock.paused(), clock.paused():
        pass
    with clock.paused():
        assert clock.take_s() == 5.0 + 3.0
        assert clock.take_s() == 0.0
