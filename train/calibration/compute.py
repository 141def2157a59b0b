"""Measure the rates of one device: matrix products, attention, memory-bound operations, and what the host
needs to launch them.

The timed functions are those of a training step: the three products of a linear layer, the model's attention
with autograd, compiled norm and SwiGLU, the fused AdamW. They run after a warm-up, on inputs that do not fit
into the device's caches and are random, because constant inputs draw less power and therefore run faster on a
GPU. Shapes: B batch, T tokens, D dim, F ffn dim, N heads, K kv heads, H head dim.
"""

import itertools
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.machine_memory import resident_bytes, return_free_memory
from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.config import Config
from meshwright.train.planning.resolve import attention_on_device

MAX_ROTATED = 64
WARM_UP_RUNS = 2
PAUSE_CYCLES = 50_000_000  # GPU cycles, about 30 ms: longer than launching a thousand kernels takes
MIN_RUNS, MAX_RUNS = 5, 200
TINY_OPERATIONS = 256

Made = TypeVar("Made")
Run = Callable[[], Any]
Products = tuple[int, int, int]  # tokens, inputs, outputs of a linear layer


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one attention call."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int


class Timer:
    """Measures the seconds of a function on a device, over as many runs as fit into `budget_s`, after a
    warm-up. Its inputs together have `rotated_bytes`.

    On a CPU with one thread it measures CPU time, which equals wall time on an otherwise idle core.
    """

    def __init__(self, device: torch.device, budget_s: float, rotated_bytes: int) -> None:
        self.device, self.budget_s, self.rotated_bytes = device, budget_s, rotated_bytes
        self.cores = torch.get_num_threads() if device.type == "cpu" else 1
        alone = device.type == "cpu" and self.cores == 1
        self._now = time.thread_time if alone else time.perf_counter

    def draw(self, sizes: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of random values."""
        return torch.randn(*sizes, device=self.device).to(getattr(torch, dtype))

    def rotate(self, make: Callable[[], Made], size_bytes: int) -> list[Made]:
        """Make as many sets of inputs of `size_bytes` as fit into `rotated_bytes`: 2 to MAX_ROTATED."""
        return [make() for _ in range(max(2, min(MAX_ROTATED, self.rotated_bytes // size_bytes)))]

    def core_seconds(self, runs: Sequence[Run]) -> float:
        """Return the median seconds of a run, times the cores of a CPU that it used."""
        return self.cores * statistics.median(self.times(runs))

    def host_seconds(self, runs: Sequence[Run]) -> float:
        """Return the median seconds that the host needs for a run; a GPU is not waited for."""
        return statistics.median(self._repeat(runs, self._time_on_host))

    def times(self, runs: Sequence[Run]) -> list[float]:
        """Return the seconds of each run. `runs` do the same work on different inputs, in turn."""
        return self._repeat(runs, self._time_on_gpu if self.device.type == "cuda" else self._time_on_host)

    def _repeat(self, runs: Sequence[Run], timed: Callable[[Iterator[Run], int], list[float]]) -> list[float]:
        turns = itertools.cycle(runs)
        for _ in range(WARM_UP_RUNS):
            next(turns)()
        first_s = statistics.median(timed(turns, 3))
        return timed(turns, max(MIN_RUNS, min(MAX_RUNS, int(self.budget_s / first_s))))

    def _time_on_host(self, turns: Iterator[Run], count: int) -> list[float]:
        times = []
        for _ in range(count):
            started_at = self._now()
            next(turns)()
            times.append(self._now() - started_at)
        return times

    def _time_on_gpu(self, turns: Iterator[Run], count: int) -> list[float]:
        """Time each run with GPU events. The queue is filled in a pause, so that launching is not timed."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda._sleep(PAUSE_CYCLES)
        for event in events[:-1]:
            event.record()
            next(turns)()
        events[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def make_interlude(device: torch.device, members: int) -> Run:
    """Return a product of a few milliseconds, to run before each timed collective on a CPU.

    Between computations a collective takes longer than after another one, because the ranks do not arrive
    at the same moment: 3.3 instead of 1.9 ms for 2 MiB on two cores. On a GPU the streams make up for it, and
    nothing runs, nor for a group of one rank. `members`: ranks of the group.
    """
    if device.type != "cpu" or members == 1:
        return lambda: None
    a, b = torch.randn(512, 256), torch.randn(256, 768)
    return lambda: a @ b


def product_runs(clock: Timer, product: Products, dtype: str) -> list[Run]:
    """Return runs of the three products of a linear layer: x[T, D] · w[F, D] -> y[T, F], and the gradients of
    x and w."""
    tokens, inputs, outputs = product
    sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))

    def make_run() -> Run:
        x, w, grad = (clock.draw(size, dtype) for size in sizes)
        return lambda: (F.linear(x, w), grad @ w, grad.t() @ x)

    return clock.rotate(make_run, sum(map(math.prod, sizes)) * getattr(torch, dtype).itemsize)


