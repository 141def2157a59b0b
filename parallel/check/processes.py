"""Runs a function on ranks that it starts itself, and returns what each one returned."""

import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, parent_process, resource_tracker, set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from meshwright.parallel.errors import PlanError, one_line, place_of

NO_PREMUL = ": call set_force_sum_reduction_for_comms(True) before, as gloo has no such reduction"
LIMIT = timedelta(minutes=5)  # for a collective, in which ranks wait for one that does not call it


def run_ranks(function: Callable[..., Any], ranks: int, job: Sequence[Any], device: str = "cpu") -> list[Any]:
    """Return the results of `function(*job)` of each rank of a process group: gloo, or NCCL for "cuda".

    Raises PlanError if a rank fails, with the first error and where it was raised.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise PlanError(
            f"check: device=cuda needs a GPU for each of {ranks} processes, and there are "
            f"{torch.cuda.device_count()}: use smaller degrees, or cpu"
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-check-") as name:
        folder = Path(name)
        try:
            torch.save((function, job), folder / "job.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PlanError(
                f"check: the model cannot be sent to the processes ({error}): define its classes and "
                "functions at the top of a module"
            ) from error
        _start_forkserver()
        try:
            context = start_processes(
                _run_rank, (ranks, name, device), ranks, join=False, start_method="forkserver"
            )
            _wait(context)
        except ProcessException as error:
            raise PlanError(
                f"check: {one_line(error)} before its work was done, as by os._exit, a crash or too little "
                "memory: what it printed says more. The script that calls it needs "
                '`if __name__ == "__main__":`, because processes import it'
            ) from error
        results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    failures = [result for result in results if isinstance(result, RankFailure)]
    if failures:
        raise PlanError(f"check: {min(failures, key=lambda each: each.is_of_others).text}")
    return results


def _start_forkserver() -> None:
    """Start the process that ranks are forked from, which has imported ours: torch takes seconds for it. It
    inherits that SIGINT is blocked: Ctrl-C in its imports would print their traceback."""
    set_forkserver_preload([module for module in sys.modules if module.startswith("meshwright.")])
    resource_tracker.ensure_running()  # which unblocks it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _wait(context: ProcessContext) -> None:
    """Wait for the processes, and end them if this one is interrupted."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # our error says it
    try:
        while not context.join():
            pass
    except BaseException:
        for process in context.processes:
            process.kill()
        raise


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed. `is_of_others`: whether only because another did."""

    text: str
    is_of_others: bool


def _run_rank(rank: int, ranks: int, folder: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # interrupted before this rank, and others, were forked
        os._exit(1)
    os.environ |= {  # which transformers and accelerate read, as of torchrun
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=LIMIT,
    )
    try:
        function, job = torch.load(f"{folder}/job.pt", weights_only=False)
        result = function(*job)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, PlanError) else f"{type(error).__name__}: "
        closed = "Connection closed" in str(error) or "Timed out" in str(error)
        said = str(error).removeprefix("check: ")
        result = RankFailure(f"{kind}{said}{place_of(error)}{NO_PREMUL if 'PREMUL' in said else ''}", closed)
    torch.save(result, f"{folder}/{rank}.pt")
    os._exit(0)  # other ranks may still wait for one that failed
