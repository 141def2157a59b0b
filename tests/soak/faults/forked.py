"""pytest in a process forked from this one, which has imported the libraries but not the product: importing
them takes longer than most tests."""

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LIBRARIES = (
    "numpy",
    "yaml",
    "einops",
    "rich.progress",
    "jsonargparse",
    "tokenizers",
    "safetensors.torch",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama",
)
OURS = ("tests", "models", "parallel", "train", "tools", "meshwright")


def load_libraries() -> None:
    """Import the libraries of the product and its tests, as far as installed. Numerical libraries must not
    start threads, which a fork would lack."""
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            with suppress(ImportError):
                importlib.import_module(name)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        del os.environ[name]


class ForkedPytest:
    """pytest with these arguments in `root`, its output in a file, in its own session."""

    def __init__(self, root: Path, arguments: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(root, env, output)
                code = _run_pytest(arguments)
            except BaseException as error:
                code = 3
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                sys.stdout.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """Kill it and its process group."""
        if self.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)


def _become(root: Path, env: Mapping[str, str], output: Path) -> None:
    """Set up this process like one that was just started in `root`: nothing of this project is imported
    yet."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= env
    os.chdir(root)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    own_root = str(Path(__file__).parents[3])
    sys.path[:] = [
        str(root),
        *env["PYTHONPATH"].split(":"),
        *(path for path in sys.path if path not in ("", own_root, str(root))),
    ]
    for path, number in ((os.devnull, 0), (output, 1), (output, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, number)
        os.close(opened)


def _run_pytest(arguments: Sequence[str]) -> int:
    import pytest

    return int(pytest.main(list(arguments)))
