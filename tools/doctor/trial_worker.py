"""`python -m tools.doctor.trial_worker compile|all_reduce`: a process of a trial, which prints JSON."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from meshwright.train.distributed.exit import end_process

SIZE = 512  # of the square matrices: 0.27 GFLOP, a millisecond of one core
REDUCED_BYTES = 2**24
ROUNDS = 5
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Run the trial that the first argument names, and print its result."""
    result = {"compile": try_compile, "all_reduce": try_all_reduce}[sys.argv[1]]()
    print(json.dumps({"said": result}), flush=True)
    end_process(0)


def try_compile() -> str:
    """Compile a matrix product with ReLU and addition, compare it with eager execution, and time both the
    compilation and the compiled function."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))

    def work() -> torch.Tensor:
        return torch.relu(a @ b) + 1

    start_s = time.perf_counter()
    compiled = torch.compile(work, fullgraph=True)
    torch.testing.assert_close(compiled(), work(), rtol=1e-2, atol=1e-2)
    compiling_s = time.perf_counter() - start_s
    timer = Timer("work()", globals={"work": compiled}, num_threads=torch.get_num_threads())
    rate = 2 * SIZE**3 / timer.blocked_autorange().median / 1e9
    return (
        f"{compiling_s:.1f} s to compile; a matrix product of size {SIZE} runs at {rate:.0f} GFLOP/s, "
        f"float32, {device.type}"
    )


def try_all_reduce() -> str:
    """All-reduce 16 MiB over two processes, check the sum, and time it."""
    rank, nccl = int(os.environ["RANK"]), torch.cuda.is_available() and torch.cuda.device_count() > 1
    backend, device = ("nccl", torch.device("cuda", rank)) if nccl else ("gloo", torch.device("cpu"))
    if nccl:
        torch.cuda.set_device(device)  # Timer synchronizes the current device
    dist.init_process_group(backend, timeout=TIMEOUT)
    tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    if tensor[-1].item() != 3:
        raise RuntimeError(f"the sum of 1 and 2 over two processes is {tensor[-1].item()}")
    # timeit, unlike autorange, runs equally often on both ranks: ROUNDS times after 2 warmups
    seconds = (
        Timer("reduce(tensor)", globals={"reduce": dist.all_reduce, "tensor": tensor}).timeit(ROUNDS).mean
    )
    dist.destroy_process_group()
    return f"16 MiB over two processes: {REDUCED_BYTES / seconds / 1e9:.2f} GB/s, {backend}"


if __name__ == "__main__":
    main()
