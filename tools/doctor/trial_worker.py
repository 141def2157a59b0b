"""`python -m tools.doctor.trial_worker compile|all_reduce`: one process of a check. Prints one line of
JSON."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.train.distributed.exit import end_process

SIZE = 512  # of the square matrices: 0.27 GFLOP, a millisecond of one core
REDUCED_BYTES = 2**24
ROUNDS = 5
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Do what the first argument says."""
    said = {"compile": try_compile, "all_reduce": try_all_reduce}[sys.argv[1]]()
    print(json.dumps({"said": said}), flush=True)
    end_process(0)


def try_compile() -> str:
    """Compile a product with what follows it, compare with the eager one, and time both parts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))

    def work() -> torch.Tensor:
        return torch.relu(a @ b) + 1

    start_s = time.perf_counter()
    compiled = torch.compile(work, fullgraph=True)
    torch.testing.assert_close(compiled(), work(), rtol=1e-2, atol=1e-2)
    compiling_s = time.perf_counter() - start_s
    step_s = _median_s(lambda: compiled().sum().item())
    rate = 2 * SIZE**3 / step_s / 1e9
    return (
        f"{compiling_s:.1f} s to compile; a product of {SIZE} runs at {rate:.0f} GFLOP/s, float32, "
        f"{device.type}"
    )


def try_all_reduce() -> str:
    """16 MiB over two processes, and the sum is right."""
    rank, nccl = int(os.environ["RANK"]), torch.cuda.is_available() and torch.cuda.device_count() > 1
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    dist.init_process_group("nccl" if nccl else "gloo", timeout=TIMEOUT)
    tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    if tensor[-1].item() != 3:
        raise RuntimeError(f"the sum of 1 and 2 over two processes is {tensor[-1].item()}")

    def reduce() -> None:
        dist.all_reduce(tensor)
        if nccl:
            torch.cuda.synchronize()

    seconds = _median_s(reduce)
    dist.destroy_process_group()
    return (
        f"16 MiB over two processes: {REDUCED_BYTES / seconds / 1e9:.2f} GB/s, {'nccl' if nccl else 'gloo'}"
    )


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return sorted(times)[ROUNDS // 2]


if __name__ == "__main__":
    main()
