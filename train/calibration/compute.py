"""Measure the rates of one device (matrix products by size, attention, memory-bound and tiny operations) and
the collectives between the devices of a node.

The timed functions are those of a training step: the three products of a linear layer, the model's attention
with autograd, compiled norm and SwiGLU, the fused AdamW. Inputs are random, because constant inputs draw less
power and therefore run faster on a GPU, and rotate through more memory than the caches hold. Collectives are
timed at several sizes, then latency and bandwidth are fitted. The fitted model is the planner's: a ring of n
members takes n - 1 hops with equal latency (twice as many in an all-reduce), and every member sends (n - 1) /
n of the full tensor (twice as much in an all-reduce). Shapes: B batch, T tokens, D dim, F ffn dim.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.operators import attention_flops
from meshwright.parallel.planner.hardware import Curve, Link
from meshwright.train.calibration.timing import (
    ROTATED_BYTES,
    AttentionShape,
    Products,
    Run,
    Timer,
    attention_runs,
    draw,
    product_runs,
    rotate,
)
from meshwright.train.config import Config
from meshwright.train.memory import peak_resident_bytes
from meshwright.train.planning.device_defaults import attention_on_device

DTYPES = ("float32", "bfloat16")
TINY_OPERATIONS = 256


@dataclass(frozen=True)
class Scale:
    """The sizes measured on a kind of device.

    Args:
        products: linear layers
        attention: attention calls
        memory: tokens and width of the tensors of element-wise operations
        budget_s: seconds of repetition of each measurement
    """

    products: Sequence[Products]
    attention: Sequence[AttentionShape]
    memory: tuple[int, int]
    budget_s: float


# Layers of models that a laptop can train, dim 128 to 1024, full and sharded by tp.
CPU_SCALE = Scale(
    products=(
        (256, 128, 128),
        (512, 256, 128),
        (512, 256, 256),
        (1024, 256, 256),
        (1024, 256, 768),
        (1024, 512, 768),
        (1024, 512, 1536),
        (2048, 512, 1536),
        (2048, 512, 4096),
        (2048, 1024, 3072),
    ),
    attention=(
        AttentionShape(4, 8, 4, 64, 256),
        AttentionShape(4, 4, 4, 64, 256),
        AttentionShape(2, 8, 4, 64, 512),
    ),
    memory=(1024, 1024),
    budget_s=0.6,
)
# Layers of Llama 8B, 70B and 405B, full and sharded by tp, and the head of the 8B.
GPU_SCALE = Scale(
    products=(
        (1024, 4096, 512),
        (2048, 4096, 1024),
        (2048, 4096, 4096),
        (4096, 4096, 4096),
        (4096, 8192, 3584),
        (8192, 4096, 4096),
        (8192, 4096, 14336),
        (8192, 8192, 28672),
        (8192, 4096, 128256),
        (16384, 16384, 53248),
    ),
    attention=(
        AttentionShape(4, 32, 8, 128, 2048),
        AttentionShape(2, 32, 8, 128, 4096),
        AttentionShape(1, 32, 8, 128, 8192),
    ),
    memory=(8192, 4096),
    budget_s=1.0,
)


def quicker(scale: Scale) -> Scale:
    """Return a smaller scale: the smallest, a middle and the second largest product, one attention call, a
    fifth of the time."""
    products = [scale.products[i] for i in (0, len(scale.products) // 2, -2)]
    return Scale(products, scale.attention[:1], scale.memory, scale.budget_s / 5)


def measure_compute(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure one device, at the same time as the other processes. Returns plain data: rates in operations or
    bytes per second."""
    taken = taken_gib(device)  # first, while memory is otherwise empty
    dist.barrier()
    scale = CPU_SCALE if device.type == "cpu" else GPU_SCALE
    scale = quicker(scale) if quick else scale
    clock = Timer(device, scale.budget_s)
    attention = {
        dtype: [measure_attention(clock, shape, dtype) for shape in scale.attention] for dtype in DTYPES
    }
    return {
        "taken_gib": taken,
        "matmul": {
            dtype: [measure_product(clock, product, dtype) for product in scale.products] for dtype in DTYPES
        },
        "attention_forward": {
            dtype: statistics.harmonic_mean(f for f, _ in rates) for dtype, rates in attention.items()
        },
        "attention_backward": {
            dtype: statistics.harmonic_mean(b for _, b in rates) for dtype, rates in attention.items()
        },
        "copy_bytes_s": copy_rate(clock),
        "memory_bytes_s": _memory_rate(clock, scale),
        "operation_s": _operation_seconds(clock),
    }


def taken_gib(device: torch.device) -> float:
    """Return the memory of this process before the model is built, after a first compilation: on the GPU, or
    resident host memory on a CPU."""
    torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    if device.type == "cpu":
        return peak_resident_bytes() / GIB
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


