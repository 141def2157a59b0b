"""Trials in processes of their own: a compiled matrix product, and an all-reduce of two processes.

`python -m meshwright.tools.doctor.trials compile|all_reduce RANK FOLDER` is such a process.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from meshwright.tools.processes import find_reason, started
from meshwright.train.distributed.exit import end_process

LIMIT_S = 240.0  # enough on a busy machine; on an idle one a trial takes a few seconds
REASON_LETTERS = 300
SIZE = 512  # of the square matrices
REDUCED_BYTES, ROUNDS = 2**24, 5


def run_trial(kind: str, processes: int) -> str:
    """Run the processes of a trial and return its result. Raises as the function of `start_trial`."""
    with start_trial(kind, processes) as result_of:
        return result_of()


@contextlib.contextmanager
def start_trial(kind: str, processes: int) -> Iterator[Callable[[], str]]:
    """Start the processes of a trial. The block is given a function that waits for its result; a process that
    still runs at the end of the block, such as after an interrupt, is ended.

    The function raises RuntimeError with the first error that a process prints, or else its last line;
    TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as name, contextlib.ExitStack() as running:
        folder, command = Path(name), [sys.executable, "-m", "meshwright.tools.doctor.trials", kind]
        trials = dict[Path, subprocess.Popen[bytes]]()
        for rank in range(processes):
            log = folder / f"output-{rank}"
            trials[log] = running.enter_context(started([*command, str(rank), name], None, log))

        def wait() -> str:
            for log, process in trials.items():
                code = process.wait(LIMIT_S)
                if code:
                    printed = log.read_text(errors="replace")
                    raise RuntimeError(find_reason(printed, REASON_LETTERS) or f"exit code {code}")
            return (folder / "result").read_text()

        yield wait


def try_compile(rank: int, folder: Path) -> str:
    """Compile a matrix product with ReLU and addition, without a cache; compare it with eager execution."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # before torch reads them
    os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))

    def work() -> torch.Tensor:
        return torch.relu(a @ b) + 1

    start_s = time.perf_counter()
    compiled = torch.compile(work, fullgraph=True)
    torch.testing.assert_close(compiled(), work(), rtol=1e-2, atol=1e-2)
    return f"{time.perf_counter() - start_s:.1f} s to compile, {device.type}"


def try_all_reduce(rank: int, folder: Path) -> str:
    """All-reduce 16 MiB over two processes, by NCCL on two GPUs, else gloo; check and time it."""
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    nccl = torch.cuda.is_available() and torch.cuda.device_count() > 1
    backend, device = ("nccl", torch.device("cuda", rank)) if nccl else ("gloo", torch.device("cpu"))
    if nccl:
        torch.cuda.set_device(device)  # Timer synchronizes the current device
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=timeout)
    tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    if tensor[-1].item() != 3:
        raise RuntimeError(f"the sum of 1 and 2 over two processes is {tensor[-1].item()}")
    # timeit, unlike autorange, runs equally often on both ranks: ROUNDS times after 2 warmups
    timer = Timer("reduce(tensor)", globals={"reduce": dist.all_reduce, "tensor": tensor})
    rate = REDUCED_BYTES / timer.timeit(ROUNDS).mean / 1e9
    dist.destroy_process_group()
    return f"16 MiB over two processes: {rate:.2f} GB/s, {backend}"


if __name__ == "__main__":
    _, kind, rank, folder = sys.argv
    result = {"compile": try_compile, "all_reduce": try_all_reduce}[kind](int(rank), Path(folder))
    if rank == "0":
        Path(folder, "result").write_text(result)
    end_process(0)
