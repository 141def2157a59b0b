"""Stopping: on a signal or a time limit, all ranks after the same step."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from train.runtime import RunConfig


class Stop:
    """Whether to stop, agreed by all ranks at the same step, without waiting for the device.

    Any rank may ask (a signal, the time limit). At the end of each step every rank starts a tiny all-reduce over
    gloo, on the host, and reads the one it started a step before: so all stop after the same step, and the GPU's
    queue is never drained. A second signal ends the process at once; so does a stop that outlasts `grace_s` (as soon
    as Python runs again: a signal is not heard inside a collective that waits for a dead rank).
    """

    def __init__(self, config: RunConfig) -> None:
        self.reason: str | None = None
        self._deadline = time.monotonic() + config.max_hours * 3600 if config.max_hours else None
        self._grace_s = config.grace_s
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(f"signal {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def close(self) -> None:
        """Wait for the last of the small all-reduces: none may be under way when the process group ends."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop soon."""
        self.reason = self.reason or reason

    def agreed(self) -> bool:
        """Called by every rank once a step: True on all of them at the same step."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.ask("run.max_hours")
        if self._group is None:
            return self.reason is not None
        answer = False
        if self._pending is not None:
            work, asked = self._pending
            work.wait()
            answer = bool(asked.item())
        asked = torch.tensor([int(self.reason is not None)], dtype=torch.int32)
        work = dist.all_reduce(asked, group=self._group, async_op=True)
        self._pending = (work, asked)
        if answer:
            work.wait()
            self.ask("another rank was asked to")
        return answer
