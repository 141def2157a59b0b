"""How a process ends: its exit code, what torchrun hears, and no teardown that could spoil it."""

import atexit
import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # tools.doctor ends a process by it that has torch and nothing of ours
    from meshwright.train.distributed.ranks import RankInfo

EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 1, 2, 75
SPEAK_S = 5.0  # that another rank leaves to rank 0 for its message


def say_user_error(ranks: "RankInfo", words: str) -> None:
    """Rank 0 says what the user did wrong, for all ranks mostly find it alike; another one if rank 0 has not,
    a while later.

    torchrun ends them all when it sees the first end, which so is rank 0, if it has something to say.
    """
    if ranks.is_main:
        say_error(words)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(SPEAK_S)
    say_error(f"rank {ranks.rank}: {words}")


def say_error(words: str) -> None:
    """Print on stderr, if anybody still reads it."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)


def exit_process(ranks: "RankInfo", code: int, error: BaseException | None = None) -> NoReturn:
    """End the process with `code`; under torchrun, hand it `error` so that its report carries the one
    message."""
    if ranks.under_torchrun and error is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End with this exit code: exit functions run, output is flushed, but the interpreter is not torn down.

    A thread of gloo may still be letting go of the last collective's tensors. Where that waits for the
    interpreter as its teardown begins, Python before 3.14 unwinds the thread, which C++ forbids, and a
    process that had done all its work aborts (SIGABRT, "terminate called without an active exception";
    pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def end_at_once(code: int, words: str) -> NoReturn:
    """End from any thread, wherever the others are, and whichever locks of Python's streams they hold:
    nothing is flushed."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())
    os._exit(code)
