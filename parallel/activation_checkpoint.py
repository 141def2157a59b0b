"""Activation checkpointing inside FSDP units: recompute a module's activations in its backward, all of them
or those of selected operators.

The recomputed region lies inside FSDP's hooks: it uses the parameters that are gathered for the backward, and
starts no additional all-gather or prefetch.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.selective_policy import find_op


def apply_activation_checkpoint(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of each module of units with `activation_checkpoint` full or selective, in place;
    parameter names do not change.

    For "budget" the compiler recomputes: `compile/apply.py` sets its budget.
    """
    # It warns on every rank about in-place operations in selectively recomputed regions; our modules have
    # none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for unit in plan.units:
        for name in unit.modules if unit.activation_checkpoint in ("full", "selective") else ():
            recompute(model.get_submodule(name), unit.saved_ops)


def recompute(module: nn.Module, saved_ops: tuple[str, ...]) -> None:
    """Make the module recompute its activations in the backward, except for the results of `saved_ops`."""
    module.saved_ops = saved_ops  # type: ignore[assignment]
    module.forward = MethodType(_recomputed_forward, module)


def _recomputed_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class under activation checkpointing. One function for all modules, so that
    they share a compiled graph.

    The state of the random generators is saved, so that a recomputed dropout drops the same values, unless
    the module's class says that it draws no random numbers.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    settings: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": getattr(module, "draws_random_numbers", True),
    }
    if module.saved_ops:
        settings["context_fn"] = partial(selective_contexts, module.saved_ops)
    return checkpoint(forward, *args, **settings, **kwargs)


def selective_contexts(ops: tuple[str, ...]) -> Any:
    """Return the contexts of the forward and of its recompute; each counts its own calls."""
    saved = {is_recompute: count_saved(ops) for is_recompute in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = saved[context.is_recompute](op)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def count_saved(ops: tuple[str, ...]) -> Callable[[Any], bool]:
    """Return a function that takes each operator that a forward calls, in order, and returns whether its
    result is saved."""
    calls: Counter[Any] = Counter()
    intervals = _save_intervals(ops)

    def is_saved(op: Any) -> bool:
        packet = getattr(op, "overloadpacket", op)
        if packet is _ADDMM and packet not in intervals:
            packet = _MM  # a linear layer with a bias
        calls[packet] += 1
        n = intervals.get(packet, 0)
        return n > 0 and calls[packet] % n == 0

    return is_saved


_MM, _ADDMM = torch.ops.aten.mm, torch.ops.aten.addmm


@cache
def _save_intervals(ops: tuple[str, ...]) -> dict[Any, int]:
    """Map each operator to N, where the result of every N-th call is saved. Operators missing in this build
    of torch are left out."""
    return {find_op(op): int(op.partition("/")[2] or 1) for op in ops if find_op(op) is not None}
