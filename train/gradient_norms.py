"""`metrics.gradient_norms`: the norm of each FSDP unit's gradient at the steps that are reported."""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.grad_norm import unit_gradient_norms, unit_parameters
from meshwright.parallel.plan.schema import Plan


class GradientNorms:
    """Takes the norms just before the optimizer's step, at the steps that are asked for: gradients are whole
    then, not yet clipped, and of all ranks; the optimizer may change them in place, and they are freed after
    it."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        self._units = unit_parameters(model, plan)
        self._wanted = False
        self._norms: Tensor | None = None
        optimizer.register_step_pre_hook(self._before_optimizer)

    def want(self, wanted: bool) -> None:
        """Whether the next step is one whose norms are asked for; every rank says the same."""
        self._wanted = wanted

    def take(self) -> dict[str, float]:
        """By unit, the norms of the last step that was asked for, which are then forgotten; waits for the
        device."""
        if self._norms is None:
            return {}
        norms, self._norms = self._norms.tolist(), None
        return dict(zip(self._units, norms, strict=True))

    def _before_optimizer(self, *_: Any) -> None:
        if self._wanted:
            self._norms, self._wanted = unit_gradient_norms(list(self._units.values())), False