def measure_product(clock: Timer, product: Products, dtype: str) -> tuple[float, float]:
    """Return the GFLOP of one product, and the operations per second of a linear layer's three products:
    x[T, D] · w[F, D] -> y[T, F], and the gradients of x and w."""
    flops = 2 * math.prod(product)
    return flops / 1e9, 3 * flops / clock.seconds(product_runs(product, dtype, clock.device))


def measure_attention(clock: Timer, shape: AttentionShape, dtype: str) -> tuple[float, float]:
    """Return the operations per second of forward and backward, counted by `attention_work`."""
    attention = CausalAttention()
    if clock.device.type == "cuda":  # the fastest kernel of this GPU
        config = Config(parallel=ParallelConfig(param_dtype=dtype))
        attention.kernel = attention_on_device(
            config.job, clock.device, torch.cuda.get_device_name(clock.device)
        )
    forward_runs, both_runs = attention_runs(attention, shape, dtype, clock.device)
    forward_s = clock.seconds(forward_runs)
    backward_s = clock.seconds(both_runs) - forward_s
    forward, backward = attention_work(shape)
    return forward / forward_s, backward / backward_s


def attention_work(shape: AttentionShape) -> tuple[float, float]:
    """Return the operations of causal attention's forward and backward as the planner counts them: half of
    the full square."""
    q, k = (
        torch.empty(shape.batch, heads, shape.seq, shape.head_dim, device="meta")
        for heads in (shape.heads, shape.kv_heads)
    )
    return attention_flops("attention", (q, k)), attention_flops("attention_backward", (q, q, k))


def copy_rate(clock: Timer) -> float:
    """Return the bytes read and written per second by a copy of tensors larger than the caches."""
    source, target = (draw((ROTATED_BYTES // 8,), "float32", clock.device) for _ in range(2))
    return 2 * source.nbytes / clock.seconds([lambda: target.copy_(source)])


def _memory_rate(clock: Timer, scale: Scale) -> float:
    """Return the necessary bytes read and written per second by memory-bound work: compiled norm and SwiGLU,
    forward and backward, and the optimizer's update, with equal numbers of bytes."""
    times = [
        _norm_seconds_per_byte(clock, scale),
        _swiglu_seconds_per_byte(clock, scale),
        _adamw_seconds_per_byte(clock, scale),
    ]
    return 1 / statistics.mean(times)


def _norm_seconds_per_byte(clock: Timer, scale: Scale) -> float:
    """Time x + norm(x): the forward reads x and writes y; the backward reads the gradient and x, and writes a
    gradient."""
    weight = torch.ones(scale.memory[1], device=clock.device, requires_grad=True)
    residual = torch.compile(lambda x: x + F.rms_norm(x, x.shape[-1:], weight, 1e-5), dynamic=False)
    return _autograd_seconds(clock, scale, residual, 1) / (5 * math.prod(scale.memory) * 4)


def _swiglu_seconds_per_byte(clock: Timer, scale: Scale) -> float:
    """Time silu(a) * b: the forward reads two tensors and writes one; the backward reads three and writes
    two."""
    swiglu = torch.compile(lambda a, b: F.silu(a) * b, dynamic=False)
    return _autograd_seconds(clock, scale, swiglu, 2) / (8 * math.prod(scale.memory) * 4)


def _autograd_seconds(clock: Timer, scale: Scale, function: Callable[..., Tensor], inputs: int) -> float:
    """Return the seconds of forward and backward of an element-wise function of float32 tensors[T, D]."""

    def make_run() -> Run:
        tensors = [draw(scale.memory, "float32", clock.device) for _ in range(inputs + 1)]
        leaves = [x.requires_grad_() for x in tensors[:-1]]
        return lambda: torch.autograd.grad(function(*leaves), leaves, tensors[-1])

    return clock.seconds(rotate(make_run, (inputs + 1) * math.prod(scale.memory) * 4))


def _adamw_seconds_per_byte(clock: Timer, scale: Scale) -> float:
    """Time the fused update: it reads parameter, gradient and two moments, and writes all but the
    gradient."""
    parameters = [draw(scale.memory, "float32", clock.device).requires_grad_() for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return clock.seconds([optimizer.step]) / (7 * sum(p.nbytes for p in parameters))


def _operation_seconds(clock: Timer) -> float:
    """Return the seconds of one operation on a single number, in a chain, forward and backward.

    On a GPU the queue is filled first, so that launching is not measured; it holds only a few chains.
    """
    if clock.device.type == "cuda":
        clock = Timer(clock.device, budget_s=0.0)
    x = torch.ones(1, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(TINY_OPERATIONS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x)

    return clock.seconds([chain]) / TINY_OPERATIONS
