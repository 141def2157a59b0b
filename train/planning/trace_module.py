"""Builds a module of a model to trace it: as one rank has it after the all-gather, with the arguments of its
call in a forward of the model's example, on fake tensors."""

import copy
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.loss import LogitsLoss
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange
from meshwright.parallel.model.inputs import (
    ModuleCall,
    alone_on_fakes,
    kind_of,
    make_arguments,
    record_calls,
    with_sizes,
)
from meshwright.parallel.plan.schema import ContextPlan, ShardableModel, TensorPlan
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.float8 import multiply_in_float8
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.train.config import ModelConfig
from meshwright.train.model.trained_model import TrainedModel, model_of


@dataclass(frozen=True)
class TraceCase:
    """Everything that the workload of a module on one rank depends on.

    `model`: of one block if all are alike; `code`: a hash of that of the model; `module`: of `kinds`;
    `styles`: as in TensorPlan; `frozen`: names of its parameters that are not trained; `float8`: patterns of
    the linears that multiply in float8; the other fields are those of Plan and UnitPlan. `sequences`: 1, or 2
    for every larger micro batch.
    """

    model: ModelConfig
    code: str
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


@cache
def kinds_of(config: ModelConfig, seq_len: int) -> Mapping[str, str]:
    """Return for each module of the units the one that is traced for it, because it computes the same."""
    model, first = model_of(config), dict[tuple[object, ...], str]()
    calls = {} if config.of_one_block != config else _calls(config, 2, seq_len, "float32")
    return {
        name: first.setdefault(kind_of(model.module.get_submodule(name), calls.get(name)), name)
        for name in model.units.modules
    }


@cache
def _calls(
    config: ModelConfig, sequences: int, tokens: int, dtype: str, masked_tokens: int = 0
) -> Mapping[str, ModuleCall]:
    """Return the calls of the units' modules with parameters of `dtype`, for a rank's `tokens` of a sequence;
    with a document mask for sequences of `masked_tokens`."""
    model = model_of(config)
    example = with_sizes(model.example, sequences, tokens)
    if masked_tokens:
        ids = torch.zeros(sequences, tokens, dtype=torch.int64, device="meta")
        first = torch.zeros(sequences, masked_tokens, dtype=torch.int64, device="meta")
        example = ids, None, first, None, first[0, :tokens]  # as TrainedModel.computes_loss says
    return record_calls(model.module, example, model.units.modules, getattr(torch, dtype)).calls


def module_builder(case: TraceCase) -> Callable[[int], TracedModule]:
    """Return the function that builds the module of a case for a number of sequences."""
    trained_model, tokens = model_of(case.model), case.seq_len // case.cp
    masked_tokens = case.seq_len if case.document_mask else 0
    small, large = (
        _calls(case.model, sequences, tokens, case.dtype, masked_tokens)[case.module] for sequences in (2, 3)
    )
    model = trained_model.module
    if isinstance(model, ShardableModel) or case.tp > 1 or case.cp > 1:
        model = copy.deepcopy(model)
    if isinstance(model, ShardableModel):
        model.choose_kernels(case.attention, case.loss_chunk_tokens, case.fused_projections)
    if case.tp > 1:
        apply_as_single_tp_rank(model, TensorPlan(case.sequence_parallel, dict(case.styles)), case.tp)
    apply_exchange(model, case.context, ContextAxis("cp", case.cp, 0))
    multiply_in_float8(model, case.float8)
    return partial(_build, case, trained_model, model.get_submodule(case.module), small, large)


def _build(
    case: TraceCase,
    model: TrainedModel,
    module: nn.Module,
    small: ModuleCall,
    large: ModuleCall,
    sequences: int,
) -> TracedModule:
    dtype, call = getattr(torch, case.dtype), small.at(large, sequences)
    twin = alone_on_fakes(module, dtype)
    # a module of ids must have something to differentiate; `ModelWorkload.trained` marks a frozen one
    for name in case.frozen if any(spec.trained for spec in call.tensors) else ():
        twin.get_parameter(name).requires_grad_(False)
    if case.sequence_parallel:
        call = call.split(1, case.tp)
    args, kwargs, held = make_arguments(call, dtype)
    tables = () if case.document_mask else tuple(held)  # with a mask they are those of these sequences
    targets = torch.zeros(sequences, case.seq_len // case.cp, dtype=torch.int64)
    if f"{model.logits[1]}.".startswith(f"{case.module}."):
        if model.computes_loss:
            return TracedModule(twin, (args[0], targets), tables=tables)
        if model.gives_logits:
            return TracedModule(_WithLoss(twin), (targets, *args), kwargs, tables)
    return TracedModule(twin, args, kwargs, tables)


class _WithLoss(nn.Module):
    """The module that computes the logits, and the loss after it, to trace both together."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.loss = inner, LogitsLoss()

    def forward(self, targets_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        divisor = torch.ones((), device=targets_BT.device)
        loss: Tensor = self.loss(self.inner(*args, **kwargs), targets_BT, divisor)
        return loss


@cache
def code_of_config(config: ModelConfig) -> str:
    """Return `code_of` of the model of a config."""
    return code_of(model_of(config).module)


def code_of(model: nn.Module) -> str:
    """Return a hash of the code of a model: versions of installed packages that its classes are from, and the
    contents of all other modules that are loaded from their folders, without packages that are installed in
    one, as in its .venv."""
    digest, folders = hashlib.sha256(), set[Path]()
    for kind in sorted({type(module) for module in model.modules()}, key=repr):
        top = kind.__module__.partition(".")[0]
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        try:
            digest.update(f"{kind} {importlib.metadata.version(top)}".encode())
        except importlib.metadata.PackageNotFoundError:
            folders |= {Path(file).parent} if file else set()
    loaded: Sequence[Any] = list(sys.modules.values())
    files = {Path(file) for module in loaded if (file := getattr(module, "__file__", None))}
    own = (path for path in files if folders & set(path.parents) and "site-packages" not in path.parts)
    for path in sorted(path for path in own if path.suffix == ".py" and path.is_file()):  # some are made up
        digest.update(path.read_bytes())
    return digest.hexdigest()
