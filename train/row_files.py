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

from train.log_files import MAX_WAITING, Board, LogFile, Trouble
from train.store_link import Errands

HANGS_S = 5.0  # a disk that has not taken a row for so long is no longer waited for


class RowFiles:
    """Writes the rows of a run's metrics in the order in which they come. What cannot be written does not end the run: `warn`
    hears of it once, from any thread. No more than MAX_WAITING rows wait for a disk that hangs; those after them are lost."""

    def __init__(self, folder: Path, tensorboard: bool, warn: Callable[[str], None]) -> None:
        self._folder, self._warn, self._trouble = folder, warn, Trouble(warn)
        self._file = LogFile(folder / "metrics.jsonl", self._trouble)
        self._board_folder = folder / "tb" if tensorboard else None
        self._board: Board | None = None  # opened by the first row: importing TensorBoard would delay the first step
        self._texts: dict[str, str] = {}
        self._thread, self._sent = Errands("metrics"), deque[Future[None]]()
        self._moved_s = time.monotonic()  # when something was last seen done
        self._hangs, self._lost = False, 0
        self.later(lambda: self._file.append(b""))  # so that one hears early if that cannot be

    def add_text(self, name: str, text: str) -> None:
        """Show a text in TensorBoard, from the first row on."""
        self._texts[name] = text

    def write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Have a row written, and texts of its step; neither may be changed any more."""
        self.later(partial(self._write, row, texts))

    def later(self, job: Callable[[], None]) -> None:
        """Have something done after all rows so far. Raises what a job before this one has raised."""
        self._look()
        if len(self._sent) < MAX_WAITING:
            self._sent.append(self._thread.send(job))
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
        self.later(lambda: self._board.close() if self._board is not None else None)
        self.flush()
        self._thread.close(0.0 if self._hangs else HANGS_S)
        if lacking := len(self._sent) + self._lost:
            self._warn(f"warning: {self._folder} lacks the last rows of metrics, {lacking} writes of which were not done")

    def _look(self) -> None:
        """Forget what is done, and say when the disk hangs."""
        if not self._sent:
            self._moved_s = time.monotonic()
        while self._sent and self._sent[0].done():
            self._moved_s, self._hangs = time.monotonic(), False
            self._sent.popleft().result()
        if not self._hangs and time.monotonic() - self._moved_s >= HANGS_S:
            self._hangs = True
            self._warn(f"warning: {self._folder} has not taken a row of metrics for {HANGS_S:.0f} s: training goes on, and rows "
                       "wait in memory")  # fmt: skip

    def _write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.append(json.dumps(finite).encode() + b"\n")  # JSON has no NaN: null
        if self._board_folder is not None:
            self._board = self._board or Board(self._board_folder, self._trouble, self._texts, row["step"])
            scalars = {name: value for name, value in row.items() if name != "step" and not isinstance(value, str)}
            self._board.add(row["step"], scalars, texts)
