"""Log files on a full disk, in a deleted or invalid folder, on a hanging disk, and after a kill."""

import errno
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import meshwright.train.main
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.config import MetricsConfig
from meshwright.train.evaluation import Score
from meshwright.train.metrics import log_file, writer
from meshwright.train.metrics.collector import Metrics, Throughput
from meshwright.train.metrics.log_file import LogFile, WriteErrors
from meshwright.train.metrics.tensorboard import RunSummary, TensorBoardWriter
from meshwright.train.metrics.writer import MetricsWriter
from tests.support.forks import fork
from tests.support.launch import EAGER, TINY, read_metrics, write_text

ROWS = [json.dumps({"step": step, "text": "x" * 40}).encode() + b"\n" for step in range(40)]


@contextmanager
def full_at(size_bytes: int) -> Iterator[None]:
    """Limit the file size of this process: a write beyond it is cut short, as on a full disk, and the next
    one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_log(path: Path, head: bytes = b"") -> tuple[LogFile, list[str]]:
    warnings: list[str] = []
    return LogFile(path, WriteErrors(warnings.append), head), warnings


def assert_recovered(message: str, path: Path, lost: str) -> None:
    facts = (f"{path} ", "can be written again", f"{lost} ", "lost")
    assert [fact for fact in facts if fact not in message] == [], message


@pytest.mark.parametrize(
    "half", [b"", b'{"step": 4', b"x" * 200_000], ids=["none", "short", "longer than a block"]
)
def test_what_a_kill_left_of_a_line_is_cut_off_on_opening_and_whole_lines_stay(
    half: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(ROWS[:3]) + half)
    log, warnings = open_log(path)
    log.append(b"")
    assert path.read_bytes() == b"".join(ROWS[:3])
    log.append(ROWS[3])
    assert path.read_bytes() == b"".join(ROWS[:4])
    path.write_bytes(half)
    open_log(path)[0].append(ROWS[0])
    assert path.read_bytes() == ROWS[0]
    assert warnings == []


@pytest.mark.parametrize("past", [0, 1, 20])
def test_a_row_that_does_not_fit_is_not_there_at_all_and_comes_later_with_all_others(
    past: int, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    log, warnings = open_log(path)
    with full_at(len(b"".join(ROWS[:10])) + past):
        for row in ROWS[:30]:
            log.append(row)
            assert path.read_bytes().endswith(b"\n")
    assert path.read_bytes() == b"".join(ROWS[:10])
    assert len(warnings) == 1
    assert f"{path} cannot be written" in warnings[0]
    log.append(ROWS[30])
    assert path.read_bytes() == b"".join(ROWS[:31])
    assert len(warnings) == 2
    assert_recovered(warnings[1], path, "no row")
    with full_at(10):
        log.append(ROWS[31])
    assert len(warnings) == 3, "a new failure is reported again"


def test_a_full_device_is_named_as_such_and_the_rows_that_were_never_written_are_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log, warnings = open_log(path)
    for row in ROWS[:5]:
        log.append(row)
    log.close()
    assert os.strerror(errno.ENOSPC) in warnings[0]
    assert len(warnings) == 2
    assert warnings[1].startswith(f"warning: {path} lacks its last 5 rows")


def test_of_more_rows_than_are_kept_the_oldest_are_lost_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "MAX_WAITING", 50)
    (tmp_path / "file").write_text("")
    log, warnings = open_log(tmp_path / "file" / "log")
    for step in range(50 + 3):
        log.append(b"%d\n" % step)
    (tmp_path / "file").unlink()
    log.append(b"")
    assert (tmp_path / "file" / "log").read_bytes().split(b"\n")[0] == b"3"
    assert len(warnings) == 2
    assert_recovered(warnings[1], tmp_path / "file" / "log", "3 rows")


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    log, warnings = open_log(path, b"head\n")
    log.append(ROWS[0])
    shutil.rmtree(path.parent)
    log.append(ROWS[1])
    assert path.read_bytes() == b"head\n" + ROWS[1]
    assert warnings == []


def read_board(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder), size_guidance=dict.fromkeys(("scalars", "tensors", "images"), 0)
    ).Reload()


def steps_of(folder: Path) -> list[int]:
    return [event.step for event in read_board(folder).Scalars("loss")]


def test_tensorboard_reads_the_scalars_and_texts_of_every_row_at_once_and_hides_steps_done_again(
    tmp_path: Path,
) -> None:
    errors = WriteErrors(lambda line: pytest.fail(line))
    first = TensorBoardWriter(tmp_path, errors, RunSummary({"config": "a: 1"}), 1)
    for step in range(1, 6):
        first.add(step, {"loss": step / 2, "lr": 1.0}, {})
        assert steps_of(tmp_path) == list(range(1, step + 1))
    resumed = TensorBoardWriter(tmp_path, errors, RunSummary(), 4)
    resumed.add(4, {"loss": 9.0}, {"note": "seen again"})
    read = read_board(tmp_path)
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 9.0),
    ]
    (config,), (note,) = read.Tensors("config"), read.Tensors("note")
    assert config.tensor_proto.string_val == [b"a: 1"]
    assert (note.step, note.tensor_proto.string_val) == (4, [b"seen again"])


def test_a_board_on_a_full_disk_warns_once_and_has_all_rows_when_there_is_room(tmp_path: Path) -> None:
    warnings: list[str] = []
    board = TensorBoardWriter(tmp_path, WriteErrors(warnings.append), RunSummary(), 0)
    board.add(0, {"loss": 1.0}, {})
    (file,) = tmp_path.iterdir()
    with full_at(file.stat().st_size + 800):
        for step in range(1, 40):
            board.add(step, {"loss": 1.0, "lr": 2.0}, {})
        written = steps_of(tmp_path)
        assert 0 < len(written) < 40
        assert written == list(range(len(written)))
    assert len(warnings) == 1
    board.add(40, {"loss": 1.0}, {})
    assert steps_of(tmp_path) == list(range(41))
    board.close()


def write_until_killed(folder: Path) -> None:
    """Write rows of all kinds, and after each step its number to stdout."""
    errors = WriteErrors(print)
    shown = RunSummary({"config": "a: 1"}, {}, {"optim.lr": 0.5})
    log, board = LogFile(folder / "log", errors), TensorBoardWriter(folder / "tb", errors, shown, 0)
    for step in itertools.count():
        log.append(b"%d\n" % step)
        board.add(step, {"loss": 1.0}, {"note": "so"})
        board.add_image(step, "picture", b"\x89PNG\r\n\x1a\n" + bytes(16) + b"x" * 5000)
        print(step, flush=True)


def test_every_row_that_was_written_outlives_a_kill(tmp_path: Path) -> None:
    output = tmp_path / "out"
    child, deadline_s = fork(write_until_killed, tmp_path, output=output), time.monotonic() + 60
    while (not output.exists() or output.read_text().count("\n") < 50) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    child.kill()
    child.wait(60)
    last = output.read_text().count("\n") - 1
    assert last >= 49
    assert (tmp_path / "log").read_bytes().splitlines()[: last + 1] == [
        b"%d" % step for step in range(last + 1)
    ]
    board = read_board(tmp_path / "tb")
    for shown in (board.Scalars("loss"), board.Images("picture"), board.Tensors("note")):
        assert [event.step for event in shown][: last + 1] == list(range(last + 1))
    assert board.Tensors("custom_scalars__config__")
    assert "_hparams_/session_start_info" in board.PluginTagToContent("hparams")


def open_metrics(folder: Path, warnings: list[str]) -> Metrics:
    throughput = Throughput(
        tokens_per_step=1, flops_per_token=1.0, flops_per_token_causal=1.0, world_size=1, peak_flops=None
    )
    return Metrics(
        MetricsConfig(), throughput, folder, torch.device("cpu"), True, {}, RunSummary(), warnings.append
    )


def test_metrics_of_a_run_without_a_folder_warn_once_and_are_all_there_when_it_comes(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    warnings: list[str] = []
    metrics = open_metrics(tmp_path / "run", warnings)
    for step in range(3):
        metrics.log_eval(step, {"a": Score(1.0, 1, 1.0)})
    metrics.flush()
    assert len(warnings) == 1, "one warning for all files"
    (tmp_path / "run").unlink()
    metrics.log_eval(3, {"a": Score(1.0, 1, 1.0)})
    metrics.close()
    assert [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2, 3]
    assert [event.step for event in read_board(tmp_path / "run" / "tb").Scalars("loss/eval")] == [0, 1, 2, 3]
    assert len(warnings) == 2


LEASE_S = 45  # default of /proc/sys/fs/lease-break-time


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Context in which opening a file hangs in the kernel, as on a network disk without its server, because
    of a lease on the file. LEASE_S after the first open the kernel revokes the lease: the test must be done
    by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, before = os.open(path, os.O_RDWR | os.O_CREAT), signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)


needs_leases = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's file leases")


def assert_hang(output: str, folder: Path, seconds: int) -> None:
    facts = ("warning: ", "metrics", f"{folder} ", f" hung for {seconds} s", "training continues")
    assert [fact for fact in facts if fact not in output] == [], output


@needs_leases
def test_rows_for_a_disk_that_hangs_wait_and_nobody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HANGS_S", 1.5)
    warnings: list[str] = []
    with hanging(tmp_path / "metrics.jsonl"):
        start_s = time.monotonic()
        metrics = open_metrics(tmp_path, warnings)
        for step in range(10):
            metrics.log_eval(step, {"a": Score(1.0, 1, 1.0)})
        for _ in range(20):
            metrics.flush()
        assert time.monotonic() - start_s < 15, "only the first flush waits; all twenty would for 30 s"
        assert len(warnings) == 1
        assert_hang(warnings[0], tmp_path, 2)
    wait_for_rows(tmp_path, 10)
    metrics.log_eval(10, {"a": Score(1.0, 1, 1.0)})
    metrics.close()
    assert steps_in(tmp_path) == list(range(11))
    assert [event.step for event in read_board(tmp_path / "tb").Scalars("loss/eval")] == list(range(11))
    assert len(warnings) == 1


@needs_leases
def test_of_rows_for_a_disk_that_hangs_no_more_than_a_limit_are_kept_and_it_is_said_how_many_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HANGS_S", 0.2)
    monkeypatch.setattr(writer, "MAX_WAITING", 20)
    warnings: list[str] = []
    with hanging(tmp_path / "metrics.jsonl"):
        metrics = open_metrics(tmp_path, warnings)
        for step in range(100):
            metrics.log_eval(step, {"a": Score(1.0, 1, 1.0)})
        metrics.close()
    assert warnings[-1].startswith(f"warning: {tmp_path} lacks the last rows of metrics")
    assert "103 writes" in warnings[-1]
    wait_for_rows(tmp_path, 19)
    wait_for_end_of("metrics")
    assert steps_in(tmp_path) == list(range(19)), (
        "with the first write, which opens the file, the limit of 20"
    )


def wait_for_rows(folder: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(steps_in(folder)) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)


def wait_for_end_of(name: str) -> None:
    """Join every thread of that name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_and_wait_a_second_for_the_log(arguments: list[str]) -> None:
    writer.HANGS_S = 1.0
    meshwright.train.main.main(arguments)


