"""status.json of the run at hand: what rank 0 writes into it, from any thread, at any moment."""

from pathlib import Path

from train.checkpoint.config import CheckpointError
from train.checkpoint.folder import list_checkpoints
from train.console import Screen
from train.runtime import Place
from train.status import FailedStarts, State, write_status


class Journal:
    """Knows how far the run is. It says nothing before `open`: until then the folder may be another run's."""

    def __init__(self, place: Place, screen: Screen) -> None:
        self._is_main, self._screen = place.is_main, screen
        self._folder: Path | None = None
        self._resumed_from: int | None = None
        self._failed = FailedStarts()
        self._step, self._warned, self._ended = 0, False, False

    def open(self, folder: Path, resumed_from: int | None, failed: FailedStarts) -> None:
        """The folder is this run's. It goes on after the step `resumed_from`, or begins; `failed`: starts before this one."""
        self._folder, self._resumed_from, self._failed = folder, resumed_from, failed
        self._step = resumed_from or 0
        self.say("running")

    def reached(self, step: int) -> None:
        """So many steps are done."""
        self._step = step
        self.say("running")

    def say(self, state: State, reason: str = "", for_all: bool = False) -> None:
        """Write the state; the first one that is not running stays. A folder that cannot be written is one warning. `for_all`:
        this rank speaks for all, because rank 0 may not be able to."""
        if not (self._is_main or for_all) or self._folder is None or self._ended:
            return
        self._ended = state != "running"
        problem = write_status(self._folder, state, self._step, self._resumed_from, self._has_saved(), reason, self._failed)
        if problem and not self._warned:
            self._warned = True
            self._screen.line(f"warning: {problem}")

    def _has_saved(self) -> bool:
        assert self._folder is not None
        try:
            return bool(list_checkpoints(self._folder / "checkpoints"))
        except CheckpointError:  # the folder cannot be listed now; the loop hears of it when it saves
            return False
