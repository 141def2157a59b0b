"""The work of an operator in a trace (operations and bytes), by the shapes that the profiler recorded
(record_shapes), and the peak rates of a device.

Only work that follows from the arguments is counted; everything else is None.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch

from meshwright.parallel.planner.hardware import find_hardware

# "Input type" of an operator and "dtype" of an NCCL kernel, in lower case and without "c10::" and " int" ->
# name as in configs/hardware, bytes per element
_DTYPES = {
    "float": ("float32", 4),
    "bfloat16": ("bfloat16", 2),
    "half": ("float16", 2),
    "double": ("float64", 8),
    "float8_e4m3fn": ("float8", 1),
    "float8_e5m2": ("float8", 1),
    "bool": ("bool", 1),
    "unsigned char": ("uint8", 1),
    "byte": ("uint8", 1),
    "signed char": ("int8", 1),
    "char": ("int8", 1),
    "short": ("int16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
}
PRODUCTS = {  # operator -> positions of its two factors
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
}
ATTENTION = re.compile(
    r"aten::(_(?:scaled_dot_product_(?:flash|cudnn|efficient)|flash|cudnn|efficient)_attention\w*)"
)
TOKENS_FIRST = ("_flash_attention", "_efficient_attention")  # q[B, T, N, H]; the others q[B, N, T, H]
# T x T products per head; the backward recomputes the scores (arXiv 2205.14135)
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# custom_mask_type of _efficient_attention_forward (ATen/native/transformers/cuda/sdp_utils.h)
CAUSAL_MASKS = ("1", "2")
POINTWISE = re.compile(  # one result, in the shape to which the arguments broadcast
    r"aten::(add|sub|mul|div|silu|silu_backward|sigmoid|tanh|exp|exp2|neg|sqrt|rsqrt|abs|relu|gelu)(_?)"
)
# In the name of a fused kernel: operations that read or write only part of an argument.
PARTLY = re.compile(r"embedding|gather|scatter|index|slice|select|split|narrow|cat|unbind|pad|triton_tem")


class OperatorWork(NamedTuple):
    """Floating-point operations on numbers of `dtype` ("" without operations), and bytes read and written,
    each counted once. `halved`: attention is causal, and half of its operations count; `on_link`: the
    bytes cross a link, whose bandwidth is not known."""

    flops: float | None
    bytes: float | None
    dtype: str = ""
    halved: bool = False
    on_link: bool = False


class _Tensor(NamedTuple):
    dims: tuple[int, ...]
    stored: int  # elements in memory: an expanded axis counts once
    dtype: str
    width: int

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.stored * self.width


@cache
def dtype_of(kind: str) -> tuple[str, int] | None:
    """Return the dtype's name as in configs/hardware and the bytes per element; None for an unknown dtype."""
    return _DTYPES.get(kind.removeprefix("c10::").removesuffix(" int").lower())


def work_of(event: Mapping[str, Any]) -> OperatorWork | None:
    """Return the work of an operator's event; None if its arguments do not determine it."""
    name, args = event["name"], event.get("args") or {}
    if args.get("kernel_backend") == "triton":
        return _fused(name, args)
    if "Input Dims" not in args:
        return None
    if name in PRODUCTS:
        return _product(name, args)
    if match := ATTENTION.fullmatch(name):
        return _attention(match[1], args)
    if name in ("aten::copy_", "aten::fill_", "aten::zero_"):
        tensors = _tensors(args)
        return OperatorWork(None, float(sum(tensor.bytes for tensor in tensors))) if tensors else None
    if match := POINTWISE.fullmatch(name):
        return _pointwise(_tensors(args), in_place=bool(match[2]))
    return None


def _tensor(args: Mapping[str, Any], place: int) -> _Tensor | None:
    """Return the tensor argument at a position; None for a list, number, none, or an unknown dtype."""
    dims, kinds, strides = args["Input Dims"], args.get("Input type") or [], args.get("Input Strides") or []
    dtype = dtype_of(kinds[place]) if place < min(len(dims), len(kinds)) else None
    if dtype is None:
        return None
    sizes, steps = dims[place], strides[place] if place < len(strides) else ()
    stored = compress(sizes, steps) if len(steps) == len(sizes) else sizes
    return _Tensor(tuple(sizes), prod(stored), *dtype)


def _tensors(args: Mapping[str, Any]) -> list[_Tensor]:
    return [tensor for place in range(len(args["Input Dims"])) if (tensor := _tensor(args, place))]


