"""Traces a Llama's workload under a plan, module by module, and caches it on disk: a trace takes seconds and
depends only on the config, this project's code and torch."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import msgspec
import torch

from meshwright.models.llama import Llama, LlamaConfig, block_linears
from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.plan.float8_rules import count_float8
from meshwright.parallel.plan.schema import Plan, TensorPlan, UnitPlan
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
)
from meshwright.parallel.planner.workload import ModelWorkload, ModuleWorkload
from meshwright.train.files import write_atomically

BLOCKS = "layers."
BLOCK = f"{BLOCKS}0"  # stands for every block


@dataclasses.dataclass(frozen=True)
class _Case:
    """Everything that a module's workload depends on.

    `module`: tok_embeddings, head or BLOCK, in a model of one block; `styles`: as in TensorPlan; `frozen`:
    names of its parameters that are not trained; `float8`: patterns of the linears that multiply in float8;
    the other fields are those of Plan and UnitPlan.
    `sequences`: 1, or 2 for every larger micro batch.
    """

    model: LlamaConfig
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


def model_workload(
    config: LlamaConfig,
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

    Modules with the same settings are traced once.
    """
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    modules, traced = dict[str, ModuleWorkload](), dict[tuple[object, ...], ModuleWorkload]()
    for name in plan.modules:
        unit, kind = unit_of[name], BLOCK if name.startswith(BLOCKS) else name
        fixed = tuple(sorted(fqn.removeprefix(f"{name}.") for fqn in frozen if fqn.startswith(f"{name}.")))
        key = (
            kind,
            unit.param_dtype,
            unit.compiled,
            unit.activation_checkpoint,
            unit.saved_ops,
            unit.activation_budget,
            fixed,
        )
        if key not in traced:
            case = _make_case(config, plan, unit, kind, seq_len)
            traced[key] = _trace(
                dataclasses.replace(
                    case,
                    frozen=fixed,
                    document_mask=document_mask and kind == BLOCK,
                    float8=plan.float8.linears if kind == BLOCK else (),
                ),
                folder,
            )
        modules[name] = traced[key]
    if parameters := count_float8(plan, block_linears(config)):
        blocks = {id(work): work for name, work in modules.items() if name.startswith(BLOCKS)}
        multiplied = {key: dataclasses.replace(work, float8=parameters) for key, work in blocks.items()}
        modules = {name: multiplied.get(id(work), work) for name, work in modules.items()}
    if config.tie_embeddings:  # one weight; its gradient begins in the head
        modules["tok_embeddings"] = dataclasses.replace(modules["tok_embeddings"], parameters=0, weights=())
    tables = 2 * config.max_seq_len * config.head_dim * torch.float32.itemsize  # of models.rope
    return ModelWorkload(modules, {}, seq_len, "head", tables)


def _make_case(config: LlamaConfig, plan: Plan, unit: UnitPlan, module: str, seq_len: int) -> _Case:
    return _Case(
        model=dataclasses.replace(config, n_layers=1, rope_scaling=None),
        module=module,
        sequences=min(plan.micro_batch_size, MOST_TRACED_SEQUENCES),
        seq_len=seq_len,
        tp=plan.mesh.tp,
        sequence_parallel=plan.tensor.sequence_parallel,
        styles=tuple(plan.tensor.styles.items()),
        dtype=unit.param_dtype,
        compiled=unit.compiled and module != "tok_embeddings" and plan.compile.backend != "eager",
        activation_checkpoint="none"
        if unit.activation_checkpoint == "offload"
        else unit.activation_checkpoint,
        saved_ops=unit.saved_ops,
        activation_budget=unit.activation_budget,
        attention="math" if plan.attention == "math" else "",  # every fused kernel keeps the same activations
        loss_chunk_tokens=plan.loss_chunk_tokens,
        fused_projections=plan.fused_projections,
        frozen=(),
        document_mask=False,
        float8=(),
    )


@cache
def _trace(case: _Case, folder: Path | None) -> ModuleWorkload:
    trace = partial(_trace_compiled if case.compiled else _trace_eager, case)
    return remember(folder, case, trace) if folder else trace()


def _trace_eager(case: _Case) -> ModuleWorkload:
    return eager_workload(partial(_build, case))


def _trace_compiled(case: _Case) -> ModuleWorkload:
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
def _capture(case: _Case) -> JointGraph:
    return capture_joint(partial(_build, case), case.sequences)


def _saved_ops(case: _Case) -> tuple[str, ...] | None:
    """Return the operators whose results activation checkpointing saves; None without it."""
    if case.activation_checkpoint not in ("full", "selective"):
        return None
    return case.saved_ops + tuple(
        op.replace(MATMUL, PRODUCT) for op in case.saved_ops if case.float8 and MATMUL in op
    )


def _build(case: _Case, sequences: int) -> TracedModule:
    """Build the module and its inputs as one rank has them after the all-gather."""
    dtype = getattr(torch, case.dtype)
    torch.set_default_dtype(dtype)  # `.to(dtype)` cannot swap fake parameters
    try:
        model = Llama(case.model)
    finally:
        torch.set_default_dtype(torch.float32)
    model.choose_kernels(case.attention, case.loss_chunk_tokens, case.fused_projections)
    apply_as_single_tp_rank(model, TensorPlan(case.sequence_parallel, dict(case.styles)), case.tp)
    multiply_in_float8(model, case.float8)
    module = model.get_submodule(case.module)
    # An embedding must have something to differentiate; `ModelWorkload.trained` marks a frozen one.
    for name in case.frozen if case.module != "tok_embeddings" else ():
        module.get_parameter(name).requires_grad_(False)
    if (saved_ops := _saved_ops(case)) is not None:
        recompute(module, saved_ops)
    ids_BT = torch.zeros(sequences, case.seq_len, dtype=torch.int64)
    tokens = case.seq_len // (case.tp if case.sequence_parallel else 1)
    # Not a leaf: autograd would keep a leaf alive, but in a run only the operators that need the input do.
    x = torch.empty(sequences, tokens, case.model.dim, dtype=dtype, requires_grad=True).clone()
    if case.module == "tok_embeddings":
        return TracedModule(module, (ids_BT,))
    if case.module == BLOCK:
        size = (sequences, case.seq_len) if case.document_mask else (case.seq_len,)
        tables = tuple(torch.empty(*size, case.model.head_dim, dtype=torch.float32) for _ in range(2))
        if case.document_mask:
            return TracedModule(module, (x, *tables, ids_BT))
        return TracedModule(module, (x, *tables), tables=tables)
    return TracedModule(module, (x, ids_BT))


TRACED_CODE = ("models", "parallel", "train/planning/trace_model.py")  # code that a trace depends on


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
    for name in TRACED_CODE:
        for path in [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
