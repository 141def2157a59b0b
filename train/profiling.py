"""A window of steps through torch's profiler, as a Chrome trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.one_line import one_line
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


ERROR_SHOWN = 300  # characters of what the profiler or the disk said


class StepProfiler:
    """Profiles rank 0 from `start` on; with start 0 it does nothing and costs nothing.

    An error of the profiler, or a folder that cannot be written, ends the profile and not the run: `warn` hears one line.
    """

    def __init__(self, config: ProfileConfig, folder: Path, enabled: bool, warn: Callable[[str], None]) -> None:
        self._config, self._folder = config, folder
        self._last = config.start + config.steps - 1
        self._enabled, self._warn = enabled and config.start > 0, warn
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Called before every optimizer step, counted from 1."""
        if self._enabled and step == self._config.start:
            try:
                profile = torch.profiler.profile()
                profile.start()
                self._profile = profile
            except (OSError, RuntimeError) as error:
                self._give_up(error)

    def after_step(self, step: int) -> Path | None:
        """Called after every step; returns the trace's path when it has just been written, else None."""
        if self._profile is None or step < self._last:
            return None
        return self.close()

    def close(self) -> Path | None:
        """End a window that is still open, writing what it has; None where nothing could be written."""
        profile, self._profile = self._profile, None  # first: whatever goes wrong, it is over
        if profile is None:
            return None
        path = self._folder / f"trace-step-{self._config.start:08d}.json.gz"
        try:
            profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._give_up(error)
            return None
        return path

    def _give_up(self, error: Exception) -> None:
        said = one_line(f"{type(error).__name__}: {error}", ERROR_SHOWN)
        self._warn(f"warning: no profile from step {self._config.start} in {self._folder}, the run goes on ({said})")