def _product(name: str, args: Mapping[str, Any]) -> OperatorWork | None:
    """x[..., M, K] · y[..., K, N]: a multiplication and an addition per element of the contraction. An
    added term is read too; the result dtype of a scaled product is not recorded."""
    x, y = (_tensor(args, place) for place in PRODUCTS[name])
    if not x or not y or len(x.dims) < 2 or x.dims[-1] != y.dims[-2]:
        return None
    result = prod(x.dims[:-1]) * y.dims[-1]
    added = _tensor(args, 0) if PRODUCTS[name][0] else None
    moved = (
        None
        if name == "aten::_scaled_mm"
        else float(x.bytes + y.bytes + result * x.width + (added.bytes if added else 0))
    )
    return OperatorWork(2.0 * result * x.dims[-1], moved, x.dtype)


@cache
def _places(operator: str) -> dict[str, int]:
    """Return the positions of an aten operator's arguments by name, from its schema; empty if this torch
    does not have it."""
    packet = getattr(torch.ops.aten, operator, None)
    return {argument.name: i for i, argument in enumerate(packet.default._schema.arguments)} if packet else {}


def _attention(operator: str, args: Mapping[str, Any]) -> OperatorWork | None:
    """q · k^T and its product with v, or the products of their backward; half of them if causal. The
    lengths of packed sequences (three axes) are not recorded."""
    places = _places(operator)
    q, k = (_tensor(args, places[name]) if name in places else None for name in ("query", "key"))
    if not q or not k or len(q.dims) != 4:
        return None
    causal = _is_causal(places, args.get("Concrete Inputs") or [])
    if causal is None:
        return None
    tokens = 1 if operator.startswith(TOKENS_FIRST) else 2
    products = BACKWARD_PRODUCTS if operator.endswith("_backward") else FORWARD_PRODUCTS
    flops = 2.0 * products * prod(q.dims) * k.dims[tokens]
    return OperatorWork(flops / 2 if causal else flops, None, q.dtype, causal)


def _is_causal(places: Mapping[str, int], concrete: Sequence[str]) -> bool | None:
    """Whether attention is causal; None if the trace does not show it. An omitted argument has its
    default, which is not causal."""
    place = places.get("is_causal", places.get("custom_mask_type"))
    if place is None or not concrete:
        return None
    return place < len(concrete) and concrete[place] in ("True", *CAUSAL_MASKS)


def _pointwise(tensors: Sequence[_Tensor], in_place: bool) -> OperatorWork | None:
    """An operator that reads its arguments and writes one result. With several dtypes the result's is not
    recorded. Scalars do not count."""
    large = [tensor for tensor in tensors if tensor.dims]
    if not large or len({tensor.dtype for tensor in large}) > 1:
        return None
    sizes = zip_longest(*(reversed(tensor.dims) for tensor in large), fillvalue=1)
    result = large[0].stored if in_place else prod(map(max, sizes))
    return OperatorWork(None, float(sum(tensor.bytes for tensor in large) + result * large[0].width))


def _fused(name: str, args: Mapping[str, Any]) -> OperatorWork | None:
    """A Triton kernel of torch.compile: the work that it records (with inductor's
    config.benchmark_kernel), otherwise each of its tensors once. A tensor that it both reads and writes
    moves twice that."""
    flops, gb = args.get("kernel_flop"), args.get("kernel_num_gb")
    moved = float(gb) * 1e9 if gb else None
    if moved is None and "Input Dims" in args and not PARTLY.search(name):
        moved = float(sum(tensor.bytes for tensor in _tensors(args) if tensor.dims)) or None
    return OperatorWork(float(flops) if flops else None, moved) if flops or moved else None


@dataclass(frozen=True)
class Roof:
    """The peak rates of one device by its data sheet (configs/hardware): memory bandwidth in 10^9 bytes
    per second, and dense matrix products by dtype in 10^12 operations per second."""

    memory_gb_s: float
    peak_tflops: Mapping[str, float]

    def least_s(self, work: OperatorWork) -> float | None:
        """Return the least time for the work: that of its operations or of its bytes, whichever is longer.
        None if neither is known, if the dtype of the operations has no peak, and for a link."""
        if work.on_link or (work.flops is not None and not self.peak_tflops.get(work.dtype)):
            return None
        parts = []
        if work.flops is not None:
            parts.append(work.flops / (self.peak_tflops[work.dtype] * 1e12))
        if work.bytes is not None:
            parts.append(work.bytes / (self.memory_gb_s * 1e9))
        return max(parts, default=None)


def find_roof(device_name: str) -> Roof | None:
    """Return the peak rates of a device by torch's name for it; None if no file in configs/hardware
    describes it, such as for a CPU."""
    hardware = find_hardware(device_name)
    return Roof(hardware.memory_gb_s, hardware.peak_tflops) if hardware else None
