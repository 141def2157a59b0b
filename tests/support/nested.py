"""Programs whose own Python commands are forks: what they start as `python -m MODULE`, also by way of
torchrun.

Such a process has its own pid, session, environment, folder and files, as any other; only that Python is
started and torch imported anew (seconds of CPU) is left out. `run_nested("tools.sweep", ...)` runs a whole
program so, whose children are forks of it; `ForkingPopen` in place of subprocess.Popen does it for a function
that a test calls: then the fork server has the children. What stays different from a command is told in
tests/support/forks.py. Of Popen's options files, env, cwd, session and process group are heeded; with
`preexec_fn`, or `pass_fds` where the child would be the server's, a command is started as it is. So are those
of a whole program on a CUDA build of torch: there autograd, once used, has threads, and forbids forks.
"""

import atexit
import contextlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.support.forks import Fork, become, exit_code, fork, run_module, take_files
from tests.support.launch import LIMIT_S, run

# as the module of `run` and `started`; then the command's own module is the first argument
NESTED = "tests.support.nested"
STANDARD = (0, 1, 2)
# what a child has as these, in Popen's words; -1: what its parent has
GIVEN = ("p2cread", "c2pwrite", "errwrite")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run_nested(module: str, *arguments: str, **env: str) -> Any:
    """`run` on one rank, of a module that starts Python itself."""
    return run(1, module, *arguments, module=NESTED, timeout_s=LIMIT_S, **env)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen, in which `python -m MODULE` is a fork. Only how the child begins differs."""

    _fork: Fork | None = None  # where the child is the fork server's

    def _execute_child(self, *arguments: Any) -> None:
        begin: Callable[..., None] = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(begin).bind(*arguments).arguments
        command, of_the_server = asked["args"], multiprocessing.parent_process() is None
        known = (
            not isinstance(command, str) and list(command[:1]) == [sys.executable] and "-m" in command[1:3]
        )
        unfit = asked["pass_fds"] if of_the_server else torch.version.cuda
        if not known or asked["preexec_fn"] or unfit:
            begin(*arguments)
            return
        module, *words = [str(word) for word in command[command.index("-m") + 1 :]]
        if of_the_server:
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
    files = [_Handed(number) for number in _files(asked)]
    env = os.environ if asked["env"] is None else asked["env"]
    return fork(
        _begin,
        module,
        list(arguments),
        files,
        asked["start_new_session"],
        asked["process_group"],
        output=Path(os.devnull),
        env={os.fsdecode(k): os.fsdecode(v) for k, v in env.items()},
        folder=Path(asked["cwd"] or os.getcwd()),
    )


def _files(asked: Mapping[str, Any]) -> list[int]:
    """What the child has as stdin, stdout and stderr."""
    return [
        standard if asked[name] == -1 else asked[name] for standard, name in zip(STANDARD, GIVEN, strict=True)
    ]


def _begin(
    module: str, arguments: Sequence[str], files: Sequence[int], new_session: bool, group: int
) -> None:
    """In the server's fork, which has its environment and folder already. What it starts in turn, as torchrun
    does, are forks."""
    fork_what_it_starts()
    _join(new_session, group)
    take_files(files)
    run_module(module, arguments)


def fork_what_it_starts() -> None:
    """From now on `python -m MODULE` is a fork in this process, also where torchrun starts it, which has
    Popen by name."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    subprocess_handler.Popen = ForkingPopen  # type: ignore[attr-defined]


def _be_the_child(module: str, arguments: Sequence[str], asked: Mapping[str, Any]) -> NoReturn:
    """In a fork of this very process: what the interpreter would do with a command; then end."""
    code = 1
    try:
        atexit._clear()
        _join(asked["start_new_session"], asked["process_group"])
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in (asked["env"] or {}).items()}
        become(None if asked["env"] is None else env, asked["cwd"], _files(asked))
        _close_others(asked["pass_fds"])
        code = exit_code(lambda: run_module(module, arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(ValueError, OSError):  # closed, or nobody reads it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _join(new_session: bool, group: int) -> None:
    """Session and process group, as asked for."""
    if new_session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)


def _close_others(kept: Sequence[int]) -> None:
    """All files but the standard ones and these."""
    numbers = sorted({*STANDARD, *kept})
    for low, high in zip(numbers, [*numbers[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


if __name__ == "__main__":
    os.setpgid(0, 0)  # as a shell does with a command
    fork_what_it_starts()
    run_module(sys.argv[1], sys.argv[2:])
