"""Builds a module of our Llama to trace it."""

import torch

from meshwright.models.llama import Llama
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange
from meshwright.parallel.plan.schema import TensorPlan
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.float8 import multiply_in_float8
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.train.model.llama import BLOCK
from meshwright.train.planning.trace_case import TraceCase, freeze_named


def llama_module(case: TraceCase, sequences: int) -> TracedModule:
    """Return a case's module, as a rank has it after the all-gather, with its arguments, on fake tensors."""
    config, dtype = case.model, getattr(torch, case.dtype)
    torch.set_default_dtype(dtype)  # `.to(dtype)` cannot swap fake parameters
    try:
        model = Llama(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.choose_kernels(case.attention, case.loss_chunk_tokens, case.fused_projections)
    apply_as_single_tp_rank(model, TensorPlan(case.sequence_parallel, dict(case.styles)), case.tp)
    apply_exchange(model, case.context, ContextAxis("cp", case.cp, 0))
    multiply_in_float8(model, case.float8)
    module = model.get_submodule(case.module)
    # An embedding must have something to differentiate; `ModelWorkload.trained` marks a frozen one.
    freeze_named(module, case.frozen if case.module != "tok_embeddings" else ())
    held = case.seq_len // case.cp  # tokens of a rank, without sequence parallelism
    ids = torch.zeros(sequences, held, dtype=torch.int64)
    tokens = held // (case.tp if case.sequence_parallel else 1)
    # Not a leaf: autograd would keep a leaf alive, but in a run only the operators that need the input do.
    x = torch.empty(sequences, tokens, config.dim, dtype=dtype, requires_grad=True).clone()
    if case.module == "tok_embeddings":
        return TracedModule(module, (ids,))
    if case.module == BLOCK:
        size = (sequences, held) if case.document_mask else (held,)
        tables = tuple(torch.empty(*size, config.head_dim // 2, dtype=torch.float32) for _ in range(2))
        if case.document_mask:
            first_BT = torch.zeros(sequences, case.seq_len, dtype=torch.int64)
            return TracedModule(module, (x, *tables, first_BT))
        return TracedModule(module, (x, *tables), tables=tables)
    return TracedModule(module, (x, ids))
