"""Runs a function on the ranks of a gloo group, forked from this process: a fork takes a fraction of a
second, a start that imports torch and transformers ten."""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 120.0  # of a function; a rank waits half as long for another


class RankError(RuntimeError):
    """A rank raised, crashed or did not end in time."""


def run_forked(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) on each of `ranks` ranks, and return the result of rank 0.

    No operator may have run in this process on other devices than meta, because a fork has none of the
    threads that torch starts. Raises RankError with the message of the rank that failed first.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as name:
        folder = Path(name)
        processes = [
            fork.Process(target=_run_rank, args=(rank, ranks, folder, function, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline_s = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.join()
        return _result(folder, [process.exitcode for process in processes])


def _result(folder: Path, exit_codes: list[int | None]) -> Any:
    """Return the result of rank 0. Raises RankError."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RankError(errors[0].read_text())
    for rank, code in enumerate(exit_codes):
        if not (folder / f"{rank}.result").exists():
            last = (folder / f"{rank}.out").read_text(errors="replace").strip().splitlines()[-1:]
            raise RankError(f"rank {rank} ended with {code} and without a result: {''.join(last)}")
    return pickle.loads((folder / "0.result").read_bytes())


def _run_rank(
    rank: int, ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    output = os.open(folder / f"{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    # as torchrun sets them: libraries take a process without them for the only one
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    store, patience = f"file://{folder}/store", timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(*arguments)))
        dist.barrier()  # a rank must not exit while others still communicate with it
    except Exception as error:  # of any kind: it is what the caller wants to know
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # no teardown of the interpreter while gloo's threads run