@needs_leases
def test_a_run_whose_log_hangs_trains_and_saves_and_has_all_rows_when_it_hangs_no_more(
    tmp_path: Path,
) -> None:
    folder, output = tmp_path / "run", tmp_path / "out"
    arguments = [
        *TINY,
        *EAGER,
        *write_text(tmp_path),
        "--train.steps=6",
        "--checkpoint.every=2",
        f"--run.dir={folder}",
    ]
    with hanging(folder / "metrics.jsonl"):
        process = fork(train_and_wait_a_second_for_the_log, arguments, output=output)
        deadline_s = time.monotonic() + LEASE_S - 5
        while len(list_checkpoints(folder / "checkpoints")) < 2:
            assert process.poll() is None, f"it ended without two checkpoints: {output.read_text()}"
            assert time.monotonic() < deadline_s, (
                "the machine is too slow: the kernel revokes the lease before the second checkpoint"
            )
            time.sleep(0.05)
        assert [path.name for path in list_checkpoints(folder / "checkpoints")][:2] == [
            "step-00000002",
            "step-00000004",
        ]
        assert (folder / "metrics.jsonl").stat().st_size == 0
    assert process.wait(60) == 0, output.read_text()
    assert_hang(output.read_text(), folder, 1)
    assert sorted(read_metrics(folder)) == list(range(1, 7))


def test_a_picture_that_cannot_be_drawn_is_said_in_a_line_and_ends_nothing(tmp_path: Path) -> None:
    def draw() -> bytes:
        raise ImportError("no\nlibrary")

    warnings: list[str] = []
    shown = RunSummary(images={"predicted_step": draw})
    writer = MetricsWriter(tmp_path, tensorboard=True, shown=shown, warn=warnings.append)
    for step in (1, 2):
        writer.write({"step": step, "loss": 1.0}, {})
    writer.close()
    (warning,) = warnings
    for fact in ("warning: ", " predicted_step ", "ImportError: no library"):
        assert fact in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
