"""Log files on a full disk, in a deleted or invalid folder, on a hanging disk, and after a kill: training
continues, and no row is lost."""

import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.metrics import log_file, writer
from meshwright.train.metrics.log_file import LogFile, WriteErrors
from meshwright.train.metrics.run_summary import RunSummary
from meshwright.train.metrics.tensorboard import TensorBoardWriter
from meshwright.train.metrics.writer import RowWriter
from tests.support.launch import LIMIT_S
from tests.support.limited import full_at
from tests.support.metrics import board_steps, log_losses, open_rows, read_board, steps_in

FLUSH_LIMIT_S = 30.0
ROWS = [json.dumps({"step": step, "text": "x" * 40}).encode() + b"\n" for step in range(40)]


def open_log(path: Path, head: bytes = b"") -> tuple[LogFile, list[str]]:
    warnings: list[str] = []
    return LogFile(path, WriteErrors(warnings.append), head), warnings


def assert_contains(message: str, *facts: str) -> None:
    assert [fact for fact in facts if fact not in message] == [], message


def test_the_partial_row_of_a_killed_process_is_cut_off_and_whole_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for partial in (b"", b'{"step": 4', b"x" * 200_000):
        for rows in (b"".join(ROWS[:3]), b""):
            path.write_bytes(rows + partial)
            log, warnings = open_log(path)
            log.append(b"")
            assert path.read_bytes() == rows
            log.append(ROWS[3])
            assert path.read_bytes() == rows + ROWS[3]
            assert warnings == []


def test_a_row_that_does_not_fit_is_left_out_and_comes_later_with_all_others(tmp_path: Path) -> None:
    path, room = tmp_path / "log", len(b"".join(ROWS[:10])) + random.randrange(len(ROWS[10]))
    log, warnings = open_log(path)
    with full_at(room):
        for row in ROWS[:30]:
            log.append(row)
            assert path.read_bytes().endswith(b"\n"), room
    assert path.read_bytes() == b"".join(ROWS[:10])
    log.append(ROWS[30])
    assert path.read_bytes() == b"".join(ROWS[:31])
    with full_at(10):
        log.append(ROWS[31])
    failed, recovered, again = warnings
    assert_contains(failed, f"{path} cannot be written")
    assert_contains(recovered, f"{path} ", "can be written again", "no row was lost")
    assert_contains(again, f"{path} cannot be written")


def test_a_full_device_is_named_and_the_rows_that_were_never_written_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log, warnings = open_log(path)
    for row in ROWS[:5]:
        log.append(row)
    log.close()
    first, last = warnings
    assert os.strerror(errno.ENOSPC) in first
    assert_contains(last, f"{path} ", "last 5 rows")


def test_beyond_the_limit_the_oldest_rows_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "MAX_WAITING", 50)
    folder = tmp_path / "file"
    folder.write_text("")
    log, warnings = open_log(folder / "log")
    for step in range(50 + 3):
        log.append(b"%d\n" % step)
    folder.unlink()
    log.append(b"")
    assert (folder / "log").read_bytes().split() == [b"%d" % step for step in range(3, 53)]
    assert_contains(warnings[1], f"{folder / 'log'} ", "can be written again", "3 rows were lost")


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    log, warnings = open_log(path, b"head\n")
    log.append(ROWS[0])
    shutil.rmtree(path.parent)
    log.append(ROWS[1])
    assert path.read_bytes() == b"head\n" + ROWS[1]
    assert warnings == []


def test_tensorboard_reads_every_row_at_once_and_hides_steps_that_a_resumed_run_repeats(
    tmp_path: Path,
) -> None:
    errors = WriteErrors(pytest.fail)
    first = TensorBoardWriter(tmp_path, errors, RunSummary({"config": "a: 1"}), 1)
    for step in range(1, 6):
        first.add(step, {"loss": step / 2, "lr": 1.0}, {})
        assert board_steps(tmp_path, "loss") == list(range(1, step + 1))
    resumed = TensorBoardWriter(tmp_path, errors, RunSummary(), 4)
    resumed.add(4, {"loss": 9.0}, {"note": "seen again"})
    read = read_board(tmp_path)
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert losses == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]
    (config,), (note,) = read.Tensors("config"), read.Tensors("note")
    assert config.tensor_proto.string_val == [b"a: 1"]
    assert (note.step, note.tensor_proto.string_val) == (4, [b"seen again"])


