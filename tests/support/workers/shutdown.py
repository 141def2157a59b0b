"""One rank of a run without a model: steps that sleep, and the agreement to stop. Each rank logs to a
file."""

import contextlib
import ctypes
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import RunConfig
from meshwright.train.errors import PeerLostError, SaveError
from meshwright.train.fault_tolerance import shutdown as shutdown_module
from meshwright.train.fault_tolerance.peers import LostPeer
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown

STEP_S = 0.02
FOR_EVER_S = 600


@dataclass(frozen=True)
class Scene:
    """The scenario: the kind of `trouble`, its rank, and the time limits, of which `exit_s`, `lost_s` and
    `close_s` stand for constants of the shutdown."""

    folder: Path
    ranks: int
    grace_s: float = 60.0
    max_hours: float = 0.0
    trouble: str = ""
    rank_in_trouble: int = 0
    exit_s: float = shutdown_module.EXIT_S
    lost_s: float = shutdown_module.LOST_S
    close_s: float = shutdown_module.CLOSE_S


def play(scene: Scene, rank: int) -> None:
    """Run one rank of the scenario."""
    log = Log(scene.folder / f"{rank}.log")
    (scene.folder / f"{rank}.pid").write_text(str(os.getpid()))

    def on_end(reason: str) -> None:
        log(f"ends: {reason}")
        if scene.trouble == "dead disk":
            time.sleep(FOR_EVER_S)

    def on_lost(lost: LostPeer) -> None:
        log(f"lost: {lost.text}, found {lost.found}{', by a signal' * lost.by_signal}")

    shutdown_module.EXIT_S, shutdown_module.LOST_S = scene.exit_s, scene.lost_s
    shutdown_module.CLOSE_S = scene.close_s
    config = RunConfig(grace_s=scene.grace_s, max_hours=scene.max_hours)
    shutdown = GracefulShutdown(config, on_end, on_lost)
    dist.init_process_group(
        "gloo", init_method=f"file://{scene.folder}/store", rank=rank, world_size=scene.ranks
    )
    shutdown.connect()
    if scene.trouble in ("lost", "lost by a signal"):
        shutdown._lose_peer(LostPeer("rank 1 is gone", False, scene.trouble == "lost by a signal"))
    if scene.trouble in ("set-up", "lost", "lost by a signal"):
        log("step 3")
        time.sleep(FOR_EVER_S)
    shutdown.start(TrainPosition())
    step, failed = 0, False
    try:
        while not shutdown.should_stop():
            step += 1
            log(f"step {step}")
            take_step(scene, shutdown, rank, step)
    except PeerLostError as error:
        log(f"PeerLostError: {error}")
        os._exit(1)
    except SaveError:
        failed = True
    if scene.trouble in ("long save", "dead disk", "holds Python's lock"):
        log("saves")
        if scene.trouble == "holds Python's lock":
            ctypes.PyDLL(None).sleep(FOR_EVER_S)
        time.sleep(FOR_EVER_S)
    if scene.trouble == "last rows" and rank == 0:
        for peer in range(1, scene.ranks):
            wait_for_end_of(scene.folder / f"{peer}.pid")
        time.sleep(10 * scene.lost_s)
    log(f"stopped at {step}: {shutdown.reason}, failed {failed}")
    shutdown.end()
    dist.destroy_process_group()


def wait_for_end_of(pid_file: Path) -> None:
    """Wait until the process whose number is in the file has ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(pid_file.read_text()), 0)
            time.sleep(0.01)


def take_step(scene: Scene, shutdown: GracefulShutdown, rank: int, step: int) -> None:
    time.sleep(STEP_S)
    if step != 5:
        return
    if scene.trouble == "device":
        threading.Event().wait()  # as for a collective on a GPU whose peer is dead
    if scene.trouble == "error" and rank == scene.rank_in_trouble:
        shutdown.report_failure("DataError: a file is gone")
        time.sleep(2 * scene.lost_s)  # a long way to its exit
        os._exit(2)
    if scene.trouble == "error":
        threading.Event().wait()
    if scene.trouble == "compiler" and rank == scene.rank_in_trouble:
        ctypes.PyDLL(None).usleep(int(10 * scene.lost_s * 1e6))  # holds Python's lock
    if scene.trouble == "collective":
        if rank == scene.rank_in_trouble:
            time.sleep(FOR_EVER_S)
        dist.all_reduce(torch.ones(1))
    if scene.trouble == "failed save" and rank == scene.rank_in_trouble:
        request = partial(shutdown.request, "OSError: disk full", failed=True)
        threading.Thread(target=request).start()


class Log:
    """A file written without a buffer, so that it is complete if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())
