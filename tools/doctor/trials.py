"""Tried for real, in processes of their own: a compiled product, and two processes that reduce together."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.tools.doctor.facts import TrialResult
from meshwright.tools.processes import find_reason

LIMIT_S = 120.0  # a busy machine; without work elsewhere it is a few seconds
REASON_LETTERS = 300
MODULE = "meshwright.tools.doctor.trial_worker"


def try_compile(folder: Path) -> TrialResult:
    """A small product, compiled anew: its compiler's files go into `folder`."""
    anew = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return run_trial("compile", anew)


def try_all_reduce() -> TrialResult:
    """Over gloo, or NCCL where there are two GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with ThreadPoolExecutor(len(ranks)) as together:
        results = list(together.map(lambda rank: run_trial("all_reduce", rank), ranks))
    return next((result for result in results if result.failed), results[0])


def run_trial(kind: str, environment: Mapping[str, str]) -> TrialResult:
    """One process of a check. What it said last, where it failed, is why."""
    # a file, not a pipe: a compiler that outlives its process would hold a pipe open
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        command = [sys.executable, "-m", MODULE, kind]
        try:
            code = subprocess.run(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return TrialResult(failed=f"no end within {LIMIT_S:g} s")
        output.seek(0)
        printed = output.read()
    if code:
        return TrialResult(failed=find_reason(printed, REASON_LETTERS) or f"exit code {code}")
    return read_said(printed)


def read_said(output: str) -> TrialResult:
    """A check's last line of JSON; libraries print what they like before and after it."""
    for line in reversed(output.splitlines()):
        try:
            return TrialResult(said=str(json.loads(line)["said"]))
        except (ValueError, TypeError, KeyError, IndexError):
            continue
    return TrialResult(
        failed=f"it ended without a result; its last line: {find_reason(output, REASON_LETTERS) or 'none'}"
    )
