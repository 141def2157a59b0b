"""One of two processes that end while gloo's thread of rank 0 waits for the interpreter. `sys.exit | end_process`."""

import atexit
import os
import sys
import time

if os.environ["RANK"] == "0":
    atexit.register(pow, 3, 12_000_000)  # last of all exit functions, first here: some seconds that let no other thread in

import torch
import torch.distributed as dist

from train.ending import end_process


def main() -> None:
    dist.init_process_group("gloo")
    time.sleep(0.5 * dist.get_rank())  # rank 0 waits for the other, and ends meanwhile
    tensor = torch.ones(8)
    tensor.keep_the_python_object = True  # type: ignore[attr-defined]
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 1:
        work.wait()
    del tensor, work
    print(f"rank {dist.get_rank()} has done all", flush=True)
    if sys.argv[1] == "end_process":
        end_process(0)


if __name__ == "__main__":
    main()
