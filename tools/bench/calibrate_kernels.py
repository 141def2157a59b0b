"""Which kernels a GPU ran for products and attention: two machines of one kind differ by the libraries that
they have."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._autograd import DeviceType

from meshwright.models.attention import CausalAttention

TOKENS, WIDTH, HEADS, HEAD_DIM = 4096, 4096, 32, 128  # a layer of Llama 8B


def find_kernels(device: torch.device) -> dict[str, list[str]]:
    """Names by what was asked for, in bfloat16; none on a CPU."""
    if device.type != "cuda":
        return {}
    x, w = (torch.randn(size, WIDTH, device=device, dtype=torch.bfloat16) for size in (TOKENS, WIDTH))
    q, k, v = (
        torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    attention = CausalAttention()
    return {
        "matmul": kernel_names(lambda: F.linear(x, w), device),
        "attention_forward": kernel_names(lambda: attention(q, k, v), device),
        "attention_forward_and_backward": kernel_names(lambda: attention(q, k, v).sum().backward(), device),
    }


def kernel_names(run: Callable[[], Any], device: torch.device) -> list[str]:
    """Of the GPU kernels that `run` starts; none on a CPU."""
    if device.type != "cuda":
        return []
    run()  # choosing an algorithm may run others
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events() if event.device_type == DeviceType.CUDA})
