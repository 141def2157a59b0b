"""Programs whose own Python commands are forks: what they start as `python -m MODULE`, also by way of torchrun.

Such a process has its own pid, session, environment, folder and files, as any other; only that Python is started and torch
imported anew (seconds of CPU) is left out. `run_nested("tools.sweep", ...)` runs a whole program so, whose children are forks of
it; `ForkingPopen` in place of subprocess.Popen does it for a function that a test calls: then the fork server has the children.
"""

import atexit
import contextlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._inductor import config as inductor
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.support.forks import Fork, fork, run_module
from tests.support.launch import run

NESTED = "tests.support.nested"  # as the module of `run` and `started`; then the command's own module is the first argument
STANDARD = (0, 1, 2)
GIVEN = ("p2cread", "c2pwrite", "errwrite")  # what a child has as these, in Popen's words; -1: what its parent has
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run_nested(module: str, *arguments: str, timeout_s: float = 240, **env: str) -> Any:
    """`run` on one rank, of a module that starts Python itself."""
    return run(1, module, *arguments, module=NESTED, timeout_s=timeout_s, **env)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen, in which `python -m MODULE` is a fork. Only how the child begins differs."""

    _fork: Fork | None = None  # where the child is the fork server's

    def _execute_child(self, *arguments: Any) -> None:
        begin: Callable[..., None] = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(begin).bind(*arguments).arguments
        command = asked["args"]
        if isinstance(command, str) or list(command[:1]) != [sys.executable] or "-m" not in command[1:3]:
            begin(*arguments)
            return
        module, *words = [str(word) for word in command[command.index("-m") + 1 :]]
        if multiprocessing.parent_process() is None:
            self._fork = _fork_of_the_server(module, words, asked)
            self.pid = self._fork.pid
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _be_the_child(module, words, asked)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._fork is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc,no-any-return]
        self.returncode = self._fork.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._fork is None:
            return super()._wait(timeout=timeout)  # type: ignore[misc,no-any-return]
        self.returncode = self._fork.wait(timeout)
        return self.returncode


class _Handed:
    """An open file of this process, that a fork of the server gets under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _taken, (reduction.DupFd(self.number),)


def _taken(handed: Any) -> int:
    number: int = handed.detach()
    return number


def _fork_of_the_server(module: str, arguments: Sequence[str], asked: Mapping[str, Any]) -> Fork:
    files = [_Handed(standard if asked[name] == -1 else asked[name]) for standard, name in zip(STANDARD, GIVEN, strict=True)]
    env = os.environ if asked["env"] is None else asked["env"]
    return fork(_begin, module, list(arguments), files, asked["start_new_session"], asked["process_group"],
                output=Path(os.devnull), env={os.fsdecode(k): os.fsdecode(v) for k, v in env.items()},
                folder=Path(asked["cwd"] or os.getcwd()))  # fmt: skip


def _begin(module: str, arguments: Sequence[str], files: Sequence[int], new_session: bool, group: int) -> None:
    """In the server's fork, which has its environment and folder already. What it starts in turn, as torchrun does, are forks."""
    fork_what_it_starts()
    _take(files, new_session, group)
    run_module(module, arguments)


def fork_what_it_starts() -> None:
    """From now on `python -m MODULE` is a fork in this process, also where torchrun starts it, which has Popen by name."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    subprocess_handler.Popen = ForkingPopen  # type: ignore[attr-defined]


def _be_the_child(module: str, arguments: Sequence[str], asked: Mapping[str, Any]) -> NoReturn:
    """In a fork of this very process: what the interpreter would do with a command; then end."""
    code = 1
    try:
        for which in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(which, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        if asked["env"] is not None:
            environ = {os.fsdecode(name): os.fsdecode(value) for name, value in asked["env"].items()}
            os.environ.clear()
            os.environ |= environ
        if asked["cwd"] is not None:
            os.chdir(asked["cwd"])
        files = [standard if asked[name] == -1 else asked[name] for standard, name in zip(STANDARD, GIVEN, strict=True)]
        _take(files, asked["start_new_session"], asked["process_group"])
        _close_others(asked["pass_fds"])
        code = _exit_code(lambda: run_module(module, arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(ValueError, OSError):  # closed, or nobody reads it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take(files: Sequence[int], new_session: bool, group: int) -> None:
    """Session and standard files, as asked for."""
    if new_session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)
    copies = [os.dup(number) for number in files]  # one of them may be another's place
    for standard, copy in zip(STANDARD, copies, strict=True):
        os.dup2(copy, standard)
        os.close(copy)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False, encoding="utf-8", buffering=1)
                                         for n, mode in zip(STANDARD, "rww", strict=True))  # fmt: skip
    read_environment()


def read_environment() -> None:
    """What torch has read from the environment when it was imported, which was before the fork."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if compiler := os.environ.get("CXX"):
        inductor.cpp.cxx = (None, compiler)


def _close_others(kept: Sequence[int]) -> None:
    """All files but the standard ones and these."""
    numbers = sorted({*STANDARD, *kept})
    for low, high in zip(numbers, [*numbers[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _exit_code(function: Callable[[], None]) -> int:
    """What the interpreter would end with."""
    code: Any = 0
    try:
        function()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return int(code or 0)


if __name__ == "__main__":
    os.setpgid(0, 0)  # as a shell does with a command
    read_environment()
    fork_what_it_starts()
    run_module(sys.argv[1], sys.argv[2:])
