"""Stopping: on a signal or a time limit, all ranks after the same step; and never later than the grace
period."""

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from meshwright.train.config import RunConfig
from meshwright.train.distributed.exit import end_at_once
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.errors import PeerLostError

# Slurm sends what its --signal says, torchrun passes on SIGHUP where its terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_S = 0.5  # a signal that soon after the first is the same request, delivered twice
LAST_WORDS_S = 5.0  # for on_end and the way out; after that the kernel ends the process
CLOSE_S = 5.0  # how long close() waits for peers that may be gone
_GONE = r"[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited"  # gloo's words, and NCCL's
INTACT = "what was committed is intact"


@dataclass(frozen=True)
class ShutdownRequest:
    """Why a rank wants the run to end. failed: because of an error, so that nothing more is saved."""

    reason: str
    failed: bool = False


class GracefulShutdown:
    """Whether to stop, agreed by all ranks at the same step, without waiting for the device.

    Any rank may ask (a signal, the time limit, an error). At the end of each step every rank starts a tiny
    all-reduce over gloo, on the host, and reads the one it started a step before: so all stop after the same
    step, and the GPU's queue is never drained.

    Signals are heard by a thread, wherever the main thread is: in a collective that waits for a dead rank, or
    in the compiler. The first asks; a second ends the process at once; so does a stop that outlasts
    `grace_s`, on every rank. Both leave the last commit as it is, and the exit code is 128 + the signal's
    number. Before `begin()` there is nothing to save, and the first signal ends the process at once.

    A second signal counts from REPEAT_S after the first. Sooner it is the same request, delivered twice:
    `timeout` sends to its command and then to their common process group, and whoever signals torchrun and
    its workers alike reaches these once more through torchrun. (From a terminal only torchrun hears Ctrl-C,
    for its workers have sessions of their own: it passes SIGINT on, and after a second Ctrl-C sends SIGTERM.)
    To take a repetition for a second signal would cost the work since the last commit; to take a hasty second
    signal for a repetition costs a third one.
    """

    def __init__(self, config: RunConfig, on_end: Callable[[str], None]) -> None:
        """Begin to listen. `on_end(reason)` is called just before the process is ended without saving.

        In the main thread only, which is where Python lets signal handlers be set.
        """
        self._config, self._on_end = config, on_end
        self._deadline_s = time.monotonic() + config.max_hours * 3600 if config.max_hours else None
        self._wish: ShutdownRequest | None = None
        self._wish_lock = threading.Lock()
        self._began = self._agreed = False
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._heard_s: float | None = None  # when this process heard its first signal
        self._grace: tuple[float, int] | None = None  # until when the stop may take, and the signal's number
        self._listen()

    @property
    def reason(self) -> str | None:
        """Why to stop: this rank's own wish, and once agreed the same on all ranks. None: no wish."""
        return self._wish.reason if self._wish else None

    @property
    def failed(self) -> bool:
        """Whether the run ends because of an error: nothing more is to be saved. False until agreed: the same
        on all ranks."""
        return self._agreed and self._wish is not None and self._wish.failed

    def connect(self) -> None:
        """Make the group that agrees. After the process group, by all ranks alike."""
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=group_timeout(self._config))

    def begin(self) -> None:
        """The loop starts: from now on there is something to save, and a first signal asks for an agreed
        stop."""
        self._began = True

    def request(self, reason: str, failed: bool = False) -> None:
        """Ask all ranks to stop soon; from any thread. The first reason counts, but an error before a wish.

        Without effect once a stop is agreed.
        """
        with self._wish_lock:
            if not self._agreed and (self._wish is None or (failed and not self._wish.failed)):
                self._wish = ShutdownRequest(reason, failed)

    def should_stop(self) -> bool:
        """Called by every rank once a step: True on all of them at the same step. Raises PeerLostError."""
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self.request("run.max_hours")
        if self._group is None:
            self._agreed = self._wish is not None
        elif not self._agreed:
            try:
                self._agreed = self._anyone_asked(self._group)
                if self._agreed:
                    self._share_wishes(self._group)
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    raise
                raise PeerLostError(_explain(error)) from error
        return self._agreed

    def _anyone_asked(self, group: dist.ProcessGroup) -> bool:
        """Read the last step's all-reduce; if nobody had asked by then, start this step's."""
        if self._pending is not None:
            work, asked = self._pending
            self._pending = None
            work.wait()
            if asked.item():
                return True
        asked = torch.tensor([int(self._wish is not None)], dtype=torch.int32)
        self._pending = dist.all_reduce(asked, group=group, async_op=True), asked
        return False

    def _share_wishes(self, group: dist.ProcessGroup) -> None:
        """Take the same wish on all ranks; the grace period of a signal to one of them is that of all."""
        mine = (self._wish, self._grace[1] if self._grace else None)
        everyone: list[tuple[ShutdownRequest | None, int | None]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=group)
        with self._wish_lock:
            self._wish = merge_requests([wish for wish, _ in everyone])
        numbers = [number for _, number in everyone if number is not None]
        if numbers and self._grace is None:
            self._start_grace(numbers[0])
            self._write_end.send(b"\0")  # wakes the thread, which has to look at the clock from now on

    def close(self) -> None:
        """Listen no longer, and wait for the last all-reduce: none may be under way when the process group
        ends.

        Where a peer is dead its end is an error, which comes at once; where one is stuck, no more than
        CLOSE_S are lost.
        """
        signal.set_wakeup_fd(self._earlier_fd)
        for number, handler in self._earlier_handlers.items():
            if handler is not None:  # None: C code had set it, and Python cannot set it again
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._write_end.close()  # ends the thread
        self._thread.join()
        self._read_end.close()
        if self._pending is not None:
            with contextlib.suppress(RuntimeError):
                self._pending[0].wait(timedelta(seconds=CLOSE_S))
            self._pending = None

    def _listen(self) -> None:
        """Let the C part of Python's signal handling write each number into a socket, and a thread read it
        there.

        Python's own handlers run in the main thread only, and not while that is inside C++.
        """
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        # what nohup has set to be ignored stays so
        wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._earlier_handlers = {number: signal.signal(number, _nothing) for number in wanted}
        self._thread = threading.Thread(target=self._hear, name="signals", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        """The thread: hears signals, and ends the process when the grace period is over."""
        while True:
            left_s = max(0.001, self._grace[0] - time.monotonic()) if self._grace else None
            self._read_end.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                numbers = self._read_end.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._earlier_handlers:  # and no other signal for which Python has a handler
                        self._on_signal(number)
            if self._grace and time.monotonic() >= self._grace[0]:
                grace = f"run.grace_s={self._config.grace_s:g} s were not enough to stop"
                self._end(self._grace[1], f"{self.reason}: ended without saving, because {grace}")

    def _on_signal(self, number: int) -> None:
        name = f"signal {signal.Signals(number).name}"
        if not self._began:
            self._end(number, f"{name} before the first step: there was nothing to save")
        elif self._heard_s is None:
            self._heard_s = time.monotonic()
            self.request(name)
            if self._grace is None:
                self._start_grace(number)
        elif time.monotonic() - self._heard_s >= REPEAT_S:
            self._end(number, f"{self.reason}, then {name}: ended at once, without saving")

    def _start_grace(self, number: int) -> None:
        """From now on the stop is timed: by the thread, and by the kernel should the thread not get to
        run."""
        self._grace = time.monotonic() + self._config.grace_s, number
        # SIGALRM ends a process by default
        signal.setitimer(signal.ITIMER_REAL, self._config.grace_s + LAST_WORDS_S)

    def _end(self, number: int, reason: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_S)  # on_end writes to a disk, which may hang
        with contextlib.suppress(Exception):
            self._on_end(reason)
        end_at_once(128 + number, f"{reason}; {INTACT}")


def merge_requests(wishes: Sequence[ShutdownRequest | None]) -> ShutdownRequest | None:
    """Of the wishes of all ranks the one that counts, the same on each: the first error, or else the first
    wish."""
    errors = [
        ShutdownRequest(f"rank {rank}: {wish.reason}", True)
        for rank, wish in enumerate(wishes)
        if wish and wish.failed
    ]
    return next(iter([*errors, *filter(None, wishes)]), None)


def as_lost_peer(error: BaseException) -> PeerLostError | None:
    """The same error in our words, if it is what a collective ends with when another process is gone."""
    text = str(error)
    gone = isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text) and re.search(_GONE, text)
    return PeerLostError(_explain(error)) if gone and isinstance(error, RuntimeError) else None


def _explain(error: RuntimeError) -> str:
    """What gloo says of a peer that is gone, in our words."""
    said = str(error).strip().splitlines()[-1]
    return (
        f"a process of this run has died, so the others end too, without saving; {INTACT}, and the same "
        f"command goes on from there ({said})"
    )


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python's half of a signal handler; the number has been written to the socket already."""
