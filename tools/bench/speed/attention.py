"""Our CPU attention against torch's: CPU time of forward and backward, and how far the gradients are off.

Shapes: B batch, N query heads, K key-value heads, H head dim, T tokens.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.kernels.cpu_attention import causal_attention
from meshwright.tools.bench.harness import BenchResult
from meshwright.tools.bench.timing import AttentionShape
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError

SUMMARY = "our CPU attention kernel against torch's"
DESCRIPTION = (
    "Time forward and backward of the CPU attention kernel and of torch's scaled_dot_product_attention, one "
    "thread, the best of several in turn, and compare their gradients with float64."
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


DEFAULT_SHAPES = (
    AttentionShape(4, 16, 16, 16, 512),  # of `bench train`
    AttentionShape(8, 8, 4, 24, 256),  # of llama_debug.yaml
    AttentionShape(2, 8, 2, 64, 512),
    AttentionShape(1, 8, 8, 64, 1024),
    AttentionShape(1, 8, 2, 128, 512),
)


@dataclass(frozen=True)
class KernelComparison:
    """CPU seconds, the best of several, and the largest relative error of a gradient (of q, k or v) against
    float64."""

    shape: str
    dtype: str
    ours_s: float
    torch_s: float
    ratio: float
    ours_error: float
    torch_error: float


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Options of `attention`."""
    defaults = list(map(str, DEFAULT_SHAPES))
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        default=defaults,
        help=f"BATCHxHEADSxKV_HEADSxHEAD_DIMxSEQ (default {' '.join(defaults)})",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--repeats", type=positive, default=10, metavar="N", help="timings of each (default 10)"
    )


def measure_attention(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Both kernels on every shape and dtype."""
    shapes = [parse_shape(text) for text in options.shapes]
    rows = [
        compare(shape, getattr(torch, dtype), options.repeats) for shape in shapes for dtype in options.dtypes
    ]
    head = ("shape", "dtype", "ours ms", "torch ms", "ours / torch", "ours error", "torch error")
    cells = [
        (
            r.shape,
            r.dtype,
            f"{1e3 * r.ours_s:.2f}",
            f"{1e3 * r.torch_s:.2f}",
            f"{r.ratio:.3f}",
            f"{r.ours_error:.2e}",
            f"{r.torch_error:.2e}",
        )
        for r in rows
    ]
    text = (
        f"{format_table(head, cells)}\n\nshape: batch x heads x kv heads x head dim x tokens; CPU time, best "
        f"of {options.repeats}; error: of the gradients, relative, against float64"
    )
    return BenchResult(None, {"rows": [dataclasses.asdict(row) for row in rows]}, text)


def parse_shape(text: str) -> AttentionShape:
    """BATCHxHEADSxKV_HEADSxHEAD_DIMxSEQ. Raises BenchError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
        raise BenchError(
            f"--shapes {text} must read BATCHxHEADSxKV_HEADSxHEAD_DIMxSEQ, as {DEFAULT_SHAPES[0]}"
        )
    shape = AttentionShape(*map(int, text.split("x")))
    if shape.heads % shape.kv_heads:
        raise BenchError(f"--shapes {text}: {shape.kv_heads} kv heads must divide {shape.heads} heads")
    return shape


def compare(shape: AttentionShape, dtype: torch.dtype, repeats: int) -> KernelComparison:
    """Time both in turn, on one thread, and compare their gradients."""
    with one_thread():
        inputs, grad = _make_inputs(shape, dtype)
        exact = _gradients(torch_attention, [x.double() for x in inputs], grad.double())
        errors = [
            _error(_gradients(attention, inputs, grad), exact)
            for attention in (our_attention, torch_attention)
        ]
        times = [
            [_cpu_time(attention, inputs, grad) for attention in (our_attention, torch_attention)]
            for _ in range(repeats)
        ]
    ours_s, torch_s = map(min, zip(*times, strict=True))
    return KernelComparison(
        str(shape), str(dtype).removeprefix("torch."), ours_s, torch_s, ours_s / torch_s, *errors
    )


def our_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """The kernel, on the views that the model hands it."""
    return causal_attention(*(x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH)))[0]


def torch_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """torch's own, on the same views."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU time of one thread is work; of several, also their waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_inputs(shape: AttentionShape, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q[B, T, N, H], k and v[B, T, K, H], and the gradient of out[B, N, T, H]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    inputs = [
        draw(shape.batch, shape.seq, heads, shape.head_dim)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    return inputs, draw(shape.batch, shape.seq, shape.heads, shape.head_dim).transpose(1, 2)


def _gradients(attention: Attention, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*leaves), leaves, grad)


def _cpu_time(attention: Attention, inputs: Sequence[Tensor], grad: Tensor) -> float:
    start = time.process_time()
    _gradients(attention, inputs, grad)
    return time.process_time() - start


def _error(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(((g.double() - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True))
