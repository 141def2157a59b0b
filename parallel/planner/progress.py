"""Seconds of planning by phase, and its progress. Phases: `tracing` (what the model's modules compute),
`bounds` (making, bounding and sorting plans), `memory` and `timeline` (predictions for one plan), `other`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Adds up wall seconds by phase, each without those of phases inside it. `done`: what was done so far,
    such as "1,204 plans bounded, 14 predicted"."""

    def __init__(self) -> None:
        self.start()

    def start(self, tell: Callable[[], None] | None = None) -> dict[str, float]:
        """Return new seconds, which are added to until the next start. `tell` is called with each phase."""
        self.current, self.done, self._since, self._tell = "other", "", perf_counter(), tell
        self._seconds = dict.fromkeys(("tracing", "bounds", "memory", "timeline", "other"), 0.0)
        return self._seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the code inside, or a decorated function, as this phase."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, name: str) -> str:
        """Begin a phase, and return the one that ends."""
        ended, now = self.current, perf_counter()
        self._seconds[ended] += now - self._since
        self.current, self._since = name, now
        if self._tell:
            self._tell()
        return ended


clock = Clock()  # of this process
