"""A watchdog whose section a test makes older, so that no test waits for a timeout or depends on a fast
machine."""

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

from meshwright.train.fault_tolerance import watchdog
from meshwright.train.fault_tolerance.watchdog import Watchdog

LIMIT_S = 60.0


class AgedWatchdog(Watchdog):
    """Checks its section every 0.1 s, and waits longer for its own threads than on a quiet machine."""

    def __init__(self, *arguments: Any) -> None:
        watchdog.HEARTBEAT_S = 0.1
        watchdog.GATHER_S = watchdog.DIAGNOSIS_S = watchdog.ANNOUNCED_S = watchdog.ON_STUCK_S = (
            watchdog.HARD_END_S
        ) = LIMIT_S
        self._checks = threading.Semaphore(0)
        super().__init__(*arguments)

    def age(self, seconds: float) -> None:
        """Make the current section older."""
        self._at = dataclasses.replace(self._at, since_s=self._at.since_s - seconds)

    def suspend(self, seconds: float) -> None:
        """Let this time pass in the watchdog's next pause, as if the process had been stopped in it."""
        now_s = time.monotonic
        watchdog.time = SimpleNamespace(monotonic=now_s, sleep=time.sleep)  # type: ignore[assignment]

        def wait(timeout: float) -> bool:
            self._closing.wait = closing.wait  # type: ignore[method-assign]
            watchdog.time.monotonic = lambda: now_s() + seconds
            return closing.wait(timeout)

        closing, self._closing = self._closing, threading.Event()
        self._closing.wait = wait  # type: ignore[method-assign,assignment]
        self._closing.set = closing.set  # type: ignore[method-assign]

    def wait_for_check(self) -> None:
        """Wait until the section, as it is now, has been checked without a timeout."""
        while self._checks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first check may have begun before
            assert self._checks.acquire(timeout=LIMIT_S)

    def _beat(self) -> bool:
        self._checks.release()
        return super()._beat()
