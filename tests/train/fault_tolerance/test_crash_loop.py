"""The decision whether a run may restart automatically."""

import pytest

from meshwright.train.errors import CrashLoopError
from meshwright.train.fault_tolerance.run_folder import FailedStarts, State, Status, check_crash_loop

NONE = FailedStarts()
TORCHRUN, SLURM, BY_HAND = (True, False), (False, True), (False, False)


def left(state: State, start: int | None, reached: int, *failed: int, reason: str = "boom") -> Status:
    """The status of the start before: from which step it resumed, the step it reached, and the failed starts
    before it, how many and at which step."""
    return Status(state, reached, start, reason, *failed)


@pytest.mark.parametrize(
    ("previous", "start", "counted"),
    [
        (None, 0, NONE),
        (left("finished", 40, 50), 50, NONE),
        (left("stopped", 40, 41), 40, NONE),  # requested
        (left("failed", None, 7), 0, FailedStarts(1, 7)),
        (left("running", 40, 41), 40, FailedStarts(1, 41)),  # killed
        (left("failed", 40, 41, 1, 41), 40, FailedStarts(2, 41)),
        (left("failed", 40, 51, 2, 41), 50, NONE),  # a commit since
        (left("failed", 40, 41, 2, 41), 30, NONE),  # the checkpoint of 40 is skipped
        (left("failed", 40, 45, 2, 41), 40, FailedStarts(1, 45)),  # further than before
        (left("failed", 40, 43, 1, 45), 40, FailedStarts(2, 45)),  # not as far
    ],
)
def test_what_counts_as_failing_at_the_same_step(previous: Status | None, start: int, counted: FailedStarts):
    assert check_crash_loop(previous, *SLURM, start) == counted
    assert check_crash_loop(previous, *BY_HAND, start) == NONE


def test_what_torchrun_started_again_was_no_stop_that_was_asked_for() -> None:
    """torchrun's SIGTERM after a peer's death reached rank 0 first. Slurm requeues after a requested stop."""
    previous = left("stopped", 40, 41, 2, 41, reason="signal SIGTERM")
    assert check_crash_loop(left("stopped", 40, 41), *TORCHRUN, 40) == FailedStarts(1, 41)
    assert check_crash_loop(previous, *SLURM, 40) == NONE
    assert check_crash_loop(previous, *TORCHRUN, 50) == NONE  # a commit since
    with pytest.raises(CrashLoopError, match=r"signal SIGTERM, which torchrun sends .*torchrun's output"):
        check_crash_loop(previous, *TORCHRUN, 40)


@pytest.mark.parametrize(
    ("previous", "start", "facts"),
    [
        (left("failed", 40, 41, 2, 41), 40, ("step 41 (from the checkpoint of step 40)", "boom")),
        (left("running", 40, 41, 2, 41), 40, ("killed or its host went down",)),
        (left("failed", None, 1, 2, 1, reason="a\n\x1b[2Jb" * 10_000), 0, ("(from the beginning)",)),
    ],
)
def test_after_three_the_next_is_refused(previous: Status, start: int, facts: tuple[str, ...]) -> None:
    with pytest.raises(CrashLoopError) as refused:
        check_crash_loop(previous, *SLURM, start)
    message = str(refused.value)
    assert [fact for fact in ("3 starts in a row", "by hand", *facts) if fact not in message] == []
    assert message.isprintable()
    assert len(message) < 900
