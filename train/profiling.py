"""A window of steps through torch's profiler, as a Chrome trace."""

from dataclasses import dataclass
from pathlib import Path

import torch

from train.bounds import bounded


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to profile.

    Args:
        start: first optimizer step of the profiled window; 0 is never
        steps: length of the window, in optimizer steps
    """

    start: int = bounded(0, low=0)
    steps: int = bounded(3, low=1)


class StepProfiler:
    """Profiles rank 0 from `start` on; with start 0 it does nothing and costs nothing."""

    def __init__(self, config: ProfileConfig, folder: Path, enabled: bool) -> None:
        self._config, self._folder = config, folder
        self._last = config.start + config.steps - 1
        self._enabled = enabled and config.start > 0
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Called before every optimizer step, counted from 1."""
        if self._enabled and step == self._config.start:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def after_step(self, step: int) -> Path | None:
        """Called after every step; returns the trace's path when it has just been written."""
        if self._profile is None or step < self._last:
            return None
        return self.close()

    def close(self) -> Path | None:
        """End a window that is still open, writing what it has."""
        if self._profile is None:
            return None
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"trace-step-{self._config.start:08d}.json.gz"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return path
