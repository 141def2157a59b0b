"""The clock of the steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Measures the time of steps: evaluations, reports and saves are not step time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._busy_s, self._since = device, 0.0, 0.0

    def start(self) -> None:
        """Start the clock: time before this call is not step time."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context that begins when the device is idle, and whose time is not step time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._busy_s += time.perf_counter() - self._since
        yield
        self.start()

    def take_s(self) -> float:
        """Return the seconds of step time since the last call; the clock is paused."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s
