"""Files: JSON of bounded size, whole writes by one rename, folders that survive a power cut, paths that a
user names, and how many files may be open. No torch."""

import contextlib
import errno
import json
import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.train.errors import DataError

if TYPE_CHECKING:
    from filelock import FileLock

_SHOWN = 80  # letters of a name that a message repeats


def user_path(name: str, key: str, error: type[ValueError] = DataError) -> Path:
    """The path that a name means, ~ and ~user expanded; nothing need be there.

    Raises `error`, which says that it is `key`, where no path is meant (no such user) or the system refuses
    to look it up (too long, a folder that may not be entered).
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
        said = getattr(problem, "strerror", None) or str(problem).rstrip(".")
        raise error(f"{key}={shown!r} is no usable path ({said}): name another") from None
    return path


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """A file's content. OSError if it cannot be read; ValueError for what is no regular file, which may never
    end, and for one of more than `limit_bytes`."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    with open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"larger than the {limit_bytes:,} bytes that are read")
    return content


def read_json(path: Path, limit_bytes: int) -> dict[str, Any]:
    """The mapping that a JSON file holds. ValueError if it is no regular file, is larger than `limit_bytes`,
    is not JSON in UTF-8 or holds no mapping; OSError if it cannot be read."""
    return parse_mapping(read_bounded(path, limit_bytes).decode("utf-8"))


def parse_mapping(text: str) -> dict[str, Any]:
    """The mapping that a JSON text holds. ValueError if it holds something else, or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no mapping of names to values")
    return value


@contextmanager
def replacing(path: Path, ending: str = ".tmp") -> Iterator[Path]:
    """A file beside `path` to write, which then takes its place by one rename: nobody sees half of it. After
    an error nothing is left of it. `ending`: of its name, by which some writers choose the format."""
    # processes of several nodes may write at once, and threads of one: none may share it
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{ending}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears by one rename once the disk has it. Raises OSError."""
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# what flock(2) answers on a network file system without locks; Lustre without its flock option ENOSYS
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def make_lock(path: Path) -> "FileLock":
    """A lock between processes (flock(2)), not taken yet, which the kernel lets go of when its process dies.

    Forked processes do not keep it. Where there are no locks, taking it raises OSError with one of NO_LOCKS:
    filelock's own way then, a file whose being there is the lock, would outlive a killed process on network
    file systems.
    """
    from filelock import FileLock

    return FileLock(path, thread_local=False, poll_interval=0.2, fallback_to_soft=False)


# a socket to every peer of thousands, and all shards; programs that walk through all numbers stay quick
ENOUGH = 65_536


def open_files_limit() -> int:
    """How many it may have open now (ulimit -n), `ENOUGH` at most."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else min(soft, ENOUGH)


def allow_open_files() -> None:
    """Raise the limit as far as the system lets a user: a shell's own, of 1,024, is meant for programs that
    use select(2)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if open_files_limit() < wanted:
        # macOS allows less than its hard limit says; then the old one holds
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
