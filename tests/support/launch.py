"""Starts train.main or another module as a user would: as one process, or on several ranks as torchrun
does."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.tools.processes import children
from tests.support.forks import ROOT, Fork, environment, fork_module
from tests.support.worlds import launcher_store

TINY = [
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=64",
    "--train.seq_len=32",
    "--train.micro_batch_size=2",
    "--train.global_batch_size=8",
    "--optim.warmup_steps=2",
    "--optim.lr=3e-3",
    "--metrics.every=1",
    "--run.threads=1",
    "--checkpoint.every=0",
]
EAGER = ["--parallel.compile.enabled=false"]
LIMIT_S = 240.0  # of every wait: the machine may be busy
TORCHRUN_GRACE_S = 30.0  # after this time torchrun kills workers that have not exited on SIGTERM
POLL_S = 0.005


class Launch:
    """The ranks of one command, forked (tests/support/forks.py), with torchrun's handling of a failed
    rank."""

    def __init__(self, ranks: list[Fork], output: Path) -> None:
        self.ranks, self._output = ranks, output
        self._kill_s: float | None = None  # when ranks that were sent SIGTERM are killed

    @property
    def returncode(self) -> int:
        """The exit code of the only rank; of several ranks, as by torchrun, 1 if one of them failed."""
        codes = [rank.returncode for rank in self.ranks]
        return codes[0] if len(codes) == 1 else int(any(codes))  # type: ignore[return-value]

    def running(self) -> bool:
        """Whether a rank still runs. Once a rank has failed, the others are sent SIGTERM and killed later, as
        by torchrun."""
        codes = [rank.poll() for rank in self.ranks]
        if None not in codes:
            return False
        if self._kill_s is None and any(codes):
            self._kill_s = time.monotonic() + TORCHRUN_GRACE_S
            self.send_signal(signal.SIGTERM)
        elif self._kill_s is not None and time.monotonic() > self._kill_s:
            self.send_signal(signal.SIGKILL)
        return True

    def output(self) -> str:
        """The output so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait until all ranks have ended, and return the exit code."""
        self.wait_until(lambda: False, timeout_s)
        return self.returncode

    def wait_until(
        self, happened: Callable[[], object], limit_s: float = LIMIT_S, poll_s: float = POLL_S
    ) -> bool:
        """Poll until `happened()` is true (returns True) or all ranks have ended without it (returns False).
        Raises TimeoutExpired after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not happened():
            if not self.running():
                return bool(happened())
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(
                    f"{len(self.ranks)} ranks, which printed:\n{self.output()[-3000:]}", limit_s
                )
            time.sleep(poll_s)
        return True

    def send_signal(self, which: int) -> None:
        """Send a signal to all ranks that still run."""
        for rank in self.ranks:
            rank.send_signal(which)


@contextmanager
def started(
    processes: int,
    *arguments: str,
    output: Path,
    errors: Path | None = None,
    module: str = "train.main",
    folder: Path = ROOT,
    **env: str,
) -> Iterator[Launch]:
    """A running command, whose output goes to a file; at the end all its ranks are killed."""
    with launcher_store(processes) as store:
        # a new id for each launch: all have the same parent process
        run_id = env.pop("TORCHELASTIC_RUN_ID", secrets.token_hex(8))
        shared = {**store, "TORCHELASTIC_RUN_ID": run_id} if processes > 1 else {}
        ranks = [
            fork_module(
                module,
                *arguments,
                output=output,
                errors=errors,
                folder=folder,
                env=environment(
                    **shared, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if shared else {}), **env
                ),
            )
            for rank in range(processes)
        ]
        try:
            yield Launch(ranks, output)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, if they still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(below for child in children(pid) for below in family(child))]


def run(
    processes: int,
    *arguments: str,
    module: str = "train.main",
    timeout_s: float = LIMIT_S,
    folder: Path = ROOT,
    **env: str,
) -> Any:
    """Run a module in a folder to its end in forked processes; the result has returncode, stdout and stderr.

    Faster than `run_command`: for every test that does not test torchrun or the start of the interpreter.
    """
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name) / "out", Path(name) / "err"
        options = {"output": out, "errors": err, "module": module, "folder": folder}
        with started(processes, *arguments, **options, **env) as launch:  # type: ignore[arg-type]
            code = launch.wait(timeout_s)
        return subprocess.CompletedProcess(
            arguments, code, *(path.read_text(encoding="utf-8") for path in (out, err))
        )


def run_command(processes: int, *arguments: str) -> Any:
    """Run the real command with torchrun to its end; the result has returncode, stdout and stderr."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return subprocess.run(
        [*torchrun, "-m", "train.main", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl by step; the last row of a step counts."""
    return {row["step"]: row for row in rows_in(folder)}


def read_status(folder: Path) -> dict[str, Any]:
    """The content of status.json."""
    return json.loads((folder / "status.json").read_text())


def write_text(folder: Path) -> list[str]:
    """Write a few hundred kilobytes of learnable text, and return the arguments that train on it."""
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(
            "".join(f"line {n} of text {i} squares to {n * n}\n" for n in range(i, 1500 + i))
        )
    return [f"--data.source={text}", f"--data.cache_dir={folder / 'cache'}", "--data.eval_fraction=0.2"]