def attention_runs(
    clock: Timer, attention: Callable[..., Tensor], shape: AttentionShape, dtype: str
) -> tuple[list[Run], list[Run]]:
    """Return runs of attention's forward, q[B, T, N, H], k and v[B, T, K, H] -> [B, T, N, H], and of forward
    and backward together."""
    all_heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, shape.seq, heads, shape.head_dim) for heads in all_heads]

    def make_runs() -> tuple[Run, Run]:
        *qkv, grad = (clock.draw(size, dtype) for size in sizes)
        inputs = [each.requires_grad_() for each in qkv]
        return lambda: attention(*inputs), lambda: torch.autograd.grad(attention(*inputs), inputs, grad)

    pairs = clock.rotate(make_runs, sum(map(math.prod, sizes)) * getattr(torch, dtype).itemsize)
    return [forward for forward, _ in pairs], [both for _, both in pairs]


@dataclass(frozen=True)
class Scale:
    """The sizes to measure.

    Args:
        products: linear layers
        attention: attention call
        memory: tokens, width and ffn width of the tensors of element-wise operations
        dtypes: of products, attention and element-wise operations
        collectives_bytes: of the full tensors of collectives
        budget_s: seconds of repetition of each measurement
        rotated_bytes: inputs of a measurement together
    """

    products: Sequence[Products]
    attention: AttentionShape
    memory: tuple[int, int, int]
    dtypes: tuple[str, ...]
    collectives_bytes: tuple[int, ...]
    budget_s: float
    rotated_bytes: int


