"""Processes forked from one that has only imported torch and this project.

Starting Python and importing torch, its compiler and our code takes about six seconds of CPU; a fork takes a
hundredth of that. `fork` runs a function, `fork_module` does what `python -m MODULE` does. The child has its
own environment, folder, output and signals, is killed and waited for like any other process, and ends with
the exit code of an interpreter. Its parent is Python's own fork server (multiprocessing), in which no
operator has run, and which has one thread and no process group (tests/support/warm.py).

Differences from a command: torch, numpy and Python itself have already started. Of the variables that they
read at start only OMP_NUM_THREADS and CXX are the child's; the others (PYTHONHASHSEED, TORCH_LOGS,
TORCHINDUCTOR_* ...) are those of the server, which are the tests'. /proc shows the server's command line.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# one text, because tests/support/changed.py takes a string with a module's name for its import
PRELOADED = """
    pytest
    torch.distributed.fsdp
    torch.distributed.tensor.parallel
    torch.distributed.checkpoint
    torch.distributed.elastic.multiprocessing.errors
    torch._dynamo
    torch._dynamo.repro.after_dynamo
    torch._inductor.compile_fx
    torch._inductor.codegen.cpp_wrapper_gpu
    torch._inductor.fx_passes.fuse_attention
    torch.distributed.tensor.experimental
    torch.export._trace
    torch.fx.experimental.validator
    torch.utils.cpp_extension
    sympy.combinatorics
    sympy.physics.units
    numpy.ma
    torch.profiler
    torch.utils.tensorboard
    meshwright.train.main
    meshwright.train.phases
    meshwright.tools.plan
    meshwright.tools.simulate
    meshwright.tools.checkpoint.convert
    meshwright.tools.compare
    meshwright.tools.eval
    meshwright.tools.generate
    meshwright.tools.sweep
    meshwright.tools.trace
    tests.support.worlds
    tests.support.warm
""".split()  # noqa: SIM905

STACKS = signal.SIGUSR2  # makes a fork print the stacks of its threads to stderr

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_living = set["Fork"]()


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, without the variables of a launcher; one thread per
    process."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER and not k.startswith("TORCHELASTIC_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


class Fork:
    """A forked process with the interface of subprocess.Popen."""

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
            with contextlib.suppress(ProcessLookupError):  # reaped by the server, not yet reported
                os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    function: Callable[..., Any],
    *arguments: Any,
    output: Path,
    errors: Path | None = None,
    env: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> Fork:
    """Run function(*arguments), both picklable, in a new process, in `folder` and with exactly the
    environment `env`.

    `output`: the file to which stdout is appended, and stderr without `errors`; it may be a terminal.
    """
    _start_server()
    environ = dict(environment() if env is None else env)
    process = _context.Process(
        target=_run, args=(function, arguments, output, errors or output, environ, folder)
    )
    process.start()
    return Fork(process)


def fork_module(module: str, *arguments: str, **options: Any) -> Fork:
    """Do what `python -m MODULE ARGUMENTS` does, in a fork. Options are those of `fork`."""
    return fork(run_module, module, arguments, **options)


def _start_server() -> None:
    """Start the fork server, unless it runs.

    The environment keeps numpy's linear algebra from starting a thread at import, and makes
    torch.utils.cpp_extension look for a GPU through NVML at import: through CUDA, no fork could use the GPU.
    """
    before = dict(os.environ)
    os.environ |= {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # this tree, whatever the working folder is
        "PYTHONPATH": f"{ROOT}:{before.get('PYTHONPATH', '')}",
        "PYTHONSAFEPATH": "1",
    }
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    output: Path,
    errors: Path,
    env: Mapping[str, str],
    folder: Path,
) -> None:
    """In the child: set it up like a started command, run the function, and exit as the interpreter does."""
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT)))]
    paths = (Path(os.devnull), output, errors)
    opened = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY) for path in paths]
    become(env, folder, opened)
    for number in opened:
        if number > 2:
            os.close(number)
    sys.exit(exit_code(lambda: function(*arguments)))


def become(env: Mapping[str, str] | None, folder: Path | None, files: Sequence[int]) -> None:
    """Set up this process like a new one: default signal handlers, this environment and folder (None:
    unchanged), and these open files as stdin, stdout and stderr."""
    for which in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(which, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if env is not None:
        os.environ.clear()
        os.environ |= env
    if folder is not None:
        os.chdir(folder)
    take_files(files)
    faulthandler.register(STACKS, file=2)
    read_environment()


def take_files(files: Sequence[int]) -> None:
    """Make these open files stdin, stdout and stderr."""
    copies = [os.dup(number) for number in files]  # a file may already have the number of a standard one
    for standard, copy in enumerate(copies):
        os.dup2(copy, standard)
        os.close(copy)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(n, mode, closefd=False, encoding="utf-8", buffering=1) for n, mode in enumerate("rww")
    )


def read_environment() -> None:
    """Apply the variables that torch read at import, before the fork."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if compiler := os.environ.get("CXX"):
        from torch._inductor import config  # already imported in the server

        config.cpp.cxx = (None, compiler)


def exit_code(function: Callable[[], object]) -> int:
    """Run a function and the exit steps of the interpreter, and return the exit code. After a
    KeyboardInterrupt the process ends by SIGINT, as the interpreter does."""
    code: Any = 0
    interrupted = False
    try:
        function()
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        interrupted = True
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if interrupted:
        with contextlib.suppress(ValueError, OSError):  # closed, or a pipe without a reader
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(code or 0)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Do what `python -m MODULE ARGUMENTS` does, in this process."""
    sys.argv = [module, *arguments]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # runpy warns if the module is already imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_all() -> None:
    for process in list(_living):
        process.kill()


atexit.register(_end_all)  # registered after multiprocessing's handler, so it runs before that one waits
