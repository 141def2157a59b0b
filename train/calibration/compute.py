"""Measure the rates of one device: matrix products by size, attention, memory-bound operations, and what the
host needs to launch them.

The timed functions are those of a training step: the three products of a linear layer, the model's attention
with autograd, compiled norm and SwiGLU, the fused AdamW. Inputs are random, because constant inputs draw less
power and therefore run faster on a GPU, and rotate through more memory than the caches hold. Shapes: B batch,
T tokens, D dim, F ffn dim.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.operators import attention_flops
from meshwright.train.calibration.host import TINY_OPERATIONS, graph_seconds, tiny_operations
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
from meshwright.train.memory import resident_bytes, return_free_memory
from meshwright.train.planning.device_defaults import attention_on_device


@dataclass(frozen=True)
class Scale:
    """The sizes to measure.

    Args:
        products: linear layers
        attention: attention calls
        memory: tokens, width and ffn width of the tensors of element-wise operations
        dtypes: of products, attention and element-wise operations
        collectives_bytes: of the full tensors of collectives
        unit_values: parameters of an FSDP unit
        budget_s: seconds of repetition of each measurement
        rotated_bytes: inputs of a measurement together
    """

    products: Sequence[Products]
    attention: Sequence[AttentionShape]
    memory: tuple[int, int, int]
    dtypes: tuple[str, ...]
    collectives_bytes: tuple[int, ...]
    unit_values: int
    budget_s: float
    rotated_bytes: int = ROTATED_BYTES


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
    memory=(1024, 256, 768),
    dtypes=("float32", "bfloat16"),
    # 16 KiB to 16 MiB: layers of small models
    collectives_bytes=(2**14, 2**17, *(2**power for power in range(19, 25))),
    unit_values=2**19,
    budget_s=0.3,
    rotated_bytes=2**26,
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
    memory=(8192, 4096, 14336),
    dtypes=("float32", "bfloat16"),
    collectives_bytes=tuple(2**power for power in range(14, 31, 2)),  # 16 KiB to 1 GiB
    unit_values=2**27,
    budget_s=0.5,
)


def quicker(scale: Scale) -> Scale:
    """Return a smaller scale: the smallest, a middle and the second largest product, one attention call,
    three collectives, a fifth of the time."""
    return replace(
        scale,
        products=[scale.products[i] for i in (0, len(scale.products) // 2, -2)],
        attention=scale.attention[:1],
        collectives_bytes=(2**14, 2**18, 2**22),
        budget_s=scale.budget_s / 5,
    )


def measure_compute(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Measure one device, at the same time as the other processes. Returns plain data: rates in operations or
    bytes per second, costs of the host in seconds, each the better of two rounds: what disturbs the machine
    for a moment does not affect both."""
    half = replace(scale, budget_s=scale.budget_s / 2)
    first, second = (_measure_round(device, half) for _ in range(2))
    return {**better(first, second), "taken_gib": taken_gib(device)}


def better(first: Any, second: Any, key: str = "") -> Any:
    """Return the faster of two equal measurements, part by part: the lower seconds, the higher rate. A
    product is a pair of its size and its rate."""
    match first:
        case dict():
            return {name: better(first[name], second[name], name) for name in first}
        case list() | tuple():
            return type(first)(better(a, b, key) for a, b in zip(first, second, strict=True))
        case _:
            return min(first, second) if key in SECONDS else max(first, second)


SECONDS = ("operation_s", "operator_s", "graph_s", "kernel_s")


def _measure_round(device: torch.device, scale: Scale) -> dict[str, Any]:
    clock = Timer(device, scale.budget_s)
    rotated = scale.rotated_bytes
    dist.barrier()
    attention = {
        dtype: [measure_attention(clock, shape, dtype, rotated) for shape in scale.attention]
        for dtype in scale.dtypes
    }
    graph_s, kernel_s = graph_seconds(clock)
    return {
        "matmul": {
            dtype: [measure_product(clock, product, dtype, rotated) for product in scale.products]
            for dtype in scale.dtypes
        },
        "attention_forward": {
            dtype: statistics.harmonic_mean(f for f, _ in rates) for dtype, rates in attention.items()
        },
        "attention_backward": {
            dtype: statistics.harmonic_mean(b for _, b in rates) for dtype, rates in attention.items()
        },
        "copy_bytes_s": copy_rate(clock, rotated),
        "memory_bytes_s": {dtype: fused_rate(clock, scale, dtype) for dtype in scale.dtypes},
        "optimizer_bytes_s": optimizer_rate(clock, scale),
        "operation_s": clock.seconds([tiny_operations(device)]) / TINY_OPERATIONS,
        "operator_s": clock.host_seconds([tiny_operations(device)]) / TINY_OPERATIONS,
        "graph_s": graph_s,
        "kernel_s": kernel_s,
    }