def measure_compute(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Measure one device, at the same time as the other processes. Returns plain data: rates in operations or
    bytes per second, on a CPU of one core, and the host's seconds for an operator; each the better of two
    rounds: what disturbs the machine for a moment does not affect both."""
    clock = Timer(device, scale.budget_s / 2, scale.rotated_bytes)
    rounds = [_measure_round(clock, scale) for _ in range(2)]
    best = combine(rounds, lambda key, values: min(values) if key == "operator_s" else max(values))
    return {**best, "taken_gib": taken_gib(device)}


def combine(measured: Sequence[Any], choose: Callable[[str, Sequence[float]], float], key: str = "") -> Any:
    """Return several equal measurements as one, part by part. `choose` is called with the key of the part and
    its values."""
    match measured[0]:
        case Mapping():
            return {name: combine([each[name] for each in measured], choose, name) for name in measured[0]}
        case list():
            return [combine(parts, choose, key) for parts in zip(*measured, strict=True)]
        case _:
            return choose(key, measured)


def _measure_round(clock: Timer, scale: Scale) -> dict[str, Any]:
    copy_bytes_s = copy_rate(clock)
    products = {d: [measure_product(clock, each, d) for each in scale.products] for d in scale.dtypes}
    attention = {dtype: measure_attention(clock, scale.attention, dtype) for dtype in scale.dtypes}
    return {
        "matmul": {dtype: computing_rate(work, copy_bytes_s) for dtype, work in products.items()},
        "attention": {
            dtype: [computing_rate([each], copy_bytes_s) for each in both]
            for dtype, both in attention.items()
        },
        "copy_bytes_s": copy_bytes_s,
        "memory_bytes_s": {dtype: fused_rate(clock, scale, dtype) for dtype in scale.dtypes},
        "optimizer_bytes_s": optimizer_rate(clock),
        "operator_s": clock.host_seconds([tiny_operations(clock.device)]) / TINY_OPERATIONS,
    }


@dataclass(frozen=True)
class Timed:
    """An operation that computes: its operations, the bytes that it must read and write, and its seconds."""

    flops: float
    moved: float
    seconds: float


def computing_rate(work: Sequence[Timed], bytes_s: float) -> float:
    """Return the operations per second with which, and with their traffic at `bytes_s`, all of the work takes
    as long as it took. Where the caches hold the inputs, at most half of the time counts as traffic."""
    seconds, moving_s = sum(each.seconds for each in work), sum(each.moved for each in work) / bytes_s
    return sum(each.flops for each in work) / max(seconds - moving_s, seconds / 2)


def taken_gib(device: torch.device) -> float:
    """Return the memory of this process without a model, after a first compilation: on the GPU, or resident
    host memory on a CPU."""
    if device.type == "cpu":
        import torch.utils.tensorboard  # of every run, and not small

        return_free_memory()
        return resident_bytes() / GIB
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


def measure_product(clock: Timer, product: Products, dtype: str) -> Timed:
    """Time a linear layer's three products: x[T, D] · w[F, D] -> y[T, F], and the gradients of x and w."""
    tokens, inputs, outputs = product
    moved = 3 * (tokens * inputs + inputs * outputs + tokens * outputs) * getattr(torch, dtype).itemsize
    return Timed(6.0 * math.prod(product), moved, clock.core_seconds(product_runs(clock, product, dtype)))


def measure_attention(clock: Timer, shape: AttentionShape, dtype: str) -> tuple[Timed, Timed]:
    """Time attention's forward and backward."""
    attention = CausalAttention()
    if clock.device.type == "cuda":  # the fastest kernel of this GPU
        config = Config(parallel=ParallelConfig(param_dtype=dtype))  # type: ignore[arg-type]
        attention.kernel = attention_on_device(
            config.job, clock.device, torch.cuda.get_device_name(clock.device)
        )
    forward_runs, both_runs = attention_runs(clock, attention, shape, dtype)
    forward_s = clock.core_seconds(forward_runs)
    # a disturbed machine could take longer for the forward alone
    backward_s = max(forward_s, clock.core_seconds(both_runs) - forward_s)
    values = shape.batch * shape.seq * shape.head_dim
    flops = 2.0 * values * shape.heads * shape.seq  # half of the square, as the planner counts
    moved = (
        2 * values * (shape.heads + shape.kv_heads) * getattr(torch, dtype).itemsize
    )  # q, k, v, the result
    return Timed(flops, moved, forward_s), Timed(2.5 * flops, 2 * moved, backward_s)


def copy_rate(clock: Timer) -> float:
    """Return the bytes read and written per second by a copy of tensors larger than the caches."""
    source, target = (clock.draw((clock.rotated_bytes // 8,), "float32") for _ in range(2))
    return 2 * source.nbytes / clock.core_seconds([lambda: target.copy_(source)])


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
    fused = torch.compile(_fused, dynamic=False)  # late: importing the compiler takes seconds

    def make_run() -> Run:
        sizes = [(tokens, width), (tokens, ffn_width), (tokens, ffn_width)]
        leaves = [clock.draw(size, dtype).requires_grad_() for size in sizes]
        grads = [clock.draw(size, dtype) for size in sizes[:2]]
        return lambda: torch.autograd.grad(fused(weight, *leaves), leaves, grads)

    return moved / clock.core_seconds(clock.rotate(make_run, moved // 2))


def optimizer_rate(clock: Timer) -> float:
    """Return the bytes read and written per second by the fused AdamW: it reads parameter, gradient and two
    moments, and writes all, because it also clips the gradient (`cost_model.optimizer_bytes`)."""
    sizes = (clock.rotated_bytes // 64,)  # with gradients and moments they have `rotated_bytes`
    parameters = [clock.draw(sizes, "float32").requires_grad_() for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return 8 * sum(p.nbytes for p in parameters) / clock.core_seconds([optimizer.step])


def tiny_operations(device: torch.device) -> Run:
    """Return a chain of TINY_OPERATIONS eager operators on a single number, forward and backward."""
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(TINY_OPERATIONS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x)

    return chain


def device_model(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """Return the model of this CPU as the system names it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
