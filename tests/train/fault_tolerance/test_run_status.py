"""What rank 0 writes into status.json when an error ends the run."""

from pathlib import Path

import pytest

from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.peers import LostPeer
from meshwright.train.fault_tolerance.run_status import (
    FailedStarts,
    RunStatus,
    Status,
    read_status,
    write_status,
)

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")


def end_by(error: Exception, folder: Path, of_another: str = "", earlier: str = "") -> str:
    """Return the reason in status.json after this error has ended rank 0. Before, another process may have
    recorded its failure, and an earlier run too."""
    run_status = RunStatus(RankInfo(0, 2, 0, 2, True), Console(False))
    if earlier:
        assert write_status(folder, Status("failed", 2, reason=earlier), False) == ""

    def end() -> None:
        run_status.start(folder, None, FailedStarts())
        if of_another:
            assert write_status(folder, Status("failed", 3, reason=of_another), False) == ""
        raise error

    with pytest.raises(type(error)), run_status.recording():
        end()
    status = read_status(folder)
    assert status is not None
    return status.reason


def test_who_has_lost_another_process_does_not_write_over_why_that_one_is_gone(tmp_path: Path) -> None:
    """A rank that is out of memory writes for all (OutOfMemory); rank 0 loses the connection a moment
    later."""
    assert end_by(LOST, tmp_path, of_another="OutOfMemory: rank 1") == "OutOfMemory: rank 1"
    assert end_by(ValueError("its own"), tmp_path, of_another="another") == "ValueError: its own"


def test_where_nobody_has_said_why_the_loss_is_said(tmp_path: Path) -> None:
    assert "a process of this run has died" in end_by(LOST, tmp_path)
    assert "a process of this run has died" in end_by(LOST, tmp_path, earlier="of the run before")


@pytest.mark.parametrize(
    ("rank", "found", "writes"), [(0, False, True), (0, True, True), (1, True, True), (1, False, False)]
)
def test_a_loss_is_recorded_by_rank_0_and_by_the_rank_that_found_it(
    rank: int, found: bool, writes: bool, tmp_path: Path
) -> None:
    """With the step that rank 0 has recorded: it may be the rank that has died."""
    run_status = RunStatus(RankInfo(rank, 2, rank, 2, True), Console(False))
    with run_status.recording():
        run_status.start(tmp_path, None, FailedStarts())
        assert write_status(tmp_path, Status("running", 7 if rank else 0), False) == ""
        run_status.record_loss(LostPeer("rank 5 was killed", found))
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, "rank 5 was killed" in status.reason) == (
        ("failed", True) if writes else ("running", False)
    )
    assert status.step == (7 if rank else 0)
