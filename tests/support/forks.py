"""Processes forked from one that has imported torch and this project, and done nothing else.

Starting Python and importing torch, its compiler and our code takes about six seconds of CPU; a fork takes a hundredth of
that. `fork` runs a function, `fork_module` does what `python -m MODULE` does. The child is a process like any other: it has
its own environment, folder, output and signals, and is killed and waited for as one. Python's own fork server
(multiprocessing) is the parent: no operator has run in it, and it has one thread and no process group (tests/support/warm.py).
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch._dynamo",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.fx_passes.fuse_attention",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.utils.cpp_extension",
    "sympy.combinatorics",
    "sympy.physics.units",
    "numpy.ma",
    "torch.profiler",
    "torch.utils.tensorboard",
    "train.main",
    "tools.plan",
    "tools.simulate",
    "tools.checkpoint",
    "tools.compare",
    "tools.convert_hf",
    "tools.eval",
    "tools.generate",
    "tools.sweep",
    "tools.trace",
    "tests.support.worlds",
    "tests.support.warm",
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))
_living = set["Fork"]()


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what a launcher may have put there; one thread to a process."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER and not k.startswith("TORCHELASTIC_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


class Fork:
    """A forked process, with the names that subprocess.Popen has for the same things."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid: int = process.pid  # type: ignore[assignment]
        self.sentinel: int = process.sentinel
        _living.add(self)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        _living.discard(self)
        return code

    def send_signal(self, which: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(function: Callable[..., Any], *arguments: Any, output: Path, errors: Path | None = None,
         env: Mapping[str, str] | None = None, folder: Path = ROOT) -> Fork:  # fmt: skip
    """Run function(*arguments), both picklable, in a new process, in `folder` and with `env` as its whole environment.

    `output`: the file that stdout is appended to, and stderr if `errors` names no other; a terminal has a path too.
    """
    _start_server()
    environ = dict(environment() if env is None else env)
    process = _context.Process(target=_run, args=(function, arguments, output, errors or output, environ, folder))
    process.start()
    return Fork(process)


def fork_module(module: str, *arguments: str, **options: Any) -> Fork:
    """What `python -m MODULE ARGUMENTS` does. Options are those of `fork`."""
    return fork(run_module, module, arguments, **options)


def _start_server() -> None:
    """Start the fork server, unless it runs. numpy's linear algebra would start a thread as it is imported: not there."""
    before = dict(os.environ)
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
                   "PYTHONPATH": f"{ROOT}:{before.get('PYTHONPATH', '')}", "PYTHONSAFEPATH": "1"}  # this tree, wherever we stand
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before


def _run(function: Callable[..., Any], arguments: Sequence[Any], output: Path, errors: Path, env: Mapping[str, str],
         folder: Path) -> None:  # fmt: skip
    """In the child: make it what a started command would be, run, and end as the interpreter does."""
    for which in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(which, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for path, number in ((Path(os.devnull), 0), (output, 1), (errors, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False, encoding="utf-8", buffering=1)
                                         for n, mode in enumerate("rww"))  # fmt: skip
    if threads := env.get("OMP_NUM_THREADS"):  # the library has been loaded, and reads it no more
        torch.set_num_threads(int(threads))
    try:
        function(*arguments)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run_module(module: str, arguments: Sequence[str]) -> None:
    """What `python -m MODULE ARGUMENTS` does, in this process."""
    sys.argv = [module, *arguments]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # that it is imported already would be warned of
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_all() -> None:
    for process in list(_living):
        process.kill()


atexit.register(_end_all)  # after multiprocessing's own, so it runs before that waits for them
