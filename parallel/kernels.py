"""The kernels that a plan chooses."""

from torch import nn

from parallel.plan import Plan


def apply_kernels(model: nn.Module, plan: Plan) -> None:
    """Tell a model that has a choice of kernels which to run, in place."""
    if choose := getattr(model, "choose_kernels", None):
        choose(attention=plan.attention, loss_chunk_tokens=plan.loss_chunk_tokens)
