"""Crash-loop detection: a run that is restarted by itself, and fails again at the same step, is not restarted
for ever."""

from meshwright.parallel.errors import one_line
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CrashLoopError
from meshwright.train.fault_tolerance.run_status import FailedStarts, Status

MAX_FAILED_STARTS = 3
SHOWN = 500  # characters of the last failure's reason


def check_crash_loop(previous: Status | None, ranks: RankInfo, start_step: int) -> FailedStarts:
    """The starts in a row, up to the previous one, that failed without a new commit and got no further than
    those before.

    `previous`: status.json as the start before left it. A state of running there means that it was killed,
    and counts as failed; a stop that was asked for does not count. `place` says how often the run was started
    again by itself (0: by hand, which begins the count anew). `start_step`: the checkpoint's step, 0 without
    one. torchrun never restarts an agreed stop, which exits with 0: after its restarts a state of stopped
    means that a process died and torchrun's SIGTERM reached rank 0 before the loss did, and counts as failed
    too.

    Raises CrashLoopError when MAX_FAILED_STARTS have failed so. By one process for all: it is about to write
    status.json, where the others would then read of this start.
    """
    if previous is None or previous.state == "finished" or ranks.restarts == 0:
        return FailedStarts()
    if previous.state == "stopped" and ranks.torchrun_restarts == 0:
        return FailedStarts()
    if start_step != (previous.resumed_from or 0):  # a commit was made since, or a damaged one is passed over
        return FailedStarts()
    before = previous.failed
    failed = FailedStarts(1, previous.step)
    if before.count and previous.step <= before.step:
        failed = FailedStarts(before.count + 1, before.step)
    if failed.count >= MAX_FAILED_STARTS:
        raise CrashLoopError(_diagnose(previous, failed, start_step))
    return failed


def _diagnose(previous: Status, failed: FailedStarts, start_step: int) -> str:
    origin = f"the checkpoint of step {start_step}" if start_step else "the beginning"
    killed = "it ended without a word: killed, or its machine went down"
    reason = (
        killed
        if previous.state == "running"
        else one_line(previous.reason, SHOWN) or "status.json gives no reason"
    )
    if previous.state == "stopped":
        reason = (
            f"{reason}, which torchrun sends after a process has died: its own words are in torchrun's output"
        )
    return (
        f"{failed.count} starts in a row went no further than step {failed.step} (from {origin}). The last: "
        f"{reason}. Mend the cause and start the run by hand: that begins the count anew"
    )
