"""`train.main` with async tensor parallelism on CPUs. Run by test_async_tp.py.

torch has a slow fallback of the fused operators (a real collective and a real matrix product) for its tests
on GPUs: here CPUs run it. Inductor's pass does nothing without NCCL: here NCCL is reported as available. The
check of the device, which would refuse the run, is skipped. Everything else is as on a GPU: our plan, our
switches, inductor's pass and code.
"""

import sys

import torch
import torch.distributed._symmetric_memory as symmetric_memory

import meshwright.parallel.compile.async_tp
from meshwright.train.main import main

if __name__ == "__main__":
    operators = torch.library.Library("symm_mem", "IMPL")
    operators.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    operators.impl(
        "fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU"
    )
    torch.distributed.is_nccl_available = lambda: True
    meshwright.parallel.compile.async_tp.check_async_tp = lambda *_: None  # type: ignore[assignment]
    main(sys.argv[1:])
