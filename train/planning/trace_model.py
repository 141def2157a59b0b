"""Traces a model's workload under a plan, module by module, and caches it on disk: a trace takes seconds and
depends only on the config, the code and torch."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.plan.float8_rules import count_float8
from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.plan.selective_policy import MATMUL
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.float8 import PRODUCT
from meshwright.parallel.planner.tracing.trace import (
    MOST_TRACED_SEQUENCES,
    JointGraph,
    capture_joint,
    compiled_workload,
    eager_workload,
)
from meshwright.parallel.planner.workload import ModelWorkload, ModuleWorkload
from meshwright.train.config import ModelConfig
from meshwright.train.files import write_atomically
from meshwright.train.model.trained_model import TrainedModel, model_of
from meshwright.train.planning.trace_module import TraceCase, code_of_config, kinds_of, module_builder


def model_workload(
    model: ModelConfig,
    plan: Plan,
    seq_len: int,
    frozen: frozenset[str] = frozenset(),
    document_mask: bool = False,
    folder: Path | None = None,
) -> ModelWorkload:
    """Return the workload of one rank for each module.

    Args:
        seq_len: tokens per sequence
        frozen: names of parameters that are not trained
        document_mask: sequences contain several documents that do not attend to each other
        folder: caches traces on disk; None: only in this process

    Modules of one kind with the same settings are traced once.
    """
    trained_model = model_of(model)
    kinds, units = kinds_of(model, seq_len), trained_model.units
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    modules, traced = dict[str, ModuleWorkload](), dict[Any, ModuleWorkload]()
    for name in plan.modules:
        fixed = tuple(sorted(fqn.removeprefix(f"{name}.") for fqn in frozen if fqn.startswith(f"{name}.")))
        in_block = name in units.checkpointed
        equal = kinds[name], unit_of[name].settings, fixed, in_block
        if equal not in traced:
            masked = document_mask and in_block
            case = _make_case(trained_model, plan, unit_of[name], kinds[name], seq_len, fixed, masked)
            traced[equal] = _trace(case, folder)
        modules[name] = traced[equal]
    if parameters := count_float8(plan, units.linears):
        blocks = {id(work): work for name, work in modules.items() if name in units.checkpointed}
        multiplied = {key: dataclasses.replace(work, float8=parameters) for key, work in blocks.items()}
        modules = {name: multiplied.get(id(work), work) for name, work in modules.items()}
    for name, shared in _shared_weights(model).items():
        work = modules[name]
        weights = tuple(w for i, w in enumerate(work.weights) if i not in shared)
        parameters = sum(rows * values for rows, values in weights)
        modules[name] = dataclasses.replace(work, parameters=parameters, weights=weights)
    tables = trained_model.tables(seq_len // plan.mesh.cp)
    return ModelWorkload(modules, {}, seq_len, plan.modules[-1], tables)


@cache
def _shared_weights(model: ModelConfig) -> dict[str, frozenset[int]]:
    """Return the places of the parameters that a later module shares, by module: they count there, where
    their gradient begins."""
    built, modules, last = model_of(model).module, model_of(model).units.modules, dict[nn.Parameter, str]()
    for name in modules:
        last |= dict.fromkeys(built.get_submodule(name).parameters(), name)
    places = {
        name: frozenset(i for i, p in enumerate(built.get_submodule(name).parameters()) if last[p] != name)
        for name in modules
    }
    return {name: shared for name, shared in places.items() if shared}


def _make_case(
    model: TrainedModel,
    plan: Plan,
    unit: UnitPlan,
    module: str,
    seq_len: int,
    frozen: tuple[str, ...],
    document_mask: bool,
) -> TraceCase:
    return TraceCase(
        model=model.config.of_one_block,
        code=code_of_config(model.config.of_one_block),
        module=module,
        sequences=min(plan.micro_batch_size, MOST_TRACED_SEQUENCES),
        seq_len=seq_len,
        tp=plan.mesh.tp,
        sequence_parallel=plan.tensor.sequence_parallel,
        styles=tuple(plan.tensor.styles.items()),
        dtype=unit.param_dtype,
        compiled=_is_compiled(model, module, plan, unit),
        activation_checkpoint="none"
        if unit.activation_checkpoint == "offload"
        else unit.activation_checkpoint,
        saved_ops=unit.saved_ops,
        activation_budget=unit.activation_budget,
        attention="math" if plan.attention == "math" else "",  # every fused kernel keeps the same activations
        loss_chunk_tokens=plan.loss_chunk_tokens,
        fused_projections=plan.fused_projections,
        frozen=frozen,
        document_mask=document_mask,
        float8=plan.float8.linears if module in model.units.checkpointed else (),
        cp=plan.mesh.cp,
        context=plan.context,
    )


def _is_compiled(model: TrainedModel, module: str, plan: Plan, unit: UnitPlan) -> bool:
    """Whether a module is traced as compiled: those that can be, and the loss with the product before it."""
    with_loss = plan.compile.enabled and module == model.logits[0] and model.gives_logits
    return ((unit.compiled and module in model.units.compiled) or with_loss) and (
        plan.compile.backend != "eager"
    )


@cache
def _trace(case: TraceCase, folder: Path | None) -> ModuleWorkload:
    def trace() -> ModuleWorkload:
        return _trace_compiled(case) if case.compiled else eager_workload(_recomputed(case))

    return remember(folder, case, trace) if folder else trace()


def _trace_compiled(case: TraceCase) -> ModuleWorkload:
    """Return the workload of a compiled module. Cases that differ in activation checkpointing share one
    captured graph, unless it decomposes an operator whose results are to be saved."""
    joint = _capture(
        dataclasses.replace(case, activation_checkpoint="none", saved_ops=(), activation_budget=1.0)
    )
    saved_ops = _saved_ops(case)
    if joint.decomposes(saved_ops or ()):
        joint, saved_ops = _capture(dataclasses.replace(case, activation_budget=1.0)), None
    return compiled_workload(joint, saved_ops, case.activation_budget)


@cache
def _capture(case: TraceCase) -> JointGraph:
    return capture_joint(_recomputed(case), case.sequences)


def _saved_ops(case: TraceCase) -> tuple[str, ...] | None:
    """Return the operators whose results activation checkpointing saves; None without it."""
    if case.activation_checkpoint not in ("full", "selective"):
        return None
    return case.saved_ops + tuple(
        op.replace(MATMUL, PRODUCT) for op in case.saved_ops if case.float8 and MATMUL in op
    )


def _recomputed(case: TraceCase) -> Callable[[int], TracedModule]:
    """Return the function that builds the module of a case, with its activation checkpointing."""
    build_module = module_builder(case)

    def build(sequences: int) -> TracedModule:
        subject = build_module(sequences)
        if (saved_ops := _saved_ops(case)) is not None:
            recompute(subject.module, saved_ops)
        return subject

    return build


# code that a trace depends on
TRACED_CODE = ("models/**/*.py", "parallel/**/*.py", "train/model/*.py", "train/planning/trace_*.py")


def remember(folder: Path, case: object, trace: Callable[[], ModuleWorkload]) -> ModuleWorkload:
    """Return the workload of a case from `folder`, or trace it and write it there.

    The repr of `case` is the cache key. A file that cannot be read or written is ignored.
    """
    key = hashlib.sha256(f"{case!r} {torch.__version__} {_digest_of_code()}".encode()).hexdigest()
    path = folder / f"work-{key[:32]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModuleWorkload)
    except (OSError, ValueError):
        work = trace()
    with contextlib.suppress(OSError, ValueError):  # ValueError: not a valid path
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(work))
    return work


@cache
def _digest_of_code() -> str:
    """Return a hash of the code that is traced and of the code that traces it."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for pattern in TRACED_CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
