"""The decision whether a run may restart automatically, and status.json, which the decision is based on."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.train.distributed.ranks import RankInfo, with_maximum_restarts
from meshwright.train.errors import CrashLoopError
from meshwright.train.fault_tolerance.crash_loop import check_crash_loop
from meshwright.train.fault_tolerance.run_status import FailedStarts, State, Status, read_status, write_status
from tests.support.worlds import run_ranks

NONE = FailedStarts()


def left(
    state: State, start: int | None, reached: int, failed: FailedStarts = NONE, reason: str = "boom"
) -> Status:
    return Status(state, reached, start, reason, failed)


def again(restarts: int, by_torchrun: int = 0) -> RankInfo:
    return RankInfo(0, 1, 0, 1, True, restarts, by_torchrun)


@pytest.mark.parametrize(
    ("previous", "restarts", "start", "counted"),
    [
        (None, 1, 0, NONE),
        (left("finished", 40, 50), 1, 50, NONE),
        (left("stopped", 40, 41), 1, 40, NONE),  # requested
        (left("failed", None, 7), 1, 0, FailedStarts(1, 7)),
        (left("running", 40, 41), 1, 40, FailedStarts(1, 41)),  # killed
        (left("failed", 40, 41, FailedStarts(1, 41)), 2, 40, FailedStarts(2, 41)),
        (left("failed", 40, 41, FailedStarts(2, 41)), 0, 40, NONE),  # by hand
        (left("failed", 40, 51, FailedStarts(2, 41)), 3, 50, NONE),  # a commit since
        (left("failed", 40, 41, FailedStarts(2, 41)), 3, 30, NONE),  # the checkpoint of 40 is skipped
        (left("failed", 40, 45, FailedStarts(2, 41)), 3, 40, FailedStarts(1, 45)),  # further than before
        (left("failed", 40, 43, FailedStarts(1, 45)), 2, 40, FailedStarts(2, 45)),  # not as far
    ],
)
def test_what_counts_as_failing_at_the_same_step(
    previous: Status | None, restarts: int, start: int, counted: FailedStarts
):
    assert check_crash_loop(previous, again(restarts), start) == counted


def test_what_torchrun_started_again_was_no_stop_that_was_asked_for() -> None:
    """torchrun's SIGTERM after a peer's death reached rank 0 first. Slurm requeues after a requested stop."""
    previous = left("stopped", 40, 41, FailedStarts(2, 41), "signal SIGTERM")
    assert check_crash_loop(left("stopped", 40, 41), again(1, 1), 40) == FailedStarts(1, 41)
    assert check_crash_loop(previous, again(3), 40) == NONE
    assert check_crash_loop(previous, again(3, 3), 50) == NONE  # a commit since
    with pytest.raises(
        CrashLoopError, match=r"signal SIGTERM, which torchrun sends .*process .*died.*torchrun's output"
    ):
        check_crash_loop(previous, again(3, 3), 40)


@pytest.mark.parametrize(("state", "why"), [("failed", "boom"), ("running", "killed or its host went down")])
def test_after_three_the_next_is_refused(state: State, why: str) -> None:
    with pytest.raises(CrashLoopError) as refused:
        check_crash_loop(left(state, 40, 41, FailedStarts(2, 41)), again(3), 40)
    for fact in ("3 starts in a row", "step 41 (from the checkpoint of step 40)", why, "by hand"):
        assert fact in str(refused.value)


def test_the_first_three_run_and_the_fourth_does_not(tmp_path: Path) -> None:
    """Through status.json, as in one job: each run resumes from step 40 and is killed in step 41."""
    for restarts in range(3):
        failed = check_crash_loop(read_status(tmp_path), again(restarts), 40)
        assert failed.count == restarts
        assert write_status(tmp_path, "running", 41, 40, True, failed=failed) == ""
    for restarts in (3, 4):
        with pytest.raises(CrashLoopError):
            check_crash_loop(read_status(tmp_path), again(restarts), 40)
    assert check_crash_loop(read_status(tmp_path), again(0), 40) == NONE


def most_restarts(of_ranks: list[RankInfo]) -> RankInfo:
    return with_maximum_restarts(of_ranks[dist.get_rank()])


def test_the_restarts_of_all_nodes_count() -> None:
    """Slurm restarted the first node twice, and the second node's torchrun its workers three times."""
    first, second = RankInfo(0, 2, 0, 1, True, 2, 0), RankInfo(1, 2, 0, 1, True, 3, 3)
    assert run_ranks(2, most_restarts, [first, second]) == [
        dataclasses.replace(one, restarts=3, torchrun_restarts=3) for one in (first, second)
    ]


def test_a_long_reason_with_anything_in_it_becomes_one_line() -> None:
    with pytest.raises(CrashLoopError) as refused:
        check_crash_loop(left("failed", None, 1, FailedStarts(2, 1), "a\n\x1b[2Jb" * 10_000), again(3), 0)
    assert len(str(refused.value)) < 900
    assert "(from the beginning)" in str(refused.value)
    assert str(refused.value).isprintable()


def test_status_comes_back_as_written(tmp_path: Path) -> None:
    write_status(tmp_path, "failed", 41, 40, True, "OSError: disk full", FailedStarts(2, 41))
    assert read_status(tmp_path) == Status("failed", 41, 40, "OSError: disk full", FailedStarts(2, 41))
    write_status(tmp_path, "failed", 41, 40, True, "\x00é" * 10_000_000)
    assert read_status(tmp_path) is not None, "a huge reason is cut"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"state": ["failed"]}',
        b'{"state": "failed", "step": true}',
        b'{"state": "failed", "resumed_from": -1}',
        b"[" * 100_000,
        b'{"state": "failed", "reason": "' + b"x" * 2_000_000 + b'"}',
    ],
)
def test_a_broken_status_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_said_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    assert "status.json could not be written (Is a directory)" in write_status(
        tmp_path, "running", 1, None, False
    )
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert "could not be written" in write_status(tmp_path / "gone", "running", 1, None, False)


@pytest.mark.parametrize(
    ("state", "saved", "named", "instruction"),
    [
        ("running", True, False, ""),
        ("stopped", True, False, "run the same command again"),
        ("failed", True, True, "run the same command with --checkpoint.resume=auto"),
        ("stopped", False, True, "nothing was saved: the same command starts where this run did"),
        ("finished", True, False, "a larger train.steps continues the run"),
    ],
)
def test_it_says_how_to_go_on(
    state: State, saved: bool, named: bool, instruction: str, tmp_path: Path
) -> None:
    write_status(tmp_path, state, 7, None, saved, named=named)
    assert json.loads((tmp_path / "status.json").read_text())["how_to_go_on"] == instruction


def test_several_may_write_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        problems = set(
            pool.map(lambda step: write_status(tmp_path, "running", step, None, False), range(400))
        )
    assert problems == {""}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
