"""Triton's interpreter, which runs kernels on a CPU, and tensors beyond which no access is possible."""

import ctypes
import mmap
import sys

import numpy
import torch
from torch import Tensor

INTERPRETED = {"TRITON_INTERPRET": "1"}  # the environment of a process that interprets its kernels


def forget_triton() -> None:
    """Let Triton be imported again: it reads the environment at import, and forks have imported it."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    numpy.seterr(all="ignore")  # it computes with numpy, and infinity / infinity is expected


def guarded(x: Tensor) -> Tensor:
    """A copy of x, with its strides, at the end of mapped memory: an access beyond it ends the process."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    end = -(-count * x.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + end
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0  # PROT_NONE
    values = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=end - count * x.element_size())
    return values.as_strided(x.shape, x.stride()).copy_(x)
