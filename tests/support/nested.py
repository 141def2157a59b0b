"""Runs programs whose own `python -m MODULE` commands become forks, also those that torchrun starts.

Such a process has its own pid, session, environment, folder and files; only the start of Python and the
import of torch (seconds of CPU) are left out. `run_nested("tools.sweep", ...)` runs a program whose children
are forks of it. `ForkingPopen` instead of subprocess.Popen does it for a function that a test calls: then the
children are forks of the fork server. tests/support/forks.py lists the differences from a command. Of Popen's
options files, env, cwd, session and process group are supported; with `preexec_fn`, or with `pass_fds` for a
fork of the server, the command is started normally. So are the commands of a program on a CUDA build of
torch, where autograd, once used, has threads and forbids forks.
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

# for `module` of `run` and `started`; the first argument is then the command's own module
NESTED = "tests.support.nested"
STANDARD = (0, 1, 2)
# Popen's names for the child's standard files; -1: the parent's file
GIVEN = ("p2cread", "c2pwrite", "errwrite")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run_nested(module: str, *arguments: str, **env: str) -> Any:
    """`run` with one process, for a module that starts Python itself."""
    return run(1, module, *arguments, module=NESTED, timeout_s=LIMIT_S, **env)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen that forks for `python -m MODULE`. Only the start of the child differs."""

    _fork: Fork | None = None  # if the child is a fork of the fork server

    def _execute_child(self, *arguments: Any) -> None:
        begin: Callable[..., None] = super()._execute_child  # type: ignore[misc]
        options = inspect.signature(begin).bind(*arguments).arguments
        command, use_server = options["args"], multiprocessing.parent_process() is None
        is_module = (
            not isinstance(command, str) and list(command[:1]) == [sys.executable] and "-m" in command[1:3]
        )
        unsupported = options["pass_fds"] if use_server else torch.version.cuda
        if not is_module or options["preexec_fn"] or unsupported:
            begin(*arguments)
            return
        module, *module_arguments = [str(argument) for argument in command[command.index("-m") + 1 :]]
        if use_server:
            self._fork = _fork_of_the_server(module, module_arguments, options)
            self.pid = self._fork.pid
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _run_child(module, module_arguments, options)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in PIPES))  # type: ignore[attr-defined]

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
    """An open file of this process that a fork of the server receives under another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _receive, (reduction.DupFd(self.number),)


def _receive(handed: Any) -> int:
    number: int = handed.detach()
    return number


def _fork_of_the_server(module: str, arguments: Sequence[str], options: Mapping[str, Any]) -> Fork:
    files = [_Handed(number) for number in _files(options)]
    env = os.environ if options["env"] is None else options["env"]
    return fork(
        _begin,
        module,
        list(arguments),
        files,
        options["start_new_session"],
        options["process_group"],
        output=Path(os.devnull),
        env={os.fsdecode(k): os.fsdecode(v) for k, v in env.items()},
        folder=Path(options["cwd"] or os.getcwd()),
    )


def _files(options: Mapping[str, Any]) -> list[int]:
    """The child's stdin, stdout and stderr."""
    return [
        standard if options[name] == -1 else options[name]
        for standard, name in zip(STANDARD, GIVEN, strict=True)
    ]


def _begin(
    module: str, arguments: Sequence[str], files: Sequence[int], new_session: bool, group: int
) -> None:
    """Run a module in a fork of the server, whose environment and folder are set. Its own children, such as
    torchrun's workers, are forks too."""
    fork_what_it_starts()
    _join(new_session, group)
    take_files(files)
    run_module(module, arguments)


def fork_what_it_starts() -> None:
    """Make `python -m MODULE` a fork in this process from now on, also in torchrun, which imports Popen by
    name."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    subprocess_handler.Popen = ForkingPopen  # type: ignore[attr-defined]


def _run_child(module: str, arguments: Sequence[str], options: Mapping[str, Any]) -> NoReturn:
    """In a fork of this process: do what the interpreter does with a command, and exit."""
    code = 1
    try:
        atexit._clear()
        _join(options["start_new_session"], options["process_group"])
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in (options["env"] or {}).items()}
        become(None if options["env"] is None else env, options["cwd"], _files(options))
        _close_others(options["pass_fds"])
        code = exit_code(lambda: run_module(module, arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(ValueError, OSError):  # closed, or a pipe without a reader
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _join(new_session: bool, group: int) -> None:
    """Start a new session, or join a process group."""
    if new_session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)


def _close_others(kept: Sequence[int]) -> None:
    """Close all files except the standard ones and these."""
    numbers = sorted({*STANDARD, *kept})
    for low, high in zip(numbers, [*numbers[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


if __name__ == "__main__":
    os.setpgid(0, 0)  # as a shell does with a command
    fork_what_it_starts()
    run_module(sys.argv[1], sys.argv[2:])
