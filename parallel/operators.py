"""Kinds of ATen and c10d operators, eager or in a graph: views, matrix products, collectives; and the Python
body of custom operators."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.fx import Node


def custom_op_body(op: Any) -> Callable[..., Any] | None:
    """Return the Python body of a `torch.library.custom_op`, so that tracers can look inside it. None for
    other operators, for torch's own, and for grouped products and those with "attention" or "kernel" in their
    name, which count as one kernel."""
    defined = OPDEFS.get(op.name()) if op.namespace != "aten" else None
    if (
        defined is None
        or "attention" in op.name()
        or "kernel" in op.name()
        or op.name().partition("::")[2] in GROUPED_PRODUCTS
        or defined._init_fn.__module__.startswith("torch.")
    ):
        return None
    return defined._init_fn


VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "unbind",
        "wait_tensor",
        "multiply_unless_one_kernel",  # in place, by the gradient of the loss, which is 1 in a training step
    }
)
FLOAT8_PRODUCT = "_scaled_mm"
# products of each expert's tokens with its weight, with the number of products: torch's, and transformers'
GROUPED_PRODUCTS = {"_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", FLOAT8_PRODUCT, *GROUPED_PRODUCTS})
REDUCTIONS = frozenset({"sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "var_mean"})
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


def collective_axis(arguments: Any) -> str:
    """Return the name of the group of a collective, its last string: in a trace that of an axis."""
    return str([argument for argument in arguments if isinstance(argument, str)][-1])


def attention_flops(name: str, arguments: Any) -> float:
    """Return the floating-point operations of causal attention, in two products forward and five backward,
    one of them recomputed (FlashAttention, arXiv 2205.14135). The queries are those of the last t of T
    tokens, which have scores with T - t/2 of them on average: half of the square if t = T.

    `arguments` begin with q[B, N, t, H], k; those of the backward with the gradient.
    """
    q, k = _attended(name, arguments)
    scores = q.numel() * (2 * k.shape[-2] - q.shape[-2])
    return float(scores * (5 if "backward" in name else 2))


def attention_head_dim(name: str, arguments: Any) -> int:
    """Return the width of a head."""
    return int(_attended(name, arguments)[0].shape[-1])


def _attended(name: str, arguments: Any) -> tuple[Tensor, Tensor]:
    """Return q[B, N, t, H] and k."""
    first = 1 if "backward" in name else 0
    q, k = (x.meta["val"] if isinstance(x, Node) else x for x in arguments[first : first + 2])
    return q, k
