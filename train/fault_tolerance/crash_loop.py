"""Crash-loop detection: refuse an automatic restart after three failed starts in a row without progress."""

from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import CrashLoopError
from meshwright.train.fault_tolerance.run_status import FailedStarts, Status, read_status

MAX_FAILED_STARTS = 3
SHOWN = 500  # characters of the last failure's reason in the message


def count_failed_starts(folder: Path, ranks: RankInfo, restarted: bool, start_step: int) -> FailedStarts:
    """Return the failed starts in a row before this one in a run's folder; every rank calls it. Raises
    CrashLoopError on all ranks (`check_crash_loop`)."""

    def check() -> FailedStarts:  # on rank 0, which then writes status.json: others might read the new file
        return check_crash_loop(read_status(folder), restarted, ranks.requeued, start_step)

    return broadcast_from_rank0(ranks, check)


def check_crash_loop(
    previous: Status | None, restarted: bool, requeued: bool, start_step: int
) -> FailedStarts:
    """Return the failed starts in a row, up to the previous one, that committed no checkpoint and got no
    further than the first of them.

    Args:
        previous: the previous start's status.json. State running means that it was killed, and counts as
            failed; a requested stop does not count, except after a restart by torchrun. An agreed stop
            exits with 0 and torchrun does not restart it, so in that case a process died, and torchrun's
            SIGTERM reached rank 0 before the error did.
        restarted, requeued: by torchrun, by Slurm; any other start is one by hand, which resets the count
        start_step: the step of the checkpoint to resume from, 0 without one

    Raises CrashLoopError after MAX_FAILED_STARTS.
    """
    if previous is None or previous.state == "finished" or not (restarted or requeued):
        return FailedStarts()
    other_start = start_step != (previous.resumed_from or 0)  # a new commit, or a damaged one was skipped
    if other_start or (previous.state == "stopped" and not restarted):
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
    reason = one_line(previous.reason, SHOWN) or "status.json gives no reason"
    if previous.state == "running":
        reason = "the process was killed or its host went down"
    if previous.state == "stopped":
        reason = f"{reason}, which torchrun sends after a process has died: its error is in torchrun's output"
    return (
        f"crash loop: {failed.count} starts in a row got no further than step {failed.step} (from {origin}). "
        f"Last failure: {reason}. Fix the cause and start the run by hand, which resets the count"
    )
