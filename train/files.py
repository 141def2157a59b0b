"""File helpers: JSON of bounded size, atomic writes by rename, fsync of folders, user paths, locks, and the
limit of open files. Does not import torch."""

import contextlib
import errno
import json
import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.train.errors import DataError

if TYPE_CHECKING:
    from filelock import FileLock

T = TypeVar("T")
_SHOWN = 80  # characters of a name that a message quotes


def user_path(name: str, key: str, error: type[ValueError] = DataError) -> Path:
    """Return the path of a user's `name`, with ~ and ~user expanded; it need not exist.

    Raises `error`, whose message names `key`, if `name` is empty, there is no such user, or the system cannot
    look up the path (too long, no permission for a folder).
    """
    if not name:
        raise error(f"{key} is empty: name a path")
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as problem:
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}... ({len(name):,} letters)"
        reason = getattr(problem, "strerror", None) or str(problem).rstrip(".")
        raise error(f"{key}={shown!r} is no usable path ({reason}): name another") from None
    return path


def flush_folder(folder: Path) -> None:
    """Fsync a folder, so that the names in it survive a power failure. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError if it cannot be read; ValueError if it is not a regular
    file, which may never end, or is larger than `limit_bytes`."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"larger than the limit of {limit_bytes:,} bytes")
    return content


def read_json(path: Path, limit_bytes: int) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises ValueError if it is not a regular file, is larger than
    `limit_bytes`, is not JSON in UTF-8 or contains no mapping; OSError if it cannot be read."""
    return parse_mapping(read_bounded(path, limit_bytes).decode("utf-8"))


def read_note(kind: type[T], path: Path, limit_bytes: int) -> T | None:
    """Return the dataclass in a JSON file; None if the file is missing or invalid."""
    import msgspec

    try:
        return msgspec.convert(read_json(path, limit_bytes), kind)
    except (OSError, ValueError):
        return None


def parse_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a JSON text. Raises ValueError if it is not a mapping or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a mapping of names to values")
    return value


@contextmanager
def replacing(path: Path, ending: str = ".tmp") -> Iterator[Path]:
    """Yield a temporary file next to `path`, which replaces `path` by an atomic rename at the end; after an
    error it is deleted. `ending`: end of its name, from which some writers choose the format."""
    # a random name: processes of several nodes and threads of one may write at the same time
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{ending}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: fsync, then rename. Raises OSError."""
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# errors of flock(2) on a network file system without locks; ENOSYS is Lustre without its flock option
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def make_lock(path: Path) -> "FileLock":
    """Return a lock between processes (flock(2)), not yet acquired; the kernel frees it if its process dies.

    Forked processes do not keep it. On a file system without locks, acquiring it raises OSError with one of
    NO_LOCKS. The fallback of filelock, a file whose existence is the lock, is off, because it would outlive a
    killed process.
    """
    from filelock import FileLock

    return FileLock(path, thread_local=False, poll_interval=0.2, fallback_to_soft=False)


# enough for a socket to each of thousands of peers and all shards; small enough for programs that loop over
# all file descriptors
MAX_OPEN_FILES = 65_536


def open_files_limit() -> int:
    """The current limit of open files (ulimit -n), at most `MAX_OPEN_FILES`."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_OPEN_FILES)


def allow_open_files() -> None:
    """Raise the limit of open files to the hard limit, at most `MAX_OPEN_FILES`. The usual soft limit of
    1,024 exists for programs that use select(2)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if open_files_limit() < wanted:
        # macOS allows less than its reported hard limit; then the old limit remains
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
