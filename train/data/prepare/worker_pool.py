"""Pieces of a source over several processes, which import neither torch nor the program that starts them."""

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
from meshwright.train.data.prepare.worker import COLUMNS, OnBatch, TokenizeJob, start_worker, tokenise_shared
from meshwright.train.errors import DataError

_POLL_S = 0.1
_REAPED_S = 5.0  # until the exit code of a dead process is known


class _Worker(SpawnProcess):
    """A process that ends when the one that started it kills it or is gone. Signals that a terminal or Slurm
    sends to both do not reach it."""

    def start(self) -> None:
        program = sys.modules["__main__"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        # the new process would import the program that was started, and torch with it
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = program
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerContext(SpawnContext):
    """Keeps the processes that a pool starts, because the pool does not tell which of them has died."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[_Worker] = []

    def Process(self, *arguments: Any, **options: Any) -> _Worker:  # type: ignore[override]
        self._workers.append(_Worker(*arguments, **options))
        return self._workers[-1]

    def started(self) -> list[_Worker]:
        """Those that run or have run: a start may fail."""
        return [worker for worker in self._workers if worker.pid is not None]


def tokenise_pieces(pieces: Sequence[Piece], job: TokenizeJob, workers: int, on_batch: OnBatch) -> None:
    """Have every piece tokenised by `workers` processes. Raises DataError and NoSpace; no worker is left
    behind."""
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
            raise DataError(_how_it_ended(dead, table, pieces)) from None
        finally:  # on Ctrl-C, and on an error in one piece, nobody waits for the others
            for worker in context.started():
                worker.kill()


def _submit(pool: ProcessPoolExecutor, pieces: Sequence[Piece], job: TokenizeJob) -> set[Future[None]]:
    """A future for each piece. Raises DataError where the system gives no process."""
    try:
        return {pool.submit(tokenise_shared, row, piece, job) for row, piece in enumerate(pieces)}
    except OSError as error:
        raise DataError(
            f"the preparation cannot start its worker processes ({error.strerror}): use fewer "
            "(--workers), or raise the limits of open files and of processes (ulimit -n, ulimit -u)"
        ) from None


def _follow(jobs: set[Future[None]], table: NDArray[np.int64], on_batch: OnBatch) -> None:
    """Pass on the progress until all jobs are done. Raises what the first of them raises."""
    told = table[:, 1:].sum(axis=0)
    while jobs:
        done, jobs = wait(jobs, _POLL_S, FIRST_EXCEPTION)
        now = table[:, 1:].sum(axis=0)
        if (now != told).any():
            on_batch(*(now - told).tolist())
        told = now
        for job in done:
            job.result()


def _find_dead(workers: Sequence[_Worker]) -> _Worker | None:
    """The worker that broke the pool: the pool lets idle ones end, with exit code 0, and cannot end the
    others, which do not hear SIGTERM. Its thread may be the one that is told the code, a moment later."""
    deadline_s = time.monotonic() + _REAPED_S
    while time.monotonic() < deadline_s:
        for worker in workers:
            if worker.exitcode:
                return worker
        time.sleep(_POLL_S / 10)
    return None


def _how_it_ended(worker: _Worker, table: NDArray[np.int64], pieces: Sequence[Piece]) -> str:
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = ", as when memory runs out," if code == -signal.SIGKILL else ""
    at = [f" at {pieces[row].place}" for row in np.flatnonzero(table[:, 0] == worker.pid).tolist()]
    return (
        f"a worker process of the preparation (pid {worker.pid}) {how}{memory}{''.join(at)}: start again, "
        "and finished shards are kept"
    )
