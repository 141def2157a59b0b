"""Commands of the project on fake GPUs, each in processes of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fake_gpu.install import ROOT, FakeGpu
from tests.support.launch import LIMIT_S


def start(
    gpu: FakeGpu, scratch: Path, *command: str, devices: int = 1, root: Path = ROOT, **env: str
) -> subprocess.Popen[str]:
    """python -m COMMAND with so many fake GPUs, whose output is to be read."""
    environment = {**gpu.environment(scratch, devices, root), **env}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(gpu: FakeGpu, scratch: Path, *command: str, **options: Any) -> tuple[int, str]:
    """The same to its end: exit code, and what was printed."""
    with start(gpu, scratch, *command, **options) as process:
        try:
            said = process.communicate(timeout=LIMIT_S)[0]
        finally:
            process.kill()
    return process.returncode, said
