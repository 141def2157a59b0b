"""`train.main` on CPUs whose torch is told of what async tensor parallelism needs of GPUs. Run by
test_async_tp.py.

torch has the fused operators' own slow form, a real collective and a real product, for GPUs under test only:
here it is what CPUs run. Inductor's pass does nothing in a torch without NCCL: here it is told that there is
one. And the check of the device, which would refuse the run, is left out. All else is what a GPU would get:
our plan, our switches, inductor's pass and code.
"""

import sys

import torch
import torch.distributed._symmetric_memory as symmetric_memory

import meshwright.parallel.compile.setup
from meshwright.train.main import main

if __name__ == "__main__":
    operators = torch.library.Library("symm_mem", "IMPL")
    operators.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    operators.impl(
        "fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU"
    )
    torch.distributed.is_nccl_available = lambda: True
    meshwright.parallel.compile.setup.check_async_tp = lambda *_: None  # type: ignore[assignment]
    main(sys.argv[1:])
