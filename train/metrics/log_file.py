"""Append-only log files whose write errors never end the run."""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_WAITING = 10_000  # rows kept in memory for a file that cannot be written; a row has about 1 kB
_BLOCK_BYTES = 65536


class WriteErrors:
    """Tracks which files cannot be written. `warn` gets one message when the first write fails, and one when
    all files can be written again."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn, self._failing = warn, set[Path]()

    def failed(self, path: Path, error: OSError) -> None:
        """Record that a row could not be written; warn if it is the first."""
        if not self._failing:
            self.warn(
                f"warning: {path} cannot be written ({error.strerror or error}); training continues, and "
                "rows are kept in memory until it can be written"
            )
        self._failing.add(path)

    def written(self, path: Path, lost: int) -> None:
        """Record that rows were written, except for `lost` ones; report when all files can be written."""
        if path in self._failing:
            self._failing.remove(path)
            if not self._failing:
                rows = f"{lost} rows were lost" if lost else "no row was lost"
                self.warn(f"{path} can be written again; {rows}")


class LogFile:
    """A file to which each row of bytes is appended completely or not at all.

    The file is opened again for every row: rows are rare, and a file that was deleted or replaced is noticed.
    Nothing is raised: `errors` receives failures, and rows wait in memory until a later write succeeds.
    `head` is written at the start of an empty file. A partial row of a killed process (bytes after the last
    line feed) is cut off.
    """

    def __init__(self, path: Path, errors: WriteErrors, head: bytes = b"") -> None:
        self._path, self._errors, self._head = path, errors, head
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._end, self._lost = -1, 0

    def append(self, row: bytes) -> None:
        """Write the waiting rows and `row`. An empty row only creates the file, to detect errors early."""
        if row:
            self._lost += len(self._waiting) == MAX_WAITING
            self._waiting.append(row)
        try:
            self._end = append_whole(self._path, b"".join(self._waiting), self._end, self._head)
        except OSError as error:
            self._errors.failed(self._path, error)
        else:
            self._errors.written(self._path, self._lost)
            self._waiting.clear()
            self._lost = 0

    def close(self) -> None:
        """Try once more to write the waiting rows, and warn of those that could not be written."""
        if self._waiting:
            self.append(b"")
        if self._waiting:
            missing = f"its last {len(self._waiting) + self._lost} rows, which could not be written"
            self._errors.warn(f"warning: {self._path} lacks {missing}")


def append_whole(path: Path, data: bytes, end: int, head: bytes) -> int:
    """Append to a file and return its new size; a missing file and its folder are created. Raises OSError and
    leaves the file unchanged.

    `end`: size after this process's last write. A file of another size is first cut after its last full line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        if size != end and size != (end := _end_of_last_line(file, size)):
            os.ftruncate(file, end)
        data = data if end else head + data
        try:
            if os.pwrite(file, data, end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # if this fails, the next append notices the size
                os.ftruncate(file, end)
            raise
        return end + len(data)
    finally:
        os.close(file)


def _end_of_last_line(file: int, size: int) -> int:
    """Offset after the last line feed; 0 if there is none."""
    while size:
        start = max(0, size - _BLOCK_BYTES)
        if (offset := os.pread(file, size - start, start).rfind(b"\n")) >= 0:
            return start + offset + 1
        size = start
    return 0
