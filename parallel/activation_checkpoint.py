"""Activation checkpointing inside FSDP units: a module's activations, all or selected operators', are
computed again in its backward.

The recomputed region lies inside FSDP's hooks, never across them: it uses the parameters that the backward
has gathered anyway, and starts no all-gather and no prefetch of its own.
"""

import logging
from collections import Counter
from functools import cache, partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.selective_policy import find_op


def apply_activation_checkpoint(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of each module of the units the plan checkpoints, in place and without renaming
    anything.

    "budget" is the compiler's own recomputation: `compile/apply.py` hands it the budget.
    """
    # On every rank it warns of in-place operations in selectively recomputed regions; our modules have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for unit in plan.units:
        for name in unit.modules if unit.activation_checkpoint in ("full", "selective") else ():
            recompute(model.get_submodule(name), unit.saved_ops)


def recompute(module: nn.Module, saved_ops: tuple[str, ...]) -> None:
    """From now on recompute the module's activations in its backward, all but the results of `saved_ops`."""
    module.saved_ops = saved_ops  # type: ignore[assignment]
    module.forward = MethodType(_recomputed_forward, module)


def _recomputed_forward(module: Any, *inputs: Tensor) -> Tensor:
    """The class's own forward, checkpointed. One function for all modules, so that they share a compiled
    graph.

    The models draw no random numbers in their forward, so no RNG state is kept.
    """

    def forward(*inputs: Tensor) -> Tensor:
        return type(module).forward(module, *inputs)

    if not module.saved_ops:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(selective_contexts, module.saved_ops)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def selective_contexts(ops: tuple[str, ...]) -> Any:
    """One context for the forward and one for its recomputation, each counting its own calls."""
    calls: Counter[Any] = Counter()
    every = _saved_every(ops)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet = getattr(op, "overloadpacket", op)
        n = every.get(packet, 0)
        calls[packet, context.is_recompute] += 1
        saved = n and calls[packet, context.is_recompute] % n == 0
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _saved_every(ops: tuple[str, ...]) -> dict[Any, int]:
    """Operator -> of how many of its calls one is kept. Operators that this build of torch lacks are left
    out."""
    return {find_op(op): int(op.partition("/")[2] or 1) for op in ops if find_op(op) is not None}
