"""Tried for real, in processes of their own: a compiled product, and two processes that reduce together."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from meshwright.parallel.errors import one_line
from meshwright.tools.doctor.facts import TrialResult

LIMIT_S = 120.0  # a busy machine; without work elsewhere it is a few seconds
MODULE = "meshwright.tools.doctor.trial_worker"


class Trial:
    """A check under way: its processes, and what they print."""

    def __init__(self, kind: str, environments: Sequence[Mapping[str, str]]) -> None:
        self._outputs, self._errors = ([_scratch() for _ in environments] for _ in range(2))
        command = [sys.executable, "-m", MODULE, kind]
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            for environment, output, errors in zip(environments, self._outputs, self._errors, strict=True)
        ]

    def result(self) -> TrialResult:
        """Wait for it. What the first process that failed said last is why."""
        try:
            for process in self._processes:
                process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return TrialResult(failed=f"no end within {LIMIT_S:g} s")
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        texts, errors = ([_read(file) for file in files] for files in (self._outputs, self._errors))
        for process, text in zip(self._processes, errors, strict=True):
            if process.returncode:
                return TrialResult(failed=_last_words(text) or f"exit code {process.returncode}")
        return read_said(texts[0])


def read_said(output: str) -> TrialResult:
    """A check's last line of JSON; libraries print what they like before and after it."""
    for line in reversed(output.splitlines()):
        try:
            return TrialResult(said=str(json.loads(line)["said"]))
        except (ValueError, TypeError, KeyError, IndexError):
            continue
    return TrialResult(failed=f"it ended without a result; its last line: {_last_words(output) or 'none'}")


def try_compile(folder: Path) -> Trial:
    """A small product, compiled anew: its compiler's files go into `folder`."""
    anew = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return Trial("compile", [anew])


def try_all_reduce() -> Trial:
    """Over gloo, or NCCL where there are two GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return Trial("all_reduce", [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)])


def _scratch() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")  # _read closes it


def _read(output: IO[str]) -> str:
    with output:
        output.seek(0)
        return output.read()


def _last_words(text: str) -> str:
    """The last line that names an error, or the last at all."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "InvalidCxxCompiler"))
    ]
    return one_line((named or lines or [""])[-1], 300)
