"""Trials in separate processes: a compiled matrix product, and an all-reduce of two processes."""

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

LIMIT_S = 120.0  # enough on a busy machine; on an idle one a trial takes a few seconds
REASON_LETTERS = 300
MODULE = "meshwright.tools.doctor.trial_worker"


def try_compile(folder: Path) -> TrialResult:
    """Compile a small matrix product without a cache; the compiler's files go to `folder`."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return run_trial("compile", environment)


def try_all_reduce() -> TrialResult:
    """All-reduce over two processes: NCCL if there are two GPUs, else gloo."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with ThreadPoolExecutor(len(ranks)) as executor:
        results = list(executor.map(lambda rank: run_trial("all_reduce", rank), ranks))
    return next((result for result in results if result.failed), results[0])


def run_trial(kind: str, environment: Mapping[str, str]) -> TrialResult:
    """Run one process of a trial. If it fails, the reason is its first error or else its last line."""
    # a file, not a pipe: a compiler that outlives its process would keep a pipe open
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
            return TrialResult(failed=f"timeout after {LIMIT_S:g} s")
        output.seek(0)
        printed = output.read()
    if code:
        return TrialResult(failed=find_reason(printed, REASON_LETTERS) or f"exit code {code}")
    return parse_result(printed)


def parse_result(output: str) -> TrialResult:
    """Return the result from the last line of JSON; libraries print lines before and after it."""
    for line in reversed(output.splitlines()):
        try:
            return TrialResult(said=str(json.loads(line)["said"]))
        except (ValueError, TypeError, KeyError, IndexError):
            continue
    return TrialResult(
        failed=f"exited without a result; its last line: {find_reason(output, REASON_LETTERS) or 'none'}"
    )
