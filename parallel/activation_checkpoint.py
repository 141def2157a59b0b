"""Activation checkpointing inside FSDP units: recompute a module's activations in its backward."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.plan import Plan


def apply_activation_checkpoint(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of each module of the units the plan checkpoints, in place and without renaming anything.

    The wrapped region lies inside FSDP's hooks: the recomputation uses the parameters that the backward has
    gathered anyway. The model draws no random numbers in its forward, so no RNG state is kept.
    """
    for unit in plan.units:
        if unit.activation_checkpoint == "full":
            for name in unit.modules:
                module = model.get_submodule(name)
                module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
