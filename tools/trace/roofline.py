"""The work of an operator in a trace (operations and bytes), by the shapes that the profiler recorded
(record_shapes), and the least time that a device needs for it.

Only work that follows from the arguments is counted; everything else is None.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import compress, repeat, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch

from meshwright.parallel.planner.hardware import Hardware

# C's names of types in "Input type" of an operator and "dtype" of an NCCL kernel, where torch has another
_C_TYPES = {"unsigned char": "uint8", "byte": "uint8", "signed char": "int8", "char": "int8"}
_RULES = {
    "product": re.compile(r"aten::_scaled_mm|aten::(b?mm|(addmm|baddbmm)_?)"),
    "attention": re.compile(
        r"aten::_(scaled_dot_product_(flash|cudnn|efficient)|flash|cudnn|efficient)_attention\w*"
    ),
    "copy": re.compile(r"aten::(copy|fill|zero)_"),
    "pointwise": re.compile(
        r"aten::(add|sub|mul|div|silu|silu_backward|sigmoid|tanh|exp|exp2|neg|sqrt|rsqrt|abs|relu|gelu)_?"
    ),
}
_TOKENS_FIRST = ("_flash_attention", "_efficient_attention")  # q[B, T, N, H]; the others q[B, N, T, H]
# T x T products per head; the backward recomputes the scores (arXiv 2205.14135)
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# custom_mask_type of _efficient_attention_forward (ATen/native/transformers/cuda/sdp_utils.h)
CAUSAL_MASKS = ("1", "2")
# In the name of a fused kernel: operations that read or write only part of an argument.
_PARTLY = re.compile(r"embedding|gather|scatter|index|slice|select|split|narrow|cat|unbind|pad|triton_tem")


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
    name = kind.removeprefix("c10::").removesuffix(" int").lower()
    dtype = getattr(torch, _C_TYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        return None
    return str(dtype).removeprefix("torch.").partition("_")[0], dtype.itemsize  # float8_e4m3fn is float8


def work_of(event: Mapping[str, Any]) -> OperatorWork | None:
    """Return the work of an operator's event; None if its arguments do not determine it."""
    args = event.get("args") or {}
    rule = "fused" if args.get("kernel_backend") == "triton" else _rule(event["name"])
    if not rule or (rule == "fused" and _PARTLY.search(event["name"])):
        return None
    arguments = _arguments(args)
    tensors = [tensor for tensor in arguments if tensor and (tensor.dims or rule == "copy")]
    if rule == "attention":
        return _attention(event["name"].removeprefix("aten::"), arguments, args.get("Concrete Inputs") or [])
    if rule == "product":
        return _product(event["name"], tensors)
    moved = sum(tensor.bytes for tensor in tensors)
    if rule == "pointwise":  # with several dtypes the result's is not recorded
        sizes = zip_longest(*(reversed(tensor.dims) for tensor in tensors), fillvalue=1)
        same = len({tensor.dtype for tensor in tensors}) == 1
        moved = moved + prod(map(max, sizes)) * tensors[0].width if same else 0
    return OperatorWork(None, float(moved)) if moved else None


@cache
def _rule(name: str) -> str | None:
    return next((rule for rule, pattern in _RULES.items() if pattern.fullmatch(name)), None)


def _arguments(args: Mapping[str, Any]) -> list[_Tensor | None]:
    """Return the tensor arguments by position; None for a list, number, none, or an unknown dtype."""
    found = list[_Tensor | None]()
    kinds, strides = args.get("Input type") or [], args.get("Input Strides") or repeat(())
    for dims, kind, steps in zip(args.get("Input Dims", []), kinds, strides, strict=False):
        stored = compress(dims, steps) if len(steps) == len(dims) else dims
        dtype = dtype_of(kind)
        found.append(_Tensor(tuple(dims), prod(stored), *dtype) if dtype else None)
    return found


def _product(name: str, tensors: Sequence[_Tensor]) -> OperatorWork | None:
    """x[..., M, K] · y[..., K, N]: a multiplication and an addition per element of the contraction. An
    added term, the first argument, is read too; the result dtype of a scaled product is not recorded."""
    added, factors = (tensors[:1], tensors[1:3]) if "add" in name else ([], tensors[:2])
    if len(factors) < 2 or len(factors[0].dims) < 2 or factors[0].dims[-1] != factors[1].dims[-2]:
        return None
    x, y = factors
    result = prod(x.dims[:-1]) * y.dims[-1]
    moved = sum(tensor.bytes for tensor in (*added, x, y)) + result * x.width
    return OperatorWork(2.0 * result * x.dims[-1], None if "scaled" in name else float(moved), x.dtype)


@cache
def _places(operator: str) -> dict[str, int]:
    """Return the positions of an aten operator's arguments by name, from its schema; empty if this torch
    does not have it."""
    packet = getattr(torch.ops.aten, operator, None)
    return {argument.name: i for i, argument in enumerate(packet.default._schema.arguments)} if packet else {}


def _attention(
    operator: str, arguments: Sequence[_Tensor | None], concrete: Sequence[str]
) -> OperatorWork | None:
    """q · k^T and its product with v, or the products of their backward; half of them if causal. None for
    packed sequences (three axes), whose lengths are not recorded, and without the recorded values. An omitted
    argument has its default, which is not causal."""
    places = _places(operator)
    q, k = (arguments[places[name]] if name in places else None for name in ("query", "key"))
    place = places.get("is_causal", places.get("custom_mask_type"))
    if not q or not k or len(q.dims) != 4 or place is None or not concrete:
        return None
    causal = place < len(concrete) and concrete[place] in ("True", *CAUSAL_MASKS)
    tokens = 1 if operator.startswith(_TOKENS_FIRST) else 2
    products = BACKWARD_PRODUCTS if operator.endswith("_backward") else FORWARD_PRODUCTS
    flops = 2.0 * products * prod(q.dims) * k.dims[tokens]
    return OperatorWork(flops / 2 if causal else flops, None, q.dtype, causal)


def least_s(work: OperatorWork, device: Hardware) -> float | None:
    """Return the least time for the work by the device's data sheet (configs/hardware): that of its
    operations or of its bytes, whichever is longer. None if neither is known, if the dtype of the operations
    has no peak, and for a link."""
    peak_tflops = device.peak_tflops.get(work.dtype)
    if work.on_link or (work.flops is not None and not peak_tflops):
        return None
    by_flops = work.flops / (peak_tflops * 1e12) if work.flops and peak_tflops else 0.0
    return max(by_flops, (work.bytes or 0.0) / (device.memory_gb_s * 1e9)) or None
