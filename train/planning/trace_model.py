"""Traces a model's workload under a plan, module by module; `captures` has what was traced before.

A module is built as one rank has it after the all-gather, with the arguments of its call in a forward of the
model's example, on fake tensors.
"""

import copy
import fnmatch
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.models.loss import LogitsLoss
from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange
from meshwright.parallel.fsdp import parameters_by_module
from meshwright.parallel.model.inputs import (
    ModuleCall,
    alone_on_fakes,
    kind_of,
    make_arguments,
    record_calls,
    with_sizes,
)
from meshwright.parallel.plan.float8_rules import count_float8
from meshwright.parallel.plan.schema import (
    ContextPlan,
    Plan,
    ShardableModel,
    TensorPlan,
    UnitPlan,
    without_containers,
)
from meshwright.parallel.plan.selective_policy import MATMUL
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.float8 import PRODUCT, multiply_in_float8
from meshwright.parallel.planner.tracing.trace import (
    MOST_TRACED_SEQUENCES,
    JointGraph,
    apply_as_single_tp_rank,
    capture_joint,
    compiled_workload,
    eager_workload,
    list_weights,
)
from meshwright.parallel.planner.workload import Linear, ModelWorkload, ModuleWorkload, Phase, with_loss
from meshwright.train.config import ModelConfig
from meshwright.train.model.trained_model import TrainedModel, model_of
from meshwright.train.planning.captures import TraceCase, remember


