"""The settings of PyTorch's CUDA allocator."""

import os

import torch

# what torch reads at the first use of the allocator
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def use_expandable_segments() -> bool:
    """Let the allocator's segments grow in place, before anything is allocated on the GPU; False where one of
    VARIABLES is set, which then alone decides.

    A segment that can grow leaves no gaps too small for the next request: memory that is reserved and not
    allocated, of which sharded training has much, because units of different sizes are gathered and freed all
    the time
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True