def test_metrics_without_a_folder_warn_once_and_are_complete_when_it_can_be_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text("a file where a folder should be")
    warnings: list[str] = []
    rows = open_rows(run, warnings.append)
    log_losses(rows, dict.fromkeys(range(3), 1.0))
    rows.flush()
    assert len(warnings) == 1, "one warning for all files"
    run.unlink()
    log_losses(rows, {3: 1.0})
    rows.close()
    assert steps_in(run) == board_steps(run / "tb") == [0, 1, 2, 3]
    assert len(warnings) == 2


def hang_until(released: Callable[[], object]) -> None:
    """Make writes of log files hang until `released()` returns, as on a network disk without its server."""
    write = log_file.append_whole

    def append_whole(*arguments: Any) -> int:
        released()
        return write(*arguments)

    log_file.append_whole = append_whole


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk hangs until this event is set, and counts as hanging after a moment."""
    event = threading.Event()
    monkeypatch.setattr(writer, "HANGS_S", 0.1)
    monkeypatch.setattr(log_file, "append_whole", log_file.append_whole)  # restored at the end
    hang_until(event.wait)
    yield event
    event.set()


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "metrics":
            thread.join(LIMIT_S)


def assert_hang(output: str, folder: Path) -> None:
    assert_contains(output, "warning: ", "metrics", f"{folder} ", " hung for ", "training continues")


def flush_in_time(rows: RowWriter) -> None:
    flushing = threading.Thread(target=rows.flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_LIMIT_S)
    assert not flushing.is_alive(), "a flush waits for the disk"


def test_a_disk_that_hangs_is_waited_for_once_and_gets_all_rows_later(
    repaired: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    rows = open_rows(tmp_path, warnings.append)
    log_losses(rows, dict.fromkeys(range(10), 1.0))
    flush_in_time(rows)
    monkeypatch.setattr(writer, "HANGS_S", 2 * FLUSH_LIMIT_S)
    flush_in_time(rows)  # only the first flush waits
    written = threading.Event()
    rows.later(written.set)
    repaired.set()
    assert written.wait(LIMIT_S)
    log_losses(rows, {10: 1.0})
    rows.close()
    join_writers()
    assert steps_in(tmp_path) == board_steps(tmp_path / "tb") == list(range(11))
    (warning,) = warnings
    assert_hang(warning, tmp_path)


def test_of_the_rows_for_a_disk_that_hangs_a_limit_is_kept_and_the_missing_are_counted(
    repaired: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 20)
    warnings: list[str] = []
    rows = open_rows(tmp_path, warnings.append)
    log_losses(rows, dict.fromkeys(range(100), 1.0))
    rows.close()
    assert_contains(warnings[-1], "warning: ", f"{tmp_path} ", "lacks the last rows", "103 writes")
    repaired.set()
    join_writers()
    assert steps_in(tmp_path) == list(range(19)), "with the first write, which creates the file, 20 writes"


def test_an_image_that_cannot_be_drawn_is_a_warning_and_ends_nothing(tmp_path: Path) -> None:
    def draw() -> bytes:
        raise ImportError("no\nlibrary")

    warnings: list[str] = []
    rows = open_rows(tmp_path, warnings.append, shown=RunSummary(images={"predicted_step": draw}))
    log_losses(rows, {1: 1.0, 2: 1.0})
    rows.close()
    (warning,) = warnings
    assert_contains(warning, "warning: ", " predicted_step ", "ImportError: no library")
    assert steps_in(tmp_path) == [1, 2]


def test_an_image_that_takes_long_to_draw_is_not_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, goes_on, warnings = threading.Event(), threading.Event(), list[str]()

    def draw() -> bytes:
        monkeypatch.setattr(writer, "HANGS_S", 0.0)
        begun.set()
        goes_on.wait(LIMIT_S)
        monkeypatch.undo()
        return bytes(24)  # as much of a PNG as is read

    rows = open_rows(tmp_path, warnings.append, shown=RunSummary(images={"predicted_step": draw}))
    log_losses(rows, {1: 1.0})
    assert begun.wait(LIMIT_S)
    threading.Timer(0.1, goes_on.set).start()
    rows.close()
    assert not warnings
