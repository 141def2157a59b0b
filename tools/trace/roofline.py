"""What an operator of a trace does, by the shapes that the profiler noted (record_shapes): operations and
bytes; and the most that a device can do.

Only what its arguments tell is counted. Everything else is None: no guess.
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

# "Input type" of an operator and "dtype" of a kernel of NCCL, in small letters and without "c10::" and
# " int" -> name as in configs/hardware, bytes of an element
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
PRODUCTS = {  # operator -> the places of its two factors
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
# of T x T per head; the backward's with the scores once more (arXiv 2205.14135)
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# custom_mask_type of _efficient_attention_forward (ATen/native/transformers/cuda/sdp_utils.h)
CAUSAL_MASKS = ("1", "2")
POINTWISE = re.compile(  # one result as large as the arguments are together when broadcast
    r"aten::(add|sub|mul|div|silu|silu_backward|sigmoid|tanh|exp|exp2|neg|sqrt|rsqrt|abs|relu|gelu)(_?)"
)
# Of a fused kernel, words for arguments that it reads or writes in part only.
PARTLY = re.compile(r"embedding|gather|scatter|index|slice|select|split|narrow|cat|unbind|pad|triton_tem")


class OperatorWork(NamedTuple):
    """Floating-point operations, of numbers of `dtype` ("" without operations), and bytes read and written,
    each once. `halved`: attention is causal, and half of its operations are counted; `on_link`: the bytes
    pass a link, whose roof is not known."""

    flops: float | None
    bytes: float | None
    dtype: str = ""
    halved: bool = False
    on_link: bool = False


class _Tensor(NamedTuple):
    dims: tuple[int, ...]
    stored: int  # elements in memory: an expanded dim has one
    dtype: str
    width: int

    @property
    def bytes(self) -> int:
        return self.stored * self.width


@cache
def dtype_of(kind: str) -> tuple[str, int] | None:
    """The name of a dtype as in configs/hardware, and the bytes of an element; None for what is none."""
    return _DTYPES.get(kind.removeprefix("c10::").removesuffix(" int").lower())


def work_of(event: Mapping[str, Any]) -> OperatorWork | None:
    """Of an operator's event; None where its arguments do not tell."""
    name, args = event["name"], event.get("args") or {}
    if args.get("kernel_backend") == "triton":
        return _fused(name, args)
    if "Input Dims" not in args:
        return None
    if name in PRODUCTS:
        return _product(name, args)
    if found := ATTENTION.fullmatch(name):
        return _attention(found[1], args)
    if name in ("aten::copy_", "aten::fill_", "aten::zero_"):
        tensors = _tensors(args)
        return OperatorWork(None, float(sum(tensor.bytes for tensor in tensors))) if tensors else None
    if found := POINTWISE.fullmatch(name):
        return _pointwise(_tensors(args), in_place=bool(found[2]))
    return None


def _tensor(args: Mapping[str, Any], place: int) -> _Tensor | None:
    """The tensor argument at a place; None for a list, a number, nothing, or an unknown type."""
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
    """x[..., M, K] · y[..., K, N]: a multiplication and an addition each. What it is added to is read too;
    the result of a scaled product has a dtype that is not noted."""
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
    """Name of an argument of an operator of aten -> its place, by its schema; empty if this torch does not
    have it."""
    packet = getattr(torch.ops.aten, operator, None)
    return {argument.name: i for i, argument in enumerate(packet.default._schema.arguments)} if packet else {}


def _attention(operator: str, args: Mapping[str, Any]) -> OperatorWork | None:
    """q · k^T and its product with v, and what their backward multiplies, half of it if causal. Of sequences
    packed into one (three dims) the lengths are not noted."""
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
    """None where the trace does not say; an argument that was left out has its default, which is not
    causal."""
    place = places.get("is_causal", places.get("custom_mask_type"))
    if place is None or not concrete:
        return None
    return place < len(concrete) and concrete[place] in ("True", *CAUSAL_MASKS)


def _pointwise(tensors: Sequence[_Tensor], in_place: bool) -> OperatorWork | None:
    """Reads its arguments and writes a result; of several dtypes the result's is not noted. Single numbers do
    not count."""
    large = [tensor for tensor in tensors if tensor.dims]
    if not large or len({tensor.dtype for tensor in large}) > 1:
        return None
    sizes = zip_longest(*(reversed(tensor.dims) for tensor in large), fillvalue=1)
    result = large[0].stored if in_place else prod(map(max, sizes))
    return OperatorWork(None, float(sum(tensor.bytes for tensor in large) + result * large[0].width))


def _fused(name: str, args: Mapping[str, Any]) -> OperatorWork | None:
    """A kernel of Triton's that torch.compile launched: what it says of itself (with inductor's
    config.benchmark_kernel), else every tensor that it gets, once. One that it reads and then overwrites
    moves twice that."""
    flops, gb = args.get("kernel_flop"), args.get("kernel_num_gb")
    moved = float(gb) * 1e9 if gb else None
    if moved is None and "Input Dims" in args and not PARTLY.search(name):
        moved = float(sum(tensor.bytes for tensor in _tensors(args) if tensor.dims)) or None
    return OperatorWork(float(flops) if flops else None, moved) if flops or moved else None


@dataclass(frozen=True)
class Roof:
    """Of one device, by its data sheet (configs/hardware): the bandwidth of its memory, 10^9 bytes per
    second, and its dense products by dtype, 10^12 operations per second."""

    memory_gb_s: float
    peak_tflops: Mapping[str, float]

    def least_s(self, work: OperatorWork) -> float | None:
        """The time that the work takes at the roof: its operations or its bytes, whichever takes longer. None
        where neither is known, where there are operations of a dtype without a peak, and for a link."""
        if work.on_link or (work.flops is not None and not self.peak_tflops.get(work.dtype)):
            return None
        parts = []
        if work.flops is not None:
            parts.append(work.flops / (self.peak_tflops[work.dtype] * 1e12))
        if work.bytes is not None:
            parts.append(work.bytes / (self.memory_gb_s * 1e9))
        return max(parts, default=None)


def find_roof(device_name: str) -> Roof | None:
    """The roof of the device that torch calls so; None for one that no file in configs/hardware describes,
    such as a CPU."""
    hardware = find_hardware(device_name)
    return Roof(hardware.memory_gb_s, hardware.peak_tflops) if hardware else None
