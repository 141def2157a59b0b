"""A watchdog whose section a test makes older, so that no test waits for a timeout or depends on a fast
machine."""

import dataclasses
import threading
from typing import Any

from meshwright.train.fault_tolerance import watchdog
from meshwright.train.fault_tolerance.watchdog import Watchdog

LIMIT_S = 60.0


class AgedWatchdog(Watchdog):
    """Checks its section every 0.1 s, and waits longer for its own threads than on a quiet machine."""

    def __init__(self, *arguments: Any) -> None:
        watchdog.HEARTBEAT_S = 0.1
        watchdog.GATHER_S = watchdog.DIAGNOSIS_S = watchdog.ON_STUCK_S = watchdog.HARD_END_S = LIMIT_S
        self._checks = threading.Semaphore(0)
        super().__init__(*arguments)

    def age(self, seconds: float) -> None:
        """Make the current section older."""
        self._at = dataclasses.replace(self._at, since_s=self._at.since_s - seconds)

    def wait_for_check(self) -> None:
        """Wait until the section, as it is now, has been checked without a timeout."""
        while self._checks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first check may have begun before
            assert self._checks.acquire(timeout=LIMIT_S)

    def _beat(self) -> bool:
        self._checks.release()
        return super()._beat()
