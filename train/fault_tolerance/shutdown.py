"""Graceful shutdown: on a signal or a time limit all ranks stop after the same step, within the grace period;
after the death of a rank the others end."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import gather_from_all
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import RunConfig
from meshwright.train.distributed.exit import EXIT_FAILED, exit_immediately
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.errors import COMMITS_INTACT, SaveError
from meshwright.train.fault_tolerance.peers import LostPeer, PeerConnections, as_peer_lost_error, explain_loss
from meshwright.train.hooks import Hook, StepDone

# Slurm sends the signal of its --signal option, torchrun forwards SIGHUP when its terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_S = 0.5  # a signal within this time after the first is the same request, delivered twice
EXIT_S = 5.0  # for on_end and the exit; after that the kernel ends the process
CLOSE_S = 5.0  # how long close() waits for peers that may be dead
DATA_S = 0.05  # between two looks at the ranks' data, while it is late
LOST_S = 3.0  # from the loss of a peer until this process ends, if its main thread has not failed by itself


@dataclass(frozen=True)
class ShutdownRequest:
    """A rank's request to end the run. failed: because of an error, so that nothing more is saved."""

    reason: str
    failed: bool = False


class GracefulShutdown(Hook):
    """Decides when to stop: all ranks agree on it at the same step, without waiting for the device.

    Any rank may request a stop (a signal, the time limit, an error). After each step, and before each batch
    of an evaluation, every rank starts a tiny all-reduce over gloo, on the host, and reads the previous one:
    all ranks stop at the same point, and the GPU's queue is never drained.

    A separate thread receives signals, so that a blocked main thread (in a collective with a dead rank, or in
    the compiler) does not delay them. The first signal requests a stop; a second one ends the process
    immediately, and so does, on every rank, a stop that takes longer than `grace_s`. Both leave the last
    commit intact, and the exit code is 128 + the signal's number. Before `start()` there is nothing to save,
    and the first signal ends the process immediately.

    The same thread ends the process LOST_S after the death of another rank (train.fault_tolerance.peers): the
    main thread may be waiting for it without an end, inside a collective on a GPU. In that time a main thread
    whose collective has failed exits by itself, and flushes its logs.

    A second signal counts only REPEAT_S after the first. Within that time it is the same request, delivered
    twice: `timeout` sends to its command and then to their common process group, and a user who signals both
    torchrun and its workers reaches the workers a second time through torchrun. (Ctrl-C in a terminal reaches
    torchrun only, because its workers have their own sessions: it forwards SIGINT, and sends SIGTERM after a
    second Ctrl-C.) Taking a repetition for a second signal would lose the work since the last commit; taking
    a quick second signal for a repetition only costs a third one.
    """

    def __init__(
        self, config: RunConfig, on_end: Callable[[str], None], on_lost: Callable[[LostPeer], None]
    ) -> None:
        """Install the signal handlers. `on_end(reason)` is called just before the process is ended without
        saving, `on_lost(peer)` if the reason is another rank.

        Main thread only, because Python sets signal handlers nowhere else.
        """
        self._config, self._on_end, self._on_lost = config, on_end, on_lost
        self._deadline_s = time.monotonic() + config.max_hours * 3600 if config.max_hours else None
        self._request: ShutdownRequest | None = None
        self._request_lock = threading.Lock()
        self._began, self.agreed = False, False  # agreed: all ranks stop, at the same step
        self._group: dist.ProcessGroup | None = None
        self._peers: PeerConnections | None = None
        self._lost: tuple[float, LostPeer] | None = None  # when this process ends because of that rank
        self._peer_is_lost = threading.Event()
        self._leaving = False  # the main thread exits by itself, so a lost peer is no reason to end
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self.on_fetched: Callable[[], None] = lambda: None  # called while data is late but still comes
        self._first_signal_s: float | None = None  # when this process received its first signal
        self._grace: tuple[float, int] | None = None  # deadline of the stop, and the signal's number
        self._install_handlers()

    @property
    def reason(self) -> str | None:
        """Why to stop: this rank's request or, once agreed, the same one on all ranks. None without one."""
        return self._request.reason if self._request else None

    def connect(self) -> None:
        """Create the group for the agreement, and connect to the neighbors; all ranks call it, after the
        default process group exists."""
        if dist.get_world_size() > 1:
            self._group = dist.new_group(
                backend="gloo", timeout=group_timeout(self._config), group_desc="shutdown"
            )
            self._peers = PeerConnections(self._group, self._lose_peer)

    def start(self, position: TrainPosition) -> None:
        """From now on there is something to save, and a first signal requests an agreed stop."""
        self._began = True

    def after_step(self, done: StepDone) -> None:
        self.should_stop()

    def request(self, reason: str, failed: bool = False) -> None:
        """Request a stop of all ranks, from any thread. The first request counts, but an error replaces a
        request without error.

        Has no effect once a stop is agreed.
        """
        with self._request_lock:
            if not self.agreed and (self._request is None or (failed and not self._request.failed)):
                self._request = ShutdownRequest(reason, failed)

    def should_stop(self) -> bool:
        """Return whether to stop; every rank calls it at the same points, after each step and before each
        batch of an evaluation, and all get True at the same one. Raises SaveError if the stop is because a
        checkpoint could not be saved, so that nothing more is saved, and PeerLostError."""
        if not self.agreed:
            self._notice_deadline()
            with _losses():
                self._agree(self._any_requested(self._group) if self._group else self._request is not None)
        return self.agreed

    def await_data(self, is_ready: Callable[[float], bool], fetched: Callable[[], int]) -> bool:
        """Wait until every rank has the data of its next step, and return True; or, if a stop is requested
        before, return False on all ranks. Every rank calls it before each step whose data may be late. Raises
        as `should_stop`.

        `is_ready` waits for at most so many seconds; `fetched` returns the bytes that this rank has fetched:
        while any rank fetches more, a step takes as long as it takes (`on_fetched`).
        """
        before = fetched()
        while True:
            ready, now = is_ready(DATA_S), fetched()
            self._notice_deadline()
            flags = torch.tensor([not ready, self._request is not None, now > before], dtype=torch.int32)
            before = now
            with _losses():
                if self._group:
                    dist.all_reduce(flags, group=self._group)
                late, requested, more = flags.tolist()
                if not late:
                    return True
                if requested:
                    self._agree(True)
                    return False
            if more:
                self.on_fetched()

    def _notice_deadline(self) -> None:
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self.request("run.max_hours")

    def _agree(self, requested: bool) -> None:
        """Stop if any rank has requested it, which all ranks know. Raises SaveError."""
        self.agreed = requested
        if requested and self._group:
            self._share_requests(self._group)
        if requested and self._request and self._request.failed:
            raise SaveError(self._request.reason)

    def _any_requested(self, group: dist.ProcessGroup) -> bool:
        """Read the previous step's all-reduce; if no rank had requested a stop, start this step's."""
        if self._pending is not None:
            work, requested = self._pending
            self._pending = None
            work.wait()
            if requested.item():
                return True
        requested = torch.tensor([int(self._request is not None)], dtype=torch.int32)
        self._pending = dist.all_reduce(requested, group=group, async_op=True), requested
        return False

    def _share_requests(self, group: dist.ProcessGroup) -> None:
        """Agree on one request; a signal's grace period on one rank applies to all ranks."""
        own = (self._request, self._grace[1] if self._grace else None)
        everyone = gather_from_all(own, group)
        with self._request_lock:
            self._request = merge_requests([request for request, _ in everyone])
        numbers = [number for _, number in everyone if number is not None]
        if numbers and self._grace is None:
            self._start_grace(numbers[0])
            self._wake_thread()

    def lost_peer(self, wait_s: float) -> LostPeer | None:
        """Return the rank that has ended, which the connections may report up to `wait_s` after a collective
        has failed; None if there is none."""
        if self._peers:
            self._peer_is_lost.wait(wait_s)
        return self._lost[1] if self._lost else None

    def report_failure(self, reason: str, by_signal: bool = False) -> None:
        """Report to all ranks that this rank is about to exit with an error: the others end within LOST_S."""
        self._leaving = True
        if self._peers:
            self._peers.report(reason, by_signal)

    def end(self) -> None:
        """Restore the signal handlers, and wait for the neighbors and for the last all-reduce: nothing may be
        in progress when the process group ends.

        A dead peer ends both with an immediate error; a peer that hangs costs at most CLOSE_S each.
        """
        self._leaving = True
        signal.set_wakeup_fd(self._earlier_fd)
        for number, handler in self._earlier_handlers.items():
            if handler is not None:  # None: set by C code, which Python cannot restore
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._write_end.close()  # ends the thread
        self._thread.join()
        self._read_end.close()
        if self._peers:
            self._peers.close(CLOSE_S)
        if self._pending is not None:
            # after the goodbye, because a timeout closes the connections
            with contextlib.suppress(RuntimeError):
                self._pending[0].wait(timedelta(seconds=CLOSE_S))
            self._pending = None

    def _install_handlers(self) -> None:
        """Have the C part of Python's signal handling write each number into a socket, which a thread reads.

        Python's own handlers run in the main thread only, and not while it is inside C++.
        """
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        # a SIGHUP that nohup ignores stays ignored
        wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._earlier_handlers = {number: signal.signal(number, _nothing) for number in wanted}
        self._thread = threading.Thread(target=self._receive_signals, name="signals", daemon=True)
        self._thread.start()

    def _receive_signals(self) -> None:
        """The thread: receive signals, and end the process after the grace period or a peer's loss."""
        while True:
            self._read_end.settimeout(self._left_s())
            with contextlib.suppress(TimeoutError):
                numbers = self._read_end.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._earlier_handlers:  # not another signal with a Python handler
                        self._on_signal(number)
            if self._lost and not self._leaving and time.monotonic() >= self._lost[0]:
                self._end_for_loss(self._lost[1])
            if self._grace and time.monotonic() >= self._grace[0]:
                grace = f"run.grace_s={self._config.grace_s:g} s was too short for the stop (raise it)"
                self._end(128 + self._grace[1], f"{self.reason}: ended without saving, because {grace}")

    def _left_s(self) -> float | None:
        """Return the seconds until the first deadline, None without one."""
        deadlines_s = [self._grace[0]] if self._grace else []
        if self._lost and not self._leaving:
            deadlines_s.append(self._lost[0])
        return max(0.001, min(deadlines_s) - time.monotonic()) if deadlines_s else None

    def _on_signal(self, number: int) -> None:
        name = f"signal {signal.Signals(number).name}"
        if not self._began:
            if self._lost and not self._lost[1].by_signal:  # the launcher ends the others after a loss
                self._end_for_loss(self._lost[1])
            self._end(128 + number, f"{name} before the first step: there was nothing to save")
        elif self._first_signal_s is None:
            self._first_signal_s = time.monotonic()
            self.request(name)
            if self._grace is None:
                self._start_grace(number)
        elif time.monotonic() - self._first_signal_s >= REPEAT_S:
            self._end(128 + number, f"{self.reason}, then {name}: ended immediately, without saving")

    def _end_for_loss(self, lost: LostPeer) -> None:
        self._end(EXIT_FAILED, explain_loss(lost.text), lost)

    def _start_grace(self, number: int) -> None:
        """Start the deadline of the stop, which the thread enforces, or the kernel if it cannot run."""
        self._grace = time.monotonic() + self._config.grace_s, number
        # SIGALRM ends a process by default
        signal.setitimer(signal.ITIMER_REAL, self._config.grace_s + EXIT_S)

    def _lose_peer(self, lost: LostPeer) -> None:
        self._lost = time.monotonic() + LOST_S, lost
        self._peer_is_lost.set()
        self._wake_thread()

    def _wake_thread(self) -> None:
        """Make the thread look at the deadlines again."""
        with contextlib.suppress(OSError):  # it has ended
            self._write_end.send(b"\0")

    def _end(self, code: int, reason: str, lost: LostPeer | None = None) -> None:
        signal.setitimer(signal.ITIMER_REAL, EXIT_S)  # on_end writes to a disk, which may hang
        with contextlib.suppress(Exception):
            if lost:
                self._on_lost(lost)
            else:
                self._on_end(reason)
                self.report_failure(reason, by_signal=True)
        exit_immediately(code, f"PeerLostError: {reason}" if lost else f"{reason}; {COMMITS_INTACT}")


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """A context that converts the error of a collective with a dead rank into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if lost := as_peer_lost_error(error):
            raise lost from error
        raise


def merge_requests(requests: Sequence[ShutdownRequest | None]) -> ShutdownRequest | None:
    """Return the request of all ranks' that counts, the same on each: the first error, else the first."""
    errors = [
        ShutdownRequest(f"rank {rank}: {request.reason}", True)
        for rank, request in enumerate(requests)
        if request and request.failed
    ]
    return next(iter([*errors, *filter(None, requests)]), None)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The Python half of a signal handler; the number is already in the socket."""
