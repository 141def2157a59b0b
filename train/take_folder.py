"""A run's folder is taken by one run at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.train.console import Screen
from meshwright.train.lock import Lock, lock_folder
from meshwright.train.place import Place
from meshwright.train.together import from_main

ENDING_S = 120.0  # after a restart: for the run before to end; NFS 4 keeps a dead machine's lock for 90 s


@contextmanager
def take_folder(folder: Path, place: Place, screen: Screen) -> Iterator[None]:
    """Rank 0 holds the folder's lock; every rank calls it. Raises LockError, on all alike, if another run has
    it."""
    held: list[Lock] = []

    def take() -> list[str]:
        held.append(lock_folder(folder, ENDING_S if place.restarts else 0.0))
        return [words for words in (held[0].stale, held[0].unprotected) if words]

    for words in from_main(place, take):
        screen.line(f"warning: {words}")
    try:
        yield
    finally:
        for lock in held:
            lock.release()
