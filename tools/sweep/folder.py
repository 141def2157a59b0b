"""A sweep's folder: made, taken by one sweep at a time, and kept for one spec."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.tools.plan.files import write_whole
from meshwright.train.errors import ConfigError
from meshwright.train.fault_tolerance.run_lock import lock_folder
from meshwright.train.files import read_json

NOTE = "sweep.json"
LIMIT_BYTES = 4096


@contextmanager
def own_folder(folder: Path, name: str) -> Iterator[None]:
    """The folder of the spec of this name, made, noted and taken. Raises LockError and ConfigError."""
    make_folder(folder)
    lock = lock_folder(folder)
    try:
        refuse_other_owner(folder, name)
        note_owner(folder, name)
        yield
    finally:
        lock.release()


def make_folder(folder: Path) -> None:
    """And those above it. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}): take another --folder") from None


def note_owner(folder: Path, name: str) -> None:
    """Write down the spec's name. Raises ConfigError."""
    write_whole(folder / NOTE, (json.dumps({"spec": name}) + "\n").encode())


def refuse_other_owner(folder: Path, name: str) -> None:
    """ConfigError where the folder belongs to the spec of another name; nothing where no spec has been
    noted."""
    try:
        owner = read_json(folder / NOTE, LIMIT_BYTES).get("spec", name)
    except (OSError, ValueError):
        return
    if owner != name:
        raise ConfigError(
            f"{folder} has the runs of the sweep {one_line(owner, 80)}, not of {name}: take another --folder"
        )
