"""What an operator of a model's own is made of, for whoever counts operations and memory below it."""

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS


def inner_code(op: Any) -> Callable[..., Any] | None:
    """The Python function behind an operator made with torch.library.custom_op; None for all others, for
    torch's own, and for those whose name says that they are one kernel."""
    defined = OPDEFS.get(op.name()) if op.namespace != "aten" else None
    if (
        defined is None
        or "attention" in op.name()
        or "kernel" in op.name()
        or defined._init_fn.__module__.startswith("torch.")
    ):
        return None
    return defined._init_fn
