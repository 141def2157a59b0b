"""Builds a module of a model that `model.factory` makes, to trace it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.loss import LogitsLoss
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange
from meshwright.parallel.model.inputs import ModuleCall, alone_on_fakes, make_arguments
from meshwright.parallel.plan.schema import TensorPlan
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.train.model.own import OwnSource
from meshwright.train.planning.trace_case import TraceCase, freeze_named


def own_tracer(source: OwnSource, case: TraceCase) -> Callable[[int], TracedModule]:
    """Return the function that builds the module of a case for a number of sequences, as one rank has it
    after the all-gather, with its arguments, on fake tensors."""
    held = case.seq_len // case.cp  # tokens of a rank
    small, large = (source.recorded(n, held, case.dtype).calls[case.module] for n in (2, 3))
    model = source.module
    if case.tp > 1 or case.cp > 1:
        model = copy.deepcopy(model)
    if case.tp > 1:
        apply_as_single_tp_rank(model, TensorPlan(False, dict(case.styles)), case.tp)
    apply_exchange(model, case.context, ContextAxis("cp", case.cp, 0))
    with_loss = case.module == source.logits[0] and source.gives_logits
    return partial(_build, case, model.get_submodule(case.module), small, large, with_loss)


def _build(
    case: TraceCase, module: nn.Module, small: ModuleCall, large: ModuleCall, with_loss: bool, sequences: int
) -> TracedModule:
    dtype = getattr(torch, case.dtype)
    twin = alone_on_fakes(module, dtype)
    freeze_named(twin, case.frozen)
    args, kwargs, held = make_arguments(small.at(large, sequences), dtype)
    if not with_loss:
        return TracedModule(twin, args, kwargs, tuple(held))
    targets = torch.zeros(sequences, case.seq_len // case.cp, dtype=torch.int64)
    return TracedModule(_WithLoss(twin), (targets, *args), kwargs, (*held,))


class _WithLoss(nn.Module):
    """The module that computes the logits, and the loss after it, to trace both together."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.loss = inner, LogitsLoss()

    def forward(self, targets_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        divisor = torch.ones((), device=targets_BT.device)
        loss: Tensor = self.loss(self.inner(*args, **kwargs), targets_BT, divisor)
        return loss
