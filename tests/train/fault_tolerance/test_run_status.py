"""status.json: its content, who writes it when an error ends a run, and a file that cannot be written."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.peers import LostPeer
from meshwright.train.fault_tolerance.run_folder import (
    FailedStarts,
    RunStatus,
    Status,
    read_status,
    write_status,
)

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")


def status_of(rank: int) -> RunStatus:
    return RunStatus(RankInfo(rank, 2, rank, 2, True), Console(False))


def end_by(error: Exception, folder: Path, of_another: str = "", earlier: str = "") -> str:
    """Return the reason in status.json after this error has ended rank 0. Before, another process may have
    recorded its failure, and an earlier run too."""
    run_status = status_of(0)
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
    """A rank that is out of memory writes for all; rank 0 loses the connection a moment later."""
    assert end_by(LOST, tmp_path, of_another="OutOfMemory: rank 1") == "OutOfMemory: rank 1"
    assert end_by(ValueError("its own"), tmp_path, of_another="another") == "ValueError: its own"
    assert "a process of this run has died" in end_by(LOST, tmp_path, earlier="of the run before")


@pytest.mark.parametrize(
    ("rank", "found", "writes"), [(0, False, True), (0, True, True), (1, True, True), (1, False, False)]
)
def test_a_loss_is_recorded_by_rank_0_and_by_the_rank_that_found_it(
    rank: int, found: bool, writes: bool, tmp_path: Path
) -> None:
    """With the step that rank 0 has recorded: it may be the rank that has died."""
    run_status = status_of(rank)
    with run_status.recording():
        run_status.start(tmp_path, None, FailedStarts())
        assert write_status(tmp_path, Status("running", 7 if rank else 0), False) == ""
        run_status.record_loss(LostPeer("rank 5 was killed", found))
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == ("failed" if writes else "running")
    assert ("rank 5 was killed" in status.reason) == writes
    assert status.step == (7 if rank else 0)


def test_a_status_comes_back_as_written_and_a_huge_reason_is_cut(tmp_path: Path) -> None:
    status = Status("failed", 41, 40, "OSError: disk full", 2, 41)
    write_status(tmp_path, status, True)
    assert read_status(tmp_path) == status
    write_status(tmp_path, Status("failed", 41, 40, "\x00é" * 10_000_000), True)
    assert read_status(tmp_path) is not None


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b'{"state": ["failed"]}', b'{"state": "failed", "step": true}']
)
def test_a_broken_status_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_reported_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    for folder in (tmp_path, tmp_path / "gone"):
        assert f"{folder}/status.json could not be written" in write_status(
            folder, Status("running", 1), False
        )
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_several_may_write_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda step: write_status(tmp_path, Status("running", step), False), range(200))
        assert set(written) == {""}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
