"""The folder in which data is prepared, one process at a time, beside the one that it will become."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.train.data.config import DataError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems have none


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """The folder to work in, one process at a time; it goes when `folder` is there, or when nothing in it is
    worth keeping."""
    partial = folder.with_name(f".{folder.name}.partial")
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _lock(partial))
            for name in ("data", "results"):
                (partial / name).mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.cache_dir or OUT_DIR: cannot write to {folder.parent} ({error}): name another folder"
            ) from None
        try:
            yield partial
        finally:
            if is_there(folder) or not any((partial / "results").iterdir()):
                _remove(partial)


def _remove(partial: Path) -> None:
    """The lock goes last: from then on the name belongs to the next process, which may make the folder again
    at any moment."""
    for name in ("data", "results"):
        shutil.rmtree(partial / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        (partial / "lock").unlink()
        partial.rmdir()


def _lock(partial: Path) -> int:
    """Make the folder and wait until no other process works in it; an open file that holds the lock. Raises
    OSError."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # not mkdir(exist_ok=True), which fails if the folder goes meanwhile
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        try:
            lock = os.open(partial / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # whoever was here before has just removed the folder
            if partial.is_symlink():
                raise
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return lock  # two processes then write the same bytes, each file by one rename
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(partial / "lock")):
                return lock
        os.close(lock)


def is_there(folder: Path) -> bool:
    """Whether something has this name already; an empty folder is nothing, and is replaced."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
