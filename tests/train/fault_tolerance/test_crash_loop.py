"""The decision whether a run may restart automatically, and status.json, which the decision is based on."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.train.errors import CrashLoopError
from meshwright.train.fault_tolerance.crash_loop import check_crash_loop
from meshwright.train.fault_tolerance.run_status import FailedStarts, State, Status, read_status, write_status

NONE = FailedStarts()


def left(
    state: State, start: int | None, reached: int, failed: FailedStarts = NONE, reason: str = "boom"
) -> Status:
    return Status(state, reached, start, reason, failed)


TORCHRUN, SLURM, BY_HAND = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("previous", "start", "counted"),
    [
        (None, 0, NONE),
        (left("finished", 40, 50), 50, NONE),
        (left("stopped", 40, 41), 40, NONE),  # requested
        (left("failed", None, 7), 0, FailedStarts(1, 7)),
        (left("running", 40, 41), 40, FailedStarts(1, 41)),  # killed
        (left("failed", 40, 41, FailedStarts(1, 41)), 40, FailedStarts(2, 41)),
        (left("failed", 40, 51, FailedStarts(2, 41)), 50, NONE),  # a commit since
        (left("failed", 40, 41, FailedStarts(2, 41)), 30, NONE),  # the checkpoint of 40 is skipped
        (left("failed", 40, 45, FailedStarts(2, 41)), 40, FailedStarts(1, 45)),  # further than before
        (left("failed", 40, 43, FailedStarts(1, 45)), 40, FailedStarts(2, 45)),  # not as far
    ],
)
def test_what_counts_as_failing_at_the_same_step(previous: Status | None, start: int, counted: FailedStarts):
    assert check_crash_loop(previous, *SLURM, start) == counted
    assert check_crash_loop(previous, *BY_HAND, start) == NONE


def test_what_torchrun_started_again_was_no_stop_that_was_asked_for() -> None:
    """torchrun's SIGTERM after a peer's death reached rank 0 first. Slurm requeues after a requested stop."""
    previous = left("stopped", 40, 41, FailedStarts(2, 41), "signal SIGTERM")
    assert check_crash_loop(left("stopped", 40, 41), *TORCHRUN, 40) == FailedStarts(1, 41)
    assert check_crash_loop(previous, *SLURM, 40) == NONE
    assert check_crash_loop(previous, *TORCHRUN, 50) == NONE  # a commit since
    with pytest.raises(
        CrashLoopError, match=r"signal SIGTERM, which torchrun sends .*process .*died.*torchrun's output"
    ):
        check_crash_loop(previous, *TORCHRUN, 40)


@pytest.mark.parametrize(("state", "why"), [("failed", "boom"), ("running", "killed or its host went down")])
def test_after_three_the_next_is_refused(state: State, why: str) -> None:
    with pytest.raises(CrashLoopError) as refused:
        check_crash_loop(left(state, 40, 41, FailedStarts(2, 41)), *SLURM, 40)
    for fact in ("3 starts in a row", "step 41 (from the checkpoint of step 40)", why, "by hand"):
        assert fact in str(refused.value)


def test_the_first_three_run_and_the_fourth_does_not(tmp_path: Path) -> None:
    """Through status.json, as in one job: each run resumes from step 40 and is killed in step 41."""
    for start in range(3):
        failed = check_crash_loop(read_status(tmp_path), *(TORCHRUN if start else BY_HAND), 40)
        assert failed.count == start
        assert write_status(tmp_path, Status("running", 41, 40, failed=failed), True) == ""
    for _ in range(2):
        with pytest.raises(CrashLoopError):
            check_crash_loop(read_status(tmp_path), *TORCHRUN, 40)
    assert check_crash_loop(read_status(tmp_path), *BY_HAND, 40) == NONE


def test_a_long_reason_with_anything_in_it_becomes_one_line() -> None:
    with pytest.raises(CrashLoopError) as refused:
        check_crash_loop(left("failed", None, 1, FailedStarts(2, 1), "a\n\x1b[2Jb" * 10_000), *SLURM, 0)
    assert len(str(refused.value)) < 900
    assert "(from the beginning)" in str(refused.value)
    assert str(refused.value).isprintable()


def test_status_comes_back_as_written(tmp_path: Path) -> None:
    status = Status("failed", 41, 40, "OSError: disk full", FailedStarts(2, 41))
    write_status(tmp_path, status, True)
    assert read_status(tmp_path) == status
    write_status(tmp_path, Status("failed", 41, 40, "\x00é" * 10_000_000), True)
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
    running = Status("running", 1)
    assert "status.json could not be written (Is a directory)" in write_status(tmp_path, running, False)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert "could not be written" in write_status(tmp_path / "gone", running, False)


@pytest.mark.parametrize(
    ("state", "saved", "instruction"),
    [
        ("running", True, ""),
        ("stopped", True, "run the same command again"),
        ("failed", False, "nothing was saved: the same command starts where this run did"),
        ("finished", True, "a larger train.steps (or epochs) continues the run"),
    ],
)
def test_it_says_how_to_go_on(state: State, saved: bool, instruction: str, tmp_path: Path) -> None:
    write_status(tmp_path, Status(state, 7), saved)
    assert json.loads((tmp_path / "status.json").read_text())["how_to_go_on"] == instruction


def test_several_may_write_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        problems = set(
            pool.map(lambda step: write_status(tmp_path, Status("running", step), False), range(400))
        )
    assert problems == {""}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