@cache
def kinds_of(config: ModelConfig, seq_len: int) -> Mapping[str, str]:
    """Return for each module of the units the one that is traced for it, because it computes the same."""
    model, first = model_of(config), dict[tuple[object, ...], str]()
    calls = {} if config.of_one_block != config else _calls(config, 2, seq_len, "float32")
    return {
        name: first.setdefault(kind_of(model.module.get_submodule(name), calls.get(name)), name)
        for name in without_containers(model.units.modules)
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
    names = without_containers(model.units.modules)
    return record_calls(model.module, example, names, getattr(torch, dtype)).calls


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
    if _has_loss(model, case.module):
        targets = torch.zeros(sequences, case.seq_len // case.cp, dtype=torch.int64)
        return TracedModule(twin, (args[0], targets), tables=tables)
    return TracedModule(twin, args, kwargs, tables)


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
        folder: caches traces on disk; None: none are read or written

    Modules of one kind with the same settings are traced once.
    """
    trained_model, traced, output = model_of(model), dict[str, ModuleWorkload](), Linear()
    for case, names in cases_of(model, plan, seq_len, frozen, document_mask):
        traced |= dict.fromkeys(names, trace_and_keep(case, folder))
    modules, units = dict[str, ModuleWorkload](), trained_model.units
    parameters_of = _parameters_of(model)
    for name in plan.modules:
        modules[name] = traced.get(name) or _of_container([*parameters_of[name].values()], output)
        output = modules[name].output
    if parameters := count_float8(plan, units.linears):
        blocks = {id(work): work for name, work in modules.items() if name in units.checkpointed}
        multiplied = {key: replace(work, float8=parameters) for key, work in blocks.items()}
        modules = {name: multiplied.get(id(work), work) for name, work in modules.items()}
    for name, shared in _shared_weights(model).items():
        work = modules[name]
        weights = tuple(w for i, w in enumerate(work.weights) if i not in shared)
        parameters = sum(rows * values for rows, values in weights)
        modules[name] = replace(work, parameters=parameters, weights=weights)
    tables = trained_model.tables(seq_len // plan.mesh.cp)
    return ModelWorkload(modules, {}, seq_len, plan.modules[-1], tables)


def cases_of(
    model: ModelConfig, plan: Plan, seq_len: int, frozen: frozenset[str], document_mask: bool
) -> Iterable[tuple[TraceCase, list[str]]]:
    """Return what is traced for a plan, with the names of the modules that it stands for. The arguments are
    those of `model_workload`."""
    trained_model = model_of(model)
    kinds, units = kinds_of(model, seq_len), trained_model.units
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    cases = dict[Any, tuple[TraceCase, list[str]]]()
    for name in filter(kinds.__contains__, plan.modules):
        fixed = tuple(sorted(fqn.removeprefix(f"{name}.") for fqn in frozen if fqn.startswith(f"{name}.")))
        in_block = name in units.checkpointed
        equal = kinds[name], unit_of[name].settings, fixed, in_block
        if equal not in cases:
            masked = document_mask and in_block
            case = _make_case(trained_model, plan, unit_of[name], kinds[name], seq_len, fixed, masked)
            cases[equal] = case, []
        cases[equal][1].append(name)
    return cases.values()


def _of_container(parameters: Sequence[nn.Parameter], output: Linear) -> ModuleWorkload:
    """Return the workload of a module that contains others: its own parameters, and nothing to compute.
    `output`: of the module before, which it passes on."""
    nothing = Phase((), ())
    weights = list_weights(parameters)
    return ModuleWorkload(sum(map(prod, weights)), nothing, nothing, Linear(), output, weights)


@cache
def _parameters_of(model: ModelConfig) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each module of the units, by name."""
    return parameters_by_module(model_of(model).module, model_of(model).units.modules)


@cache
def _shared_weights(model: ModelConfig) -> dict[str, frozenset[int]]:
    """Return the places of the parameters that a later module shares, by module: they count there, where
    their gradient begins."""
    of = _parameters_of(model)
    last = dict[nn.Parameter, str]()
    for name, parameters in of.items():
        last |= dict.fromkeys(parameters.values(), name)
    places = {
        name: frozenset(i for i, p in enumerate(parameters.values()) if last[p] != name)
        for name, parameters in of.items()
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
    compiled = _is_compiled(model, module, plan, unit)
    exchanges = _has_cores(model, module, plan.context.cores)
    return TraceCase(
        model=model.config.of_one_block,
        code=code_of_config(model.config.of_one_block),
        module=module,
        sequences=min(plan.micro_batch_size, MOST_TRACED_SEQUENCES) if compiled else MOST_TRACED_SEQUENCES,
        seq_len=seq_len if exchanges else seq_len // plan.mesh.cp,
        tp=plan.mesh.tp,
        sequence_parallel=plan.tensor.sequence_parallel,
        styles=tuple(plan.tensor.styles.items()),
        dtype=unit.param_dtype,
        compiled=compiled,
        activation_checkpoint="none"
        if unit.activation_checkpoint == "offload"
        else unit.activation_checkpoint,
        saved_ops=unit.saved_ops,
        activation_budget=unit.activation_budget,
        attention="math" if plan.attention == "math" else "",  # every fused kernel keeps the same activations
        on_cuda=not compiled and plan.attention not in ("", "cpu", "math"),  # else it is not known
        loss_chunk_tokens=plan.loss_chunk_tokens if _has_loss(model, module) else 0,
        fused_projections=plan.fused_projections,
        frozen=frozen,
        document_mask=document_mask,
        float8=plan.float8.linears if module in model.units.checkpointed else (),
        cp=plan.mesh.cp if exchanges else 1,
        context=plan.context if exchanges else ContextPlan(),
    )


def _has_loss(model: TrainedModel, module: str) -> bool:
    """Whether a module computes the loss itself."""
    return model.computes_loss and f"{model.logits[1]}.".startswith(f"{module}.")


@cache
def _has_cores(model: TrainedModel, module: str, cores: tuple[str, ...]) -> bool:
    """Whether a module contains any of attention's cores, around which ranks of cp exchange."""
    names = [name for name, _ in model.module.get_submodule(module).named_modules(prefix=module)]
    return any(fnmatch.fnmatchcase(name, core) for core in cores for name in names)


def _is_compiled(model: TrainedModel, module: str, plan: Plan, unit: UnitPlan) -> bool:
    """Whether a module is traced as compiled: those that can be, and the product before a compiled loss."""
    before_loss = plan.compile.enabled and module == model.logits[0] and model.gives_logits
    return ((unit.compiled and module in model.units.compiled) or before_loss) and (
        plan.compile.backend != "eager"
    )


@cache
def trace_and_keep(case: TraceCase, folder: Path | None) -> ModuleWorkload:
    """Return the workload of a case, as `remember` does, and once for all in this process."""
    return remember(folder, case, partial(trace_case, case))


def trace_case(case: TraceCase) -> ModuleWorkload:
    """Trace the workload of a case, whether it is known or not."""
    work = _trace_compiled(case) if case.compiled else eager_workload(_recomputed(case), case.on_cuda)
    model = model_of(case.model)
    if case.module != model.logits[0] or not model.gives_logits:
        return work
    build = partial(_loss_of_logits, module_builder(case))
    if case.compiled:
        return with_loss(work, compiled_workload(capture_joint(build, case.sequences)))
    return with_loss(work, eager_workload(build, case.on_cuda))


def _trace_compiled(case: TraceCase) -> ModuleWorkload:
    """Return the workload of a compiled module. Cases that differ in activation checkpointing share one
    captured graph, unless it decomposes an operator whose results are to be saved."""
    joint = _capture(replace(case, activation_checkpoint="none", saved_ops=(), activation_budget=1.0))
    saved_ops = _saved_ops(case)
    if joint.decomposes(saved_ops or ()):
        joint, saved_ops = _capture(replace(case, activation_budget=1.0)), None
    return compiled_workload(joint, saved_ops, case.activation_budget)


def _loss_of_logits(build: Callable[[int], TracedModule], sequences: int) -> TracedModule:
    """Return the loss of the logits of the module that `build` returns."""
    (logits,) = build(sequences).call()
    given = torch.empty_like(logits, requires_grad=True).clone()
    targets = torch.zeros(logits.shape[:2], dtype=torch.int64)
    return TracedModule(LogitsLoss(), (given, targets, torch.ones(())))


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