def taken_gib(device: torch.device) -> float:
    """Return the memory of this process without a model, after a first compilation: on the GPU, or resident
    host memory on a CPU."""
    if device.type == "cpu":
        import torch.utils.tensorboard  # of every run, and not small

        return_free_memory()
        return resident_bytes() / GIB
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


def measure_product(clock: Timer, product: Products, dtype: str, rotated_bytes: int) -> tuple[float, float]:
    """Return the GFLOP of one product, and the operations per second of a linear layer's three products:
    x[T, D] · w[F, D] -> y[T, F], and the gradients of x and w."""
    flops = 2 * math.prod(product)
    runs = product_runs(product, dtype, clock.device, rotated_bytes)
    return flops / 1e9, 3 * flops / clock.seconds(runs)


def measure_attention(
    clock: Timer, shape: AttentionShape, dtype: str, rotated_bytes: int
) -> tuple[float, float]:
    """Return the operations per second of forward and backward, counted by `attention_work`."""
    attention = CausalAttention()
    if clock.device.type == "cuda":  # the fastest kernel of this GPU
        config = Config(parallel=ParallelConfig(param_dtype=dtype))
        attention.kernel = attention_on_device(
            config.job, clock.device, torch.cuda.get_device_name(clock.device)
        )
    forward_runs, both_runs = attention_runs(attention, shape, dtype, clock.device, rotated_bytes)
    forward_s = clock.seconds(forward_runs)
    # a disturbed machine could take longer for the forward alone
    backward_s = max(forward_s, clock.seconds(both_runs) - forward_s)
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


def copy_rate(clock: Timer, rotated_bytes: int) -> float:
    """Return the bytes read and written per second by a copy of tensors larger than the caches."""
    source, target = (draw((rotated_bytes // 8,), "float32", clock.device) for _ in range(2))
    return 2 * source.nbytes / clock.seconds([lambda: target.copy_(source)])


@cache
def _compiled_fused() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_fused, dynamic=False)


def _fused(weight: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return x + F.rms_norm(x, x.shape[-1:], weight, 1e-5), F.silu(a) * b


def fused_rate(clock: Timer, scale: Scale, dtype: str) -> float:
    """Return the necessary bytes read and written per second by the compiled element-wise operations of a
    block, forward and backward: x + norm(x) and silu(a) * b.

    The norm's forward reads x and writes y, its backward reads the gradient and x and writes a gradient;
    SwiGLU's forward reads two tensors and writes one, its backward reads three and writes two.
    """
    tokens, width, ffn_width = scale.memory
    weight = torch.ones(width, dtype=getattr(torch, dtype), device=clock.device, requires_grad=True)
    moved = tokens * (5 * width + 8 * ffn_width) * weight.element_size()

    def make_run() -> Run:
        sizes = [(tokens, width), (tokens, ffn_width), (tokens, ffn_width)]
        leaves = [draw(size, dtype, clock.device).requires_grad_() for size in sizes]
        grads = [draw(size, dtype, clock.device) for size in sizes[:2]]
        return lambda: torch.autograd.grad(_compiled_fused()(weight, *leaves), leaves, grads)

    return moved / clock.seconds(rotate(make_run, moved // 2, scale.rotated_bytes))


def optimizer_rate(clock: Timer, scale: Scale) -> float:
    """Return the bytes read and written per second by the fused AdamW: it reads parameter, gradient and two
    moments, and writes all, because it also clips the gradient (`cost_model.optimizer_bytes`)."""
    values = min(scale.unit_values, scale.rotated_bytes // 64)
    parameters = [draw((values,), "float32", clock.device).requires_grad_() for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return 8 * sum(p.nbytes for p in parameters) / clock.seconds([optimizer.step])
