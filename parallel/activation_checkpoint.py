"""Activation checkpointing inside FSDP units: recompute a module's activations in its backward."""

from types import MethodType

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.plan import Plan


def apply_activation_checkpoint(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of each module of the units the plan checkpoints, in place and without renaming anything.

    The wrapped region lies inside FSDP's hooks: the recomputation uses the parameters that the backward has
    gathered anyway.
    """
    for unit in plan.units:
        if unit.activation_checkpoint == "full":
            for name in unit.modules:
                module = model.get_submodule(name)
                module.forward = MethodType(_recomputed_forward, module)


def _recomputed_forward(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The class's own forward, checkpointed. One function for all modules, so that they share a compiled graph.

    The models draw no random numbers in their forward, so no RNG state is kept.
    """

    def forward(*inputs: Tensor) -> Tensor:
        return type(module).forward(module, *inputs)

    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
