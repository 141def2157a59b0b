"""Seconds that a function takes on a device, after a warm-up; and inputs that no cache holds.

What is timed is what a training step runs: the three products of a linear layer, attention through autograd.
Inputs are random (constant ones draw less power and so run faster on a GPU). Shapes: B batch, T tokens, N
heads, K kv heads, H head dim.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """One call of attention."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int

    def __str__(self) -> str:
        return "x".join(map(str, dataclasses.astuple(self)))


# more than the last cache of any device here: 50 MiB on an H100, 32 MiB on a server's core complex
ROTATED_BYTES = 2**28
MAX_ROTATED = 64
WARM_UP_RUNS = 2
PAUSE_CYCLES = 50_000_000  # of a GPU, about 30 ms: launching a thousand kernels takes less
MIN_RUNS, MAX_RUNS = 5, 200

Made = TypeVar("Made")
Run = Callable[[], Any]
Products = tuple[int, int, int]  # tokens, inputs, outputs of a linear layer


class Timer:
    """Seconds that a function takes on a device: of as many runs as fit into `budget_s`, after a warm-up.

    On a CPU with one thread it is CPU time, which is wall time where nothing else runs.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(self, runs: Sequence[Run]) -> float:
        """The median of one run; `runs` do the same on inputs of their own, and are taken in turn."""
        return statistics.median(self._times(runs))

    def best_seconds(self, runs: Sequence[Run]) -> float:
        """The fastest run."""
        return min(self._times(runs))

    def _times(self, runs: Sequence[Run]) -> list[float]:
        turns = itertools.cycle(runs)
        for _ in range(WARM_UP_RUNS):
            next(turns)()
        timed = self._timed_on_gpu if self.device.type == "cuda" else self._timed_on_cpu
        first_s = statistics.median(timed(turns, 3))
        return timed(turns, max(MIN_RUNS, min(MAX_RUNS, int(self.budget_s / first_s))))

    def _timed_on_cpu(self, turns: Iterator[Run], count: int) -> list[float]:
        times = []
        for _ in range(count):
            started_at = self._now()
            next(turns)()
            times.append(self._now() - started_at)
        return times

    def _timed_on_gpu(self, turns: Iterator[Run], count: int) -> list[float]:
        """Events of the GPU around each run; the queue is filled behind a pause, so that launching is not
        timed."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda._sleep(PAUSE_CYCLES)
        for event in events[:-1]:
            event.record()
            next(turns)()
        events[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def rotate(draw: Callable[[], Made], size_bytes: int, rotated_bytes: int = ROTATED_BYTES) -> list[Made]:
    """As many sets of inputs of `size_bytes` as exceed `rotated_bytes`, two at least."""
    return [draw() for _ in range(max(2, min(MAX_ROTATED, rotated_bytes // size_bytes)))]


def draw(sizes: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    """Random values."""
    return torch.randn(*sizes, device=device).to(getattr(torch, dtype))


def product_runs(
    product: Products, dtype: str, device: torch.device, rotated_bytes: int = ROTATED_BYTES
) -> list[Run]:
    """The three products of a linear layer: x[T, D] · w[F, D] -> y[T, F], and the gradients of both."""
    tokens, inputs, outputs = product

    def one() -> Run:
        x, w, grad = (
            draw(sizes, dtype, device) for sizes in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        return lambda: (F.linear(x, w), grad @ w, grad.t() @ x)

    elements = tokens * inputs + outputs * inputs + tokens * outputs
    return rotate(one, elements * getattr(torch, dtype).itemsize, rotated_bytes)


def attention_runs(
    attention: Callable[..., Tensor],
    shape: AttentionShape,
    dtype: str,
    device: torch.device,
    rotated_bytes: int = ROTATED_BYTES,
) -> tuple[list[Run], list[Run]]:
    """The forward of attention, q[B, T, N, H], k and v[B, T, K, H] -> [B, T, N, H], and forward with
    backward."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)

    def one() -> tuple[list[Tensor], Tensor]:
        inputs = [
            draw((shape.batch, shape.seq, n, shape.head_dim), dtype, device).requires_grad_() for n in heads
        ]
        return inputs, draw((shape.batch, shape.seq, shape.heads, shape.head_dim), dtype, device)

    def both(inputs: list[Tensor], grad: Tensor) -> Run:
        return lambda: torch.autograd.grad(attention(*inputs), inputs, grad)

    elements = shape.batch * shape.seq * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sets = rotate(one, elements * getattr(torch, dtype).itemsize, rotated_bytes)
    forward: list[Run] = [lambda inputs=inputs: attention(*inputs) for inputs, _ in sets]  # type: ignore[misc]
    return forward, [both(*each) for each in sets]
