"""What the trace of a module depends on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.parallel.plan.schema import ContextPlan


@dataclass(frozen=True)
class TraceCase:
    """Everything that the workload of a module on one rank depends on.

    `model`: `ModelSource.trace_key`; `module`: of its `kinds`; `styles`: as in
    TensorPlan; `frozen`: names of its parameters that are not trained; `float8`: patterns of the linears that
    multiply in float8; the other fields are those of Plan and UnitPlan. `sequences`: 1, or 2 for every larger
    micro batch.
    """

    model: Any
    module: str
    sequences: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    styles: tuple[tuple[str, str], ...]
    dtype: str
    compiled: bool
    activation_checkpoint: str
    saved_ops: tuple[str, ...]
    activation_budget: float
    attention: str
    loss_chunk_tokens: int
    fused_projections: bool
    frozen: tuple[str, ...]
    document_mask: bool
    float8: tuple[str, ...]
    cp: int
    context: ContextPlan


def freeze_named(module: nn.Module, names: Iterable[str]) -> None:
    """Exclude parameters of a module from training."""
    for name in names:
        module.get_parameter(name).requires_grad_(False)
