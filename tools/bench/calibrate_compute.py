"""How fast one device computes: products by size, attention, everything bound by memory, and tiny operations.

What is timed is what a training step runs: the three products of a linear layer, the model's own attention
through autograd, compiled norms and SwiGLU, the fused AdamW. Inputs are random (constant ones draw less power
and so run faster on a GPU) and rotate through more memory than the caches hold. Shapes: B batch, T tokens, D
dim, F ffn dim.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.operators import attention_flops
from meshwright.tools.bench.attention import Shape
from meshwright.tools.bench.clock import (
    ROTATED_BYTES,
    Clock,
    Products,
    Run,
    attention_runs,
    draw,
    product_runs,
    rotate,
)
from meshwright.train.config import Config
from meshwright.train.planning.device_defaults import attention_here

DTYPES = ("float32", "bfloat16")
TINY_OPERATIONS = 256


@dataclass(frozen=True)
class Scale:
    """What is measured on a kind of device.

    Args:
        products: linear layers
        attention: calls of attention
        memory: tokens and width of what element-wise operations work on
        budget_s: seconds that each quantity is repeated for
    """

    products: Sequence[Products]
    attention: Sequence[Shape]
    memory: tuple[int, int]
    budget_s: float


# The layers of models that a laptop trains, dim 128 to 1024, whole and split by tp.
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
    attention=(Shape(4, 8, 4, 64, 256), Shape(4, 4, 4, 64, 256), Shape(2, 8, 4, 64, 512)),
    memory=(1024, 1024),
    budget_s=0.6,
)
# The layers of Llama 8B, 70B and 405B, whole and split by tp, and the head of the 8B.
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
    attention=(Shape(4, 32, 8, 128, 2048), Shape(2, 32, 8, 128, 4096), Shape(1, 32, 8, 128, 8192)),
    memory=(8192, 4096),
    budget_s=1.0,
)


def quicker(scale: Scale) -> Scale:
    """The smallest, a middle and the largest but one product, one attention, a fifth of the time."""
    products = [scale.products[i] for i in (0, len(scale.products) // 2, -2)]
    return Scale(products, scale.attention[:1], scale.memory, scale.budget_s / 5)


def measure_compute(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Everything of one device, as plain data: rates in operations, or bytes, per second."""
    clock = Clock(device, scale.budget_s)
    attention = {
        dtype: [measure_attention(clock, shape, dtype) for shape in scale.attention] for dtype in DTYPES
    }
    return {
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


def measure_product(clock: Clock, product: Products, dtype: str) -> tuple[float, float]:
    """GFLOP of one product, and operations per second of the three of a linear layer: x[T, D] · w[F, D] ->
    y[T, F], and the gradients of both."""
    flops = 2 * math.prod(product)
    return flops / 1e9, 3 * flops / clock.seconds(product_runs(product, dtype, clock.device))


def measure_attention(clock: Clock, shape: Shape, dtype: str) -> tuple[float, float]:
    """Operations per second of the forward and of the backward, the operations as `attention_work` counts
    them."""
    attention = CausalAttention()
    if clock.device.type == "cuda":  # the best kernel there
        config = Config(parallel=ParallelConfig(param_dtype=dtype))
        attention.kernel = attention_here(config, clock.device, torch.cuda.get_device_name(clock.device))
    alone, together = attention_runs(attention, shape, dtype, clock.device)
    forward_s = clock.seconds(alone)
    backward_s = clock.seconds(together) - forward_s
    forward, backward = attention_work(shape)
    return forward / forward_s, backward / backward_s


def attention_work(shape: Shape) -> tuple[float, float]:
    """Operations of causal attention, forward and backward, as the planner counts them: half of the
    square."""
    q, k = (
        torch.empty(shape.batch, heads, shape.seq, shape.head_dim, device="meta")
        for heads in (shape.heads, shape.kv_heads)
    )
    return attention_flops("attention", (q, k)), attention_flops("attention_backward", (q, q, k))


def copy_rate(clock: Clock) -> float:
    """Bytes read and written per second by a plain copy of tensors that no cache holds."""
    source, target = (draw((ROTATED_BYTES // 8,), "float32", clock.device) for _ in range(2))
    return 2 * source.nbytes / clock.seconds([lambda: target.copy_(source)])


def _memory_rate(clock: Clock, scale: Scale) -> float:
    """Bytes that have to be read and written, per second, by what a model does besides products and
    attention: the norm and SwiGLU, compiled, forward and backward, and the optimizer's update; equal numbers
    of bytes of each."""
    times = [
        _norm_seconds_per_byte(clock, scale),
        _swiglu_seconds_per_byte(clock, scale),
        _adamw_seconds_per_byte(clock, scale),
    ]
    return 1 / statistics.mean(times)


def _norm_seconds_per_byte(clock: Clock, scale: Scale) -> float:
    """x + norm(x): the forward reads x and writes y; the backward reads the gradient and x, writes one
    gradient."""
    weight = torch.ones(scale.memory[1], device=clock.device, requires_grad=True)
    residual = torch.compile(lambda x: x + F.rms_norm(x, x.shape[-1:], weight, 1e-5), dynamic=False)
    return _autograd_seconds(clock, scale, residual, 1) / (5 * math.prod(scale.memory) * 4)


def _swiglu_seconds_per_byte(clock: Clock, scale: Scale) -> float:
    """silu(a) * b: the forward reads two and writes one; the backward reads three and writes two."""
    swiglu = torch.compile(lambda a, b: F.silu(a) * b, dynamic=False)
    return _autograd_seconds(clock, scale, swiglu, 2) / (8 * math.prod(scale.memory) * 4)


def _autograd_seconds(clock: Clock, scale: Scale, function: Callable[..., Tensor], inputs: int) -> float:
    """Of forward and backward of an element-wise function of float32 tensors[T, D]."""

    def one() -> Run:
        tensors = [draw(scale.memory, "float32", clock.device) for _ in range(inputs + 1)]
        leaves = [x.requires_grad_() for x in tensors[:-1]]
        return lambda: torch.autograd.grad(function(*leaves), leaves, tensors[-1])

    return clock.seconds(rotate(one, (inputs + 1) * math.prod(scale.memory) * 4))


def _adamw_seconds_per_byte(clock: Clock, scale: Scale) -> float:
    """The fused update reads parameter, gradient and two moments, and writes all but the gradient."""
    parameters = [draw(scale.memory, "float32", clock.device).requires_grad_() for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return clock.seconds([optimizer.step]) / (7 * sum(p.nbytes for p in parameters))


def _operation_seconds(clock: Clock) -> float:
    """Of one operation on a single number, in a chain of many, forward and backward. On a GPU from a queue
    that is filled, so only a few chains: what launching takes is not part of it."""
    if clock.device.type == "cuda":
        clock = Clock(clock.device, budget_s=0.0)
    x = torch.ones(1, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(TINY_OPERATIONS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x)

    return clock.seconds([chain]) / TINY_OPERATIONS
