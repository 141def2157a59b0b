"""The seconds of planning by phase, and its progress, on the process's one clock, which `start` sets to zero.

Phases: `tracing` (what the model's modules compute), `bounds` (making, bounding and sorting plans), `memory`
and `timeline` (predictions for one plan), `other`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

PHASES = ("tracing", "bounds", "memory", "timeline", "other")


@dataclass
class Clock:
    """Wall seconds by phase, each without those of phases inside it; the phase, when it began, and what was
    done so far, such as "1,204 plans bounded, 14 predicted". `tell` is called at every change."""

    tell: Callable[["Clock"], None] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    since: float = field(default_factory=perf_counter)
    phase: str = "other"
    text: str = "making plans"

    def enter(self, phase: str) -> str:
        """Enter a phase, and return the one that ends."""
        left, now = self.phase, perf_counter()
        self.seconds[left] += now - self.since
        self.phase, self.since = phase, now
        if self.tell:
            self.tell(self)
        return left


_clock = Clock()


def start(tell: Callable[[Clock], None] | None = None) -> Clock:
    """Set the clock to zero, and return it."""
    global _clock
    _clock = Clock(tell)
    return _clock


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Count the code inside, or a decorated function, as one of PHASES."""
    clock, outer = _clock, _clock.enter(phase)
    try:
        yield
    finally:
        clock.enter(outer)


def note(text: str) -> None:
    """Say what was done, for the progress."""
    _clock.text = text
    _clock.enter(_clock.phase)
