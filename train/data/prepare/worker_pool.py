"""Tokenizes the pieces of a source in several processes, which import neither torch nor the main program."""

import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.prepare.partition import Piece
from meshwright.train.data.prepare.worker import COLUMNS, OnBatch, TokenizeJob, start_worker, tokenize_shared
from meshwright.train.errors import DataError

_POLL_S = 0.1
_REAPED_S = 5.0  # limit on the wait for the exit code of a dead process


class _Worker(SpawnProcess):
    """A process that exits when its parent kills it or exits. It blocks SIGINT and SIGTERM, which a terminal
    or Slurm sends to both."""

    def start(self) -> None:
        program = sys.modules["__main__"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        # otherwise the new process would import the main program, and torch with it
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = program
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerContext(SpawnContext):
    """Records the processes that a pool starts, because the pool does not report which of them died."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[_Worker] = []

    def Process(self, *arguments: Any, **options: Any) -> _Worker:  # type: ignore[override]
        """Create and record a worker; the pool calls this."""
        self._workers.append(_Worker(*arguments, **options))
        return self._workers[-1]

    def started(self) -> list[_Worker]:
        """Return the workers whose start succeeded, running or not."""
        return [worker for worker in self._workers if worker.pid is not None]


def tokenize_pieces(pieces: Sequence[Piece], job: TokenizeJob, workers: int, on_batch: OnBatch) -> None:
    """Tokenize the pieces in `workers` processes, which end with the call. Raises DataError and NoSpace."""
    if not pieces:
        return
    context = _WorkerContext()
    shared = context.RawArray("q", len(pieces) * len(COLUMNS))
    table = np.frombuffer(shared, np.int64).reshape(-1, len(COLUMNS))
    with ProcessPoolExecutor(min(workers, len(pieces)), context, start_worker, (shared,)) as pool:
        try:
            _follow(_submit(pool, pieces, job), table, on_batch)
        except BrokenProcessPool:
            if (dead := _find_dead(context.started())) is None:
                raise
            raise DataError(_death_message(dead, table, pieces)) from None
        finally:  # on Ctrl-C, and on an error in one piece, do not wait for the other pieces
            for worker in context.started():
                worker.kill()


def _submit(pool: ProcessPoolExecutor, pieces: Sequence[Piece], job: TokenizeJob) -> set[Future[None]]:
    """Submit every piece. DataError if the system cannot start a process."""
    try:
        return {pool.submit(tokenize_shared, row, piece, job) for row, piece in enumerate(pieces)}
    except OSError as error:
        raise DataError(
            f"the preparation cannot start its worker processes ({error.strerror}): use fewer "
            "(--workers), or raise the limits on open files and processes (ulimit -n, ulimit -u)"
        ) from None


def _follow(jobs: set[Future[None]], table: NDArray[np.int64], on_batch: OnBatch) -> None:
    """Report progress until all jobs are done. Raises the first exception of a job."""
    reported = table[:, 1:].sum(axis=0)
    while jobs:
        done, jobs = wait(jobs, _POLL_S, FIRST_EXCEPTION)
        now = table[:, 1:].sum(axis=0)
        if (now != reported).any():
            on_batch(*(now - reported).tolist())
        reported = now
        for job in done:
            job.result()


def _find_dead(workers: Sequence[_Worker]) -> _Worker | None:
    """The worker that broke the pool: the one with a nonzero exit code.

    Idle workers of a broken pool end with exit code 0, and busy ones block the pool's SIGTERM. A thread of
    the pool may receive the exit code first, so it may be known only a moment later.
    """
    deadline_s = time.monotonic() + _REAPED_S
    while time.monotonic() < deadline_s:
        for worker in workers:
            if worker.exitcode:
                return worker
        time.sleep(_POLL_S / 10)
    return None


def _death_message(worker: _Worker, table: NDArray[np.int64], pieces: Sequence[Piece]) -> str:
    code = worker.exitcode or 0
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = " (perhaps memory ran out)" if code == -signal.SIGKILL else ""
    places = [f" at {pieces[row].place}" for row in np.flatnonzero(table[:, 0] == worker.pid).tolist()]
    return (
        f"a worker process of the preparation (pid {worker.pid}) {end}{memory}{''.join(places)}: start "
        "again; finished shards are kept"
    )
