"""What rank 0 writes into status.json when an error ends the run."""

from pathlib import Path

import pytest

from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.run_status import FailedStarts, RunStatus, read_status, write_status

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")


def end_by(error: Exception, folder: Path) -> str:
    """Return the reason in status.json after this error has ended rank 0."""
    run_status = RunStatus(RankInfo(0, 2, 0, 2, True), Console(False), named=False)
    with pytest.raises(type(error)), run_status.recording(folder):
        raise error
    status = read_status(folder)
    assert status is not None
    return status.reason


def test_who_has_lost_another_process_does_not_write_over_why_that_one_is_gone(tmp_path: Path) -> None:
    """A rank that is out of memory writes for all (OutOfMemory); rank 0 loses the connection a moment
    later."""
    assert write_status(tmp_path, "failed", 3, None, False, "OutOfMemory: rank 1", FailedStarts()) == ""
    assert end_by(LOST, tmp_path) == "OutOfMemory: rank 1"
    assert end_by(ValueError("its own"), tmp_path) == "ValueError: its own"


def test_where_nobody_has_said_why_the_loss_is_said(tmp_path: Path) -> None:
    assert write_status(tmp_path, "running", 3, None, False, "", FailedStarts()) == ""
    assert "a process of this run has died" in end_by(LOST, tmp_path)
