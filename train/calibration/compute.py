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
from meshwright.train.calibration.timing import (
    ROTATED_BYTES,
    AttentionShape,
    Products,
    Run,
    Timer,
    attention_runs,
    product_runs,
)
from meshwright.train.config import Config
from meshwright.train.memory import resident_bytes, return_free_memory
from meshwright.train.planning.device_defaults import attention_on_device

FEW, MANY = 1, 9  # matrix products of two compiled graphs, whose difference is the cost of a kernel
TINY_OPERATIONS = 256
SECONDS = ("operation_s", "operator_s", "graph_s", "kernel_s")  # of a measurement; the others are rates


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


def _measure_round(device: torch.device, scale: Scale) -> dict[str, Any]:
    clock = Timer(device, scale.budget_s, scale.rotated_bytes)
    dist.barrier()
    attention = {
        dtype: [measure_attention(clock, shape, dtype) for shape in scale.attention] for dtype in scale.dtypes
    }
    forward, backward = (
        {dtype: statistics.harmonic_mean(rate[i] for rate in rates) for dtype, rates in attention.items()}
        for i in range(2)
    )
    graph_s, kernel_s = graph_seconds(clock)
    return {
        "matmul": {
            dtype: [measure_product(clock, product, dtype) for product in scale.products]
            for dtype in scale.dtypes
        },
        "attention_forward": forward,
        "attention_backward": backward,
        "copy_bytes_s": copy_rate(clock),
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


def measure_product(clock: Timer, product: Products, dtype: str) -> tuple[float, float]:
    """Return the GFLOP of one product, and the operations per second of a linear layer's three products:
    x[T, D] · w[F, D] -> y[T, F], and the gradients of x and w."""
    flops = 2 * math.prod(product)
    return flops / 1e9, 3 * flops / clock.seconds(product_runs(clock, product, dtype))


def measure_attention(clock: Timer, shape: AttentionShape, dtype: str) -> tuple[float, float]:
    """Return the operations per second of forward and backward, counted by `attention_work`."""
    attention = CausalAttention()
    if clock.device.type == "cuda":  # the fastest kernel of this GPU
        config = Config(parallel=ParallelConfig(param_dtype=dtype))  # type: ignore[arg-type]
        attention.kernel = attention_on_device(
            config.job, clock.device, torch.cuda.get_device_name(clock.device)
        )
    forward_runs, both_runs = attention_runs(clock, attention, shape, dtype)
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


def copy_rate(clock: Timer) -> float:
    """Return the bytes read and written per second by a copy of tensors larger than the caches."""
    source, target = (clock.draw((clock.rotated_bytes // 8,), "float32") for _ in range(2))
    return 2 * source.nbytes / clock.seconds([lambda: target.copy_(source)])


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
        leaves = [clock.draw(size, dtype).requires_grad_() for size in sizes]
        grads = [clock.draw(size, dtype) for size in sizes[:2]]
        return lambda: torch.autograd.grad(_compiled(_fused)(weight, *leaves), leaves, grads)

    return moved / clock.seconds(clock.rotate(make_run, moved // 2))


def optimizer_rate(clock: Timer, scale: Scale) -> float:
    """Return the bytes read and written per second by the fused AdamW: it reads parameter, gradient and two
    moments, and writes all, because it also clips the gradient (`cost_model.optimizer_bytes`)."""
    values = min(scale.unit_values, clock.rotated_bytes // 64)
    parameters = [clock.draw((values,), "float32").requires_grad_() for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return 8 * sum(p.nbytes for p in parameters) / clock.seconds([optimizer.step])


def tiny_operations(device: torch.device) -> Run:
    """Return a chain of TINY_OPERATIONS eager operators on a single number, forward and backward."""
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(TINY_OPERATIONS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x)

    return chain


def graph_seconds(clock: Timer) -> tuple[float, float]:
    """Return the seconds of one call of a compiled graph, without its kernels, and of one kernel: means of
    forward and backward, from graphs of a few products of tiny matrices."""
    few_s, many_s = (_chain_seconds(clock, products) for products in (FEW, MANY))
    kernel_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    return max(0.0, few_s - FEW * kernel_s) / 2, kernel_s / 3  # a product's backward has two products


def _chain_seconds(clock: Timer, products: int) -> float:
    """Return the seconds of a compiled chain of products of x[8, 8], forward and backward."""
    x, w = (torch.randn(8, 8, device=clock.device, requires_grad=True) for _ in range(2))
    grad, chain = torch.randn(8, 8, device=clock.device), _compiled(_chain)
    return clock.host_seconds([lambda: torch.autograd.grad(chain(x, w, products), (x, w), grad)])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)  # late: importing the compiler takes seconds


def _chain(x: Tensor, w: Tensor, products: int) -> Tensor:
    for _ in range(products):
        x = x @ w
    return x
