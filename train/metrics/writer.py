"""Write metrics.jsonl and TensorBoard in a thread, so that no step waits for the disk."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.parallel.errors import one_line
from meshwright.train.background import BackgroundThread
from meshwright.train.hooks import Hook, Row
from meshwright.train.metrics.collector import describe_spike
from meshwright.train.metrics.log_file import MAX_WAITING, LogFile, WriteErrors
from meshwright.train.metrics.run_summary import RunSummary, describe_run
from meshwright.train.run import Run

if TYPE_CHECKING:
    from meshwright.train.metrics.tensorboard import TensorBoardWriter

HANGS_S = 5.0  # without a written row for this long, the disk counts as hanging and is no longer waited for
COMPUTES_S = 60.0  # the same while TensorBoard is imported or a picture drawn: a busy machine takes long


class MetricsWriter:
    """Writes the rows of a run's metrics in order. A write error does not end the run: `warn` gets one
    message, from any thread. At most MAX_WAITING rows wait for a hanging disk; later rows are lost."""

    def __init__(
        self, folder: Path, tensorboard: bool, shown: RunSummary, warn: Callable[[str], None]
    ) -> None:
        """`shown`: the run summary that TensorBoard shows from the first row on."""
        self._folder, self._warn, self._errors = folder, warn, WriteErrors(warn)
        self._file = LogFile(folder / "metrics.jsonl", self._errors)
        self._board_folder = folder / "tb" if tensorboard else None
        # opened by the first row: importing TensorBoard would delay the first step
        self._board: TensorBoardWriter | None = None
        self._shown, self._images = shown, dict(shown.images)
        self._thread, self._pending = BackgroundThread("metrics"), deque[Future[None]]()
        self._progress_s = time.monotonic()  # when a job was last seen done
        self._hangs, self._computes, self._lost = False, False, 0
        self.later(lambda: self._file.append(b""))  # creates the file, to detect errors early

    def write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Queue a row and the texts of its step; the caller must not change them afterwards."""
        self.later(partial(self._write, row, texts))
        while self._images:  # after the first row, so that it does not wait for them
            self.later(partial(self._write_image, *self._images.popitem()))

    def later(self, job: Callable[[], None]) -> None:
        """Queue a job after all rows so far. Raises the exception of an earlier job, if there was one."""
        self._poll()
        if len(self._pending) < MAX_WAITING:
            self._pending.append(self._thread.submit(job))
        else:
            self._lost += 1

    def flush(self) -> None:
        """Wait until all rows are written, unless the disk hangs."""
        while self._pending and not self._hangs:
            with contextlib.suppress(TimeoutError):
                self._pending[0].exception(HANGS_S)
            self._poll()

    def close(self) -> None:
        """Write all remaining rows, including those that failed before, and report rows that are lost."""
        self.later(self._file.close)
        self.later(self._close_board)
        self.flush()
        self._thread.close(0.0 if self._hangs else HANGS_S)
        if missing := len(self._pending) + self._lost:
            self._warn(
                f"warning: {self._folder} lacks the last rows of metrics: {missing} writes did not finish"
            )

    def _poll(self) -> None:
        """Remove finished jobs, and warn if the disk hangs."""
        if not self._pending:
            self._progress_s = time.monotonic()
        while self._pending and self._pending[0].done():
            self._progress_s, self._hangs = time.monotonic(), False
            self._pending.popleft().result()
        limit_s = COMPUTES_S if self._computes else HANGS_S
        if not self._hangs and time.monotonic() - self._progress_s >= limit_s:
            self._hangs = True
            self._warn(
                f"warning: writing metrics to {self._folder} has hung for {limit_s:.0f} s; training "
                "continues, and rows are kept in memory"
            )

    def _write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._file.append(json.dumps(_finite(row)).encode() + b"\n")
        if self._board_folder is None:
            return
        with self._computing():
            from meshwright.train.metrics.tensorboard import TensorBoardWriter, scalars_of

            if self._board is None:
                self._board = TensorBoardWriter(self._board_folder, self._errors, self._shown, row["step"])
        self._board.add(row["step"], scalars_of(row), texts)

    def _write_image(self, name: str, make: Callable[[], bytes]) -> None:
        if self._board is None:
            return
        try:
            with self._computing():
                self._board.add_image(0, name, make())
        except Exception as error:
            # an error of drawing, such as a missing library, does not end the training
            self._warn(f"warning: the image {name} was not drawn: {type(error).__name__}: {one_line(error)}")

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Context in which the thread computes for long, which is not a disk that hangs."""
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()


class Rows(Hook):
    """The rows of a run on disk, which rank 0 writes; the other ranks have no `writer`. `on_progress`: called
    with a step after all its rows are written."""

    def __init__(self, writer: MetricsWriter | None, on_progress: Callable[[int], None]) -> None:
        self._writer, self._on_progress = writer, on_progress

    def on_report(self, row: Row) -> None:
        if self._writer:
            self._writer.write(row, {"loss_spikes": describe_spike(row)} if "loss_spike" in row else {})
        self.progress(row["step"])

    def progress(self, step: int) -> None:
        """Call `on_progress` with `step` after all rows so far are written."""
        self._writer.later(partial(self._on_progress, step)) if self._writer else self._on_progress(step)

    def flush(self) -> None:
        """Wait until all rows so far are written, unless the disk hangs."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def open_rows(run: Run, on_progress: Callable[[int], None]) -> Rows:
    """Return the rows of a run; TensorBoard shows the run summary from the first row on."""
    if not run.ranks.is_main:
        return Rows(None, on_progress)
    shown = describe_run(run.config, run.planned, run.data.corpus.description, run.steps)
    writer = MetricsWriter(run.folder, run.config.metrics.tensorboard, shown, run.console.print)
    return Rows(writer, on_progress)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
