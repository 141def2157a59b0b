"""metrics.jsonl and status.json, without a process group."""

import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch

from meshwright.train.config import MetricsConfig, check_bounds
from meshwright.train.evaluation import Score
from meshwright.train.fault_tolerance.run_status import State, write_status
from meshwright.train.metrics.collector import Metrics, Throughput
from meshwright.train.metrics.tensorboard import RunSummary
from tests.support.launch import read_status

THROUGHPUT = Throughput(
    tokens_per_step=100, flops_per_token=1.0, flops_per_token_causal=0.5, world_size=2, peak_flops=None
)


def open_metrics(folder: Path, is_main: bool = True, tensorboard: bool = False) -> Metrics:
    config, shown = MetricsConfig(tensorboard=tensorboard), RunSummary({"config": "text"}, {"image": bytes})
    return Metrics(config, THROUGHPUT, folder, torch.device("cpu"), is_main, {}, shown, print)


def rows_in(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_can_be_read_once_it_is_flushed_and_a_resumed_run_goes_on_in_the_file(tmp_path: Path) -> None:
    for steps in ((0, 5), (5, 10)):
        metrics = open_metrics(tmp_path)
        for step in steps:
            metrics.log_eval(step, {"a": Score(8.0 * step, 8, 2.0), "b": Score(0.0, 8, 1.0)})
            metrics.flush()
            row = rows_in(tmp_path)[-1]
            assert {key: row[key] for key in ("step", "eval_loss", "eval/a/loss", "eval/b/loss")} == {
                "step": step,
                "eval_loss": step / 2,
                "eval/a/loss": step,
                "eval/b/loss": 0.0,
            }
            assert row["eval/a/perplexity"] == pytest.approx(math.exp(step))
            assert row["eval/a/bits_per_byte"] == pytest.approx(step * math.log2(math.e) / 2)
        metrics.close()
    assert [row["step"] for row in rows_in(tmp_path)] == [0, 5, 5, 10]


def test_without_a_flush_rows_are_written_soon_and_in_order_and_what_is_to_come_later_after_them(
    tmp_path: Path,
) -> None:
    metrics, seen = open_metrics(tmp_path), list[int]()
    for step in range(200):
        metrics.log_eval(step, {"a": Score(8.0, 8, 2.0)})
        metrics.later(lambda: seen.append(len(rows_in(tmp_path))))
    deadline_s = time.monotonic() + 30
    while len(seen) < 200 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert seen == list(range(1, 201)), "each was called when exactly the rows before it were there"
    assert [row["step"] for row in rows_in(tmp_path)] == list(range(200))
    metrics.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics" and thread.is_alive()]


def test_an_error_that_is_no_disks_fault_reaches_whoever_writes_next(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    metrics.later(lambda: [][0])
    with pytest.raises(IndexError):
        metrics.flush()
    metrics.close()


def test_on_ranks_that_write_nothing_what_is_to_come_later_comes_at_once(tmp_path: Path) -> None:
    metrics, seen = open_metrics(tmp_path, is_main=False), list[int]()
    metrics.later(lambda: seen.append(1))
    assert seen == [1]
    metrics.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path, is_main=False, tensorboard=True)
    metrics.log_eval(1, {"a": Score(8.0, 4, 1.0)})
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_there_is_only_the_json_file(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    metrics.log_eval(1, {"a": Score(8.0, 4, 1.0)})
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_negative_interval_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"metrics\.every=-1"):
        check_bounds("metrics", MetricsConfig(every=-1))


@pytest.mark.parametrize("state", ["running", "finished", "stopped", "failed"])
def test_status_reads_back_and_leaves_no_partial_file(state: State, tmp_path: Path) -> None:
    write_status(tmp_path, "running", 1, None, False)
    write_status(tmp_path, state, 7, 3, True, 'signal "SIGTERM"\n')
    status = read_status(tmp_path)
    assert status is not None
    advice = status.pop("how_to_go_on")
    assert status == {
        "state": state,
        "step": 7,
        "resumed_from": 3,
        "reason": 'signal "SIGTERM"\n',
        "failed_starts": 0,
        "failed_at_step": 0,
    }
    assert bool(advice) is (state != "running")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
