"""metrics.jsonl and TensorBoard, written by a thread: no step waits for a disk."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import one_line
from meshwright.train.background import BackgroundThread
from meshwright.train.metrics.log_file import MAX_WAITING, LogFile, WriteErrors
from meshwright.train.metrics.tensorboard import RunSummary, TensorBoardWriter, scalars_of

HANGS_S = 5.0  # a disk that has not taken a row for so long is no longer waited for


class MetricsWriter:
    """Writes the rows of a run's metrics in the order in which they come. What cannot be written does not end
    the run: `warn` hears of it once, from any thread. No more than MAX_WAITING rows wait for a disk that
    hangs; those after them are lost."""

    def __init__(
        self, folder: Path, tensorboard: bool, shown: RunSummary, warn: Callable[[str], None]
    ) -> None:
        """`shown`: what TensorBoard shows of the run, from the first row on."""
        self._folder, self._warn, self._trouble = folder, warn, WriteErrors(warn)
        self._file = LogFile(folder / "metrics.jsonl", self._trouble)
        self._board_folder = folder / "tb" if tensorboard else None
        # opened by the first row: importing TensorBoard would delay the first step
        self._board: TensorBoardWriter | None = None
        self._shown, self._images = shown, dict(shown.images)
        self._thread, self._sent = BackgroundThread("metrics"), deque[Future[None]]()
        self._moved_s = time.monotonic()  # when something was last seen done
        self._hangs, self._lost = False, 0
        self.later(lambda: self._file.append(b""))  # so that one hears early if that cannot be

    def write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Have a row written, and texts of its step; neither may be changed any more."""
        self.later(partial(self._write, row, texts))
        while self._images:  # after the first row, which need not wait for them
            self.later(partial(self._write_image, *self._images.popitem()))

    def later(self, job: Callable[[], None]) -> None:
        """Have something done after all rows so far. Raises what a job before this one has raised."""
        self._look()
        if len(self._sent) < MAX_WAITING:
            self._sent.append(self._thread.submit(job))
        else:
            self._lost += 1

    def flush(self) -> None:
        """Wait until all is written; not for a disk that hangs."""
        while self._sent and not self._hangs:
            with contextlib.suppress(TimeoutError):
                self._sent[0].exception(HANGS_S)
            self._look()

    def close(self) -> None:
        """Write all that can be written, what failed before included."""
        self.later(self._file.close)
        self.later(self._close_board)
        self.flush()
        self._thread.close(0.0 if self._hangs else HANGS_S)
        if lacking := len(self._sent) + self._lost:
            self._warn(
                f"warning: {self._folder} lacks the last rows of metrics, {lacking} writes of which were not "
                "done"
            )

    def _look(self) -> None:
        """Forget what is done, and say when the disk hangs."""
        if not self._sent:
            self._moved_s = time.monotonic()
        while self._sent and self._sent[0].done():
            self._moved_s, self._hangs = time.monotonic(), False
            self._sent.popleft().result()
        if not self._hangs and time.monotonic() - self._moved_s >= HANGS_S:
            self._hangs = True
            self._warn(
                f"warning: {self._folder} has not taken a row of metrics for {HANGS_S:.0f} s: training goes "
                "on, and rows wait in memory"
            )

    def _write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._file.append(json.dumps(_finite(row)).encode() + b"\n")
        if self._board_folder is not None:
            step = row["step"]
            if self._board is None:
                self._board = TensorBoardWriter(self._board_folder, self._trouble, self._shown, step)
            self._board.add(step, scalars_of(row), texts)

    def _write_image(self, name: str, make: Callable[[], bytes]) -> None:
        if self._board is None:
            return
        try:
            png = make()
        except Exception as error:
            # Whatever drawing stumbles over, such as a library that is not there, ends no training.
            self._warn(f"warning: {name} is not drawn: {type(error).__name__}: {one_line(error)}")
        else:
            self._board.add_image(0, name, png)

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    """As JSON has it, which knows no NaN: null."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
