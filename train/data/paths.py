"""Paths that a user names."""

import os
from pathlib import Path

from meshwright.train.data.config import DataError

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
