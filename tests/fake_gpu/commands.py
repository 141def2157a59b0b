"""Install the fake GPU for the tests, and run commands of the project on it, in separate processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshwright.tools.dryrun.install import ROOT, FakeGpu, install

RUN_S = 900  # limit of a command, which compiles for minutes on a busy machine


def install_for_tests() -> FakeGpu:
    """Install the fake GPU in MESHWRIGHT_TESTS_CACHE, or ~/.cache/meshwright-tests (tests have a separate
    HOME). Raises FakeGpuError if it cannot be installed."""
    named = os.environ.get("MESHWRIGHT_TESTS_CACHE") or "~/.cache/meshwright-tests"
    return install(Path(os.path.expanduser(named)).absolute(), print)


def start(gpu: FakeGpu, scratch: Path, *command: str, devices: int = 1, **env: str) -> subprocess.Popen[str]:
    """Start python -m COMMAND with `devices` fake GPUs; its output is a pipe."""
    environment = {**gpu.environment(scratch, devices), **env}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(gpu: FakeGpu, scratch: Path, *command: str, **options: Any) -> tuple[int, str]:
    """Run a command to its end; return its exit code and output."""
    with start(gpu, scratch, *command, **options) as process:
        try:
            output = process.communicate(timeout=RUN_S)[0]
        finally:
            process.kill()
    return process.returncode, output
