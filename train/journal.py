"""status.json of the run at hand: what rank 0 writes into it, from any thread, at any moment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.train.checkpoint.config import CheckpointError
from meshwright.train.checkpoint.folder import list_checkpoints
from meshwright.train.console import Screen
from meshwright.train.out_of_memory import OutOfMemory
from meshwright.train.place import Place
from meshwright.train.restarts import CrashLoopError
from meshwright.train.status import FailedStarts, State, read_status, write_status
from meshwright.train.stop import as_lost_peer


class Journal:
    """Knows how far the run is. It says nothing before `opened`: until then the folder may be another
    run's."""

    def __init__(self, place: Place, screen: Screen, named: bool) -> None:
        """`named`: the same command would not go on from the newest checkpoint, because checkpoint.resume
        says another."""
        self._is_main, self._screen, self._named = place.is_main, screen, named
        self._folder: Path | None = None
        self._resumed_from: int | None = None
        self._failed = FailedStarts()
        self._step, self._warned, self._ended = 0, False, False
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """The folder is this run's: an error that ends it is noted there, but for the refusal of a run that
        fails again and again, whose last reason stays."""
        self._folder = folder
        try:
            yield
        except CrashLoopError:
            raise
        except BaseException as error:
            lost = as_lost_peer(error)
            if not (lost and self._explained_elsewhere()):
                words = str(lost) if lost else f"{type(error).__name__}: {error}"
                self.say("failed", words, for_all=isinstance(error, OutOfMemory))
            raise

    def begin(self, resumed_from: int | None, failed: FailedStarts) -> None:
        """The run goes on after the step `resumed_from`, or begins; `failed`: starts before this one."""
        self._resumed_from, self._failed = resumed_from, failed
        self.reached(resumed_from or 0)

    def reached(self, step: int) -> None:
        """So many steps are done."""
        self._step = step
        self.say("running")

    def ended(self, state: State, step: int, reason: str = "") -> None:
        """The run has ended by itself, after so many steps."""
        self._step = step
        self.say(state, reason)

    def say(self, state: State, reason: str = "", for_all: bool = False) -> None:
        """Write the state, from any thread; the first one that is not running stays. A folder that cannot be
        written is one warning. `for_all`: this rank speaks for all, because rank 0 may not be able to."""
        with self._lock:
            if not (self._is_main or for_all) or self._folder is None or self._ended:
                return
            self._ended = state != "running"
            problem = write_status(
                self._folder,
                state,
                self._step,
                self._resumed_from,
                self._has_saved(),
                reason,
                self._failed,
                self._named,
            )
            if problem and not self._warned:
                self._warned = True
                self._screen.line(f"warning: {problem}")

    def _explained_elsewhere(self) -> bool:
        """Whether the process that is gone has said why."""
        assert self._folder is not None
        status = read_status(self._folder)
        return status is not None and status.state == "failed"

    def _has_saved(self) -> bool:
        assert self._folder is not None
        try:
            return bool(list_checkpoints(self._folder / "checkpoints"))
        except CheckpointError:  # the folder cannot be listed now; the loop hears of it when it saves
            return False
