"""Activation checkpointing inside FSDP units: recompute a module's activations in its backward.

The recomputed region lies inside FSDP's hooks, never across them: it uses the parameters that the backward
has gathered anyway, and starts no all-gather and no prefetch of its own.
"""

import logging
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.plan import Plan
from meshwright.parallel.selective import selective_contexts


def apply_activation_checkpoint(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of each module of the units the plan checkpoints, in place and without renaming
    anything.

    "budget" is the compiler's own recomputation: `compile.py` hands it the budget.
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
