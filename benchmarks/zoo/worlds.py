"""Runs a function on forked gloo ranks: a fork of this process has all that it has imported."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 60.0  # of a function; a rank waits half as long for another


class WorldError(RuntimeError):
    """A rank raised, crashed or did not end in time: its message."""


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) on each of `ranks` ranks of a gloo group, and return the result of rank 0.
    No operator of torch may have run in this process. Raises WorldError for the first rank that fails."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="meshwright-zoo-") as name:
        jobs = [
            context.Process(target=_run_rank, args=(rank, ranks, name, function, arguments))
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        deadline_s = time.monotonic() + LIMIT_S
        for job in jobs:
            job.join(max(0.0, deadline_s - time.monotonic()))
            if job.exitcode is None:
                job.kill()
                job.join()
        files = [Path(name, f"{rank}.pkl") for rank in range(ranks)]
        results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    failed = [result for result in results if result and "error" in result]
    if failed:
        raise WorldError(min(failed, key=lambda result: result["at_s"])["error"])
    if missing := [rank for rank, result in enumerate(results) if result is None]:
        raise WorldError(f"rank {missing[0]} ended with {jobs[missing[0]].exitcode} and without a result")
    return results[0]["value"]


def _run_rank(
    rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    output = os.open(f"{folder}/{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
    try:
        result = {"value": function(*arguments)}
        dist.barrier()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "at_s": time.monotonic()}
        result["trace"] = traceback.format_exc()
        if os.environ.get("ZOO_TRACE"):
            Path(os.environ["ZOO_TRACE"]).open("a").write(result["trace"])
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    os._exit(0)  # no teardown of the interpreter while gloo's threads run
