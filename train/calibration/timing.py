"""Time functions on a device after a warm-up, on inputs that do not fit into its caches.

The timed functions are those of a training step: the three matrix products of a linear layer, and attention
with autograd. Inputs are random, because constant inputs draw less power and therefore run faster on a GPU.
Shapes: B batch, T tokens, N heads, K kv heads, H head dim.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# larger than the last-level cache of these devices: 50 MiB on an H100, 32 MiB on a server's core complex
ROTATED_BYTES = 2**28
MAX_ROTATED = 64
WARM_UP_RUNS = 2
PAUSE_CYCLES = 50_000_000  # GPU cycles, about 30 ms: longer than launching a thousand kernels takes
MIN_RUNS, MAX_RUNS = 5, 200

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
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.thread_time if alone else time.perf_counter

    def draw(self, sizes: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of random values."""
        return torch.randn(*sizes, device=self.device).to(getattr(torch, dtype))

    def rotate(self, make: Callable[[], Made], size_bytes: int) -> list[Made]:
        """Make as many sets of inputs of `size_bytes` as fit into `rotated_bytes`: 2 to MAX_ROTATED."""
        return [make() for _ in range(max(2, min(MAX_ROTATED, self.rotated_bytes // size_bytes)))]

    def seconds(self, runs: Sequence[Run]) -> float:
        """Return the median seconds of a run. `runs` do the same work on different inputs, in turn."""
        return statistics.median(self.times(runs))

    def host_seconds(self, runs: Sequence[Run]) -> float:
        """Return the median seconds that the host needs for a run; a GPU is not waited for."""
        return statistics.median(self._repeat(runs, self._time_on_host))

    def times(self, runs: Sequence[Run]) -> list[float]:
        """Return the seconds of each run."""
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
