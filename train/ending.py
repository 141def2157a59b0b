"""How a process ends: its exit code, what torchrun hears, and no teardown that could spoil it."""

import atexit
import os
import sys
from typing import NoReturn

from train.runtime import Place

EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 1, 2, 75


def exit_process(place: Place, code: int, error: BaseException | None = None) -> NoReturn:
    """End the process with `code`; under torchrun, hand it `error` so that its report carries the one message."""
    if place.under_torchrun and error is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End with this exit code: exit functions run, output is flushed, but the interpreter is not torn down.

    A thread of gloo may still be letting go of the last collective's tensors. Where that waits for the interpreter as
    its teardown begins, Python before 3.14 unwinds the thread, which C++ forbids, and a process that had done all its
    work aborts (SIGABRT, "terminate called without an active exception"; pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
