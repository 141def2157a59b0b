"""Process exit: exit codes, the error report for torchrun, and exit without interpreter teardown."""

import atexit
import contextlib
import io
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # a process of tools.doctor that uses this module must not import the rest of the product
    from meshwright.train.distributed.ranks import RankInfo

EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 1, 2, 75
PRINT_FIRST_S = 5.0  # how long the other ranks wait, so that rank 0 prints its message first


def escape_unencodable() -> None:
    """Let this process print characters that the terminal's encoding lacks as escapes, such as \\u6587 in a
    path. Every command calls it first."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_user_error(ranks: "RankInfo", message: str) -> None:
    """Print a user error on rank 0; on another rank wait `PRINT_FIRST_S`, then print it there.

    Usually all ranks find the same error. torchrun ends all ranks when the first one exits, so the others
    print only if rank 0 has no error.
    """
    if ranks.is_main:
        print_error(message)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PRINT_FIRST_S)
    print_error(f"rank {ranks.rank}: {message}")


def print_error(message: str) -> None:
    """Print to stderr; do nothing if it is closed."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def exit_process(ranks: "RankInfo", code: int, error: BaseException | None = None) -> NoReturn:
    """End the process with `code`; under torchrun, record `error`, so that torchrun reports its message."""
    if ranks.under_torchrun and error is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End with this exit code: run exit functions and flush output, but do not tear down the interpreter.

    A gloo thread may still be releasing the last collective's tensors. If it waits for the interpreter when
    teardown begins, Python before 3.14 unwinds the thread, which C++ forbids, and a process that has finished
    its work aborts (SIGABRT, "terminate called without an active exception"; pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has exited
            stream.flush()
    os._exit(code)


def exit_immediately(code: int, message: str) -> NoReturn:
    """Write `message` to stderr and end the process immediately, from any thread. Nothing is flushed, because
    other threads may hold the locks of Python's streams."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode(errors="replace"))
    os._exit(code)
