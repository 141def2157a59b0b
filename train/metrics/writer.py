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


class RowWriter(Hook):
    """Writes the rows of a run in order, on rank 0. A write error does not end the run: `warn` gets one
    message, from any thread. At most MAX_WAITING rows wait for a hanging disk; later rows are lost."""

    def __init__(
        self,
        folder: Path | None,
        tensorboard: bool,
        shown: RunSummary,
        warn: Callable[[str], None],
        on_progress: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`folder`: of the run; None on all ranks but 0. `shown`: the run summary that TensorBoard shows from
        the first row on. `on_progress`: called with a step after all its rows are written."""
        self._folder, self._warn, self._on_progress = folder, warn, on_progress
        self._errors = WriteErrors(warn)
        self._tensorboard, self._shown, self._images = tensorboard, shown, dict(shown.images)
        # opened by the first row: importing TensorBoard would delay the first step
        self._board: TensorBoardWriter | None = None
        self._pending, self._progress_s = deque[Future[None]](), time.monotonic()  # when a job was last done
        self._hangs, self._computes, self._lost = False, False, 0
        if folder:
            self._file = LogFile(folder / "metrics.jsonl", self._errors)
            self._thread = BackgroundThread("metrics")
            self.later(lambda: self._file.append(b""))  # creates the file, to detect errors early

    def on_report(self, row: Row) -> None:
        """Queue a row; the caller must not change it afterwards."""
        if not self._folder:
            self._on_progress(row["step"])
            return
        self.later(partial(self._write, row, self._folder))
        while self._images:  # after the first row, so that it does not wait for them
            self.later(partial(self._write_image, *self._images.popitem()))

    def progress(self, step: int) -> None:
        """Call `on_progress` with `step` after all rows so far are written."""
        self.later(partial(self._on_progress, step)) if self._folder else self._on_progress(step)

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
        if not self._folder:
            return
        self.later(self._file.close)
        self.later(lambda: self._board.close() if self._board else None)
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

    def _write(self, row: Row, folder: Path) -> None:
        self._file.append(json.dumps(_finite(row)).encode() + b"\n")
        if self._tensorboard:
            self._write_to_board(row, folder / "tb")
        self._on_progress(row["step"])

    def _write_to_board(self, row: Row, folder: Path) -> None:
        with self._computing():
            from meshwright.train.metrics.tensorboard import TensorBoardWriter, scalars_of

            if self._board is None:
                self._board = TensorBoardWriter(folder, self._errors, self._shown, row["step"])
        texts = {"loss_spikes": describe_spike(row)} if "loss_spike" in row else {}
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


def open_rows(run: Run, on_progress: Callable[[int], None]) -> RowWriter:
    """Return what writes the rows of a run; TensorBoard shows the run summary from the first row on."""
    folder, shown = None, RunSummary()
    if run.ranks.is_main:
        folder = run.folder
        shown = describe_run(run.config, run.planned, run.data.corpus.description, run.steps)
    return RowWriter(folder, run.config.metrics.tensorboard, shown, run.console.print, on_progress)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
