"""Measure how long ranks outlive a killed one, while their main threads are in a call that never returns."""

import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright.tools.processes import BenchError, find_running, make_environment, python_command, run_to_end
from meshwright.train.config import RunConfig
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown

WORKER = "meshwright.tools.bench.worker"
KILLED = 1


def hold_main_thread(device: torch.device, folder: str) -> NoReturn:
    """A worker's part: hold the main thread, as a collective of NCCL does whose peer is dead, under the
    product's shutdown."""
    shutdown = GracefulShutdown(RunConfig(), on_end=_ignore, on_lost=_ignore)
    shutdown.connect()
    shutdown.begin()
    path = Path(folder) / f"{read_rank_info().rank}.pid"
    path.with_suffix(".new").write_text(str(os.getpid()), encoding="utf-8")
    path.with_suffix(".new").rename(path)
    threading.Event().wait()
    raise AssertionError("unreachable")


def _ignore(reason: Any) -> None:
    """There is no status.json to write."""


@dataclass
class _Observed:
    """The ranks of a run: one is killed once all are held. Times are of time.monotonic."""

    folder: Path
    world_size: int
    killed_s: float = 0.0
    processes: dict[int, Any] = field(default_factory=dict)  # of the ranks that run, by rank
    ended_s: dict[int, float] = field(default_factory=dict)

    def poll(self) -> None:
        """Kill the rank when all are held; record which others have ended since."""
        if not self.killed_s:
            paths = [self.folder / f"{rank}.pid" for rank in range(self.world_size)]
            if not all(path.exists() for path in paths):
                return
            found = find_running(int(path.read_text(encoding="utf-8")) for path in paths)
            self.processes = dict(enumerate(found))
            self.processes.pop(KILLED).send_signal(signal.SIGKILL)
            self.killed_s = time.monotonic()
        for rank, process in list(self.processes.items()):
            if not find_running([process.pid]):
                self.ended_s[rank] = time.monotonic() - self.killed_s
                del self.processes[rank]


def measure_dead_rank(processes: int) -> dict[str, float]:
    """Start processes with torchrun, kill one, and return the seconds until the first and the last of the
    others has ended. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        command = [
            *python_command(WORKER, processes, folder / "torchrun"),
            "held",
            f"--folder={folder}",
            "--threads=1",
            "--device=cpu",
            f'--settings={{"folder": "{folder}"}}',
        ]
        observed = _Observed(folder, processes)
        try:
            run_to_end(command, make_environment(1, {}), folder / "log", observed.poll)
        except BenchError:  # torchrun reports the killed rank
            if not observed.killed_s:
                raise
        observed.poll()
        return {"first_s": min(observed.ended_s.values()), "last_s": max(observed.ended_s.values())}
