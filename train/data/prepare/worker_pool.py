"""Tokenizes the pieces of a source in several processes, which import neither torch nor the main program."""

import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType

from meshwright.train.data.prepare.partition import Piece
from meshwright.train.data.prepare.worker import OnBatch, TokenizeJob, start_worker, tokenize_in_worker
from meshwright.train.errors import DataError


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
    """Starts workers."""

    Process = _Worker


def tokenize_pieces(pieces: Sequence[Piece], job: TokenizeJob, workers: int, on_batch: OnBatch) -> None:
    """Tokenize the pieces in `workers` processes, which end with the call; `on_batch` follows each piece.
    Raises DataError."""
    with ProcessPoolExecutor(workers, _WorkerContext(), start_worker) as pool:
        try:
            jobs = _submit(pool, pieces, job)
            for done in as_completed(jobs):
                on_batch(jobs[done].size_bytes, done.result())
        except BrokenProcessPool:
            raise DataError(
                "a worker process of the preparation was killed (perhaps memory ran out): start again, with "
                "fewer (--workers); finished shards are kept"
            ) from None
        finally:  # on Ctrl-C, and on an error in one piece, do not wait for the other pieces
            for worker in active_children():
                if isinstance(worker, _Worker):
                    worker.kill()


def _submit(pool: ProcessPoolExecutor, pieces: Sequence[Piece], job: TokenizeJob) -> dict[Future[int], Piece]:
    """Submit every piece. DataError if the system cannot start a process."""
    try:
        return {pool.submit(tokenize_in_worker, piece, job): piece for piece in pieces}
    except OSError as error:
        raise DataError(
            f"the preparation cannot start its worker processes ({error.strerror}): use fewer "
            "(--workers), or raise the limits on open files and processes (ulimit -n, ulimit -u)"
        ) from None
