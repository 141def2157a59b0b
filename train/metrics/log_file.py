"""Files that a run reports to, written so that no disk and no folder can end the run."""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_WAITING = 10_000  # rows kept for a file that cannot be written; a row has about a kilobyte
_BLOCK_BYTES = 65536


class WriteErrors:
    """Which files cannot be written. `warn` hears of it once, when the first cannot, and again when all
    can."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._failing = warn, set[Path]()

    def failed(self, path: Path, error: OSError) -> None:
        """A row could not be written."""
        if not self._failing:
            self._warn(
                f"warning: {path} cannot be written ({error.strerror or error}): training goes on, and rows "
                "wait in memory until it can be"
            )
        self._failing.add(path)

    def works(self, path: Path, lost: int) -> None:
        """Rows were written, all but `lost` ones."""
        if path in self._failing:
            self._failing.remove(path)
            if not self._failing:
                self._warn(
                    f"{path} can be written again; " + (f"{lost} rows are lost" if lost else "no row is lost")
                )

    def gave_up(self, path: Path, lost: int) -> None:
        """The run has ended before the file could be written."""
        self._warn(f"warning: {path} lacks its last {lost} rows, which could not be written")


class LogFile:
    """A file to which each row, some bytes, is appended whole or not at all.

    Opened anew for every row: rows are rare, and a file that was removed or replaced meanwhile is noticed.
    Nothing is raised: `trouble` hears of what fails, and rows wait until a later one can be written. `head`
    begins a file that is empty. What a killed process has left of a row (bytes after the last line feed) is
    cut off.
    """

    def __init__(self, path: Path, trouble: WriteErrors, head: bytes = b"") -> None:
        self._path, self._trouble, self._head = path, trouble, head
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._end, self._lost = -1, 0

    def append(self, row: bytes) -> None:
        """Write what waits and a row; an empty one makes the file, so that one hears early if that cannot
        be."""
        if row:
            self._lost += len(self._waiting) == MAX_WAITING
            self._waiting.append(row)
        try:
            self._end = append_whole(self._path, b"".join(self._waiting), self._end, self._head)
        except OSError as error:
            self._trouble.failed(self._path, error)
            return
        self._waiting.clear()
        self._trouble.works(self._path, self._lost)
        self._lost = 0

    def close(self) -> None:
        """Try once more to write what waits."""
        if self._waiting:
            self.append(b"")
        if self._waiting:
            self._trouble.gave_up(self._path, len(self._waiting) + self._lost)


def append_whole(path: Path, data: bytes, end: int, head: bytes) -> int:
    """Append to a file, made with its folder where there is none; returns its size. Raises OSError with the
    file as before.

    `end`: how large we have left it. Of a file of another size only whole lines are kept.
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
            with contextlib.suppress(OSError):  # the next row is told by the size
                os.ftruncate(file, end)
            raise
        return end + len(data)
    finally:
        os.close(file)


def _end_of_last_line(file: int, size: int) -> int:
    """Where the last line ends that has its line feed; 0 if none has."""
    while size:
        start = max(0, size - _BLOCK_BYTES)
        if (place := os.pread(file, size - start, start).rfind(b"\n")) >= 0:
            return start + place + 1
        size = start
    return 0
