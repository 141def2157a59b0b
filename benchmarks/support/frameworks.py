"""What the frameworks of published runs do differently from this project, read from their code: as changes of
the plan and of the workload that stand for one of their runs.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshwright.parallel.plan.schema import Plan, regathered
from meshwright.parallel.planner.cost_model import (
    StepTimes,
    UnitTimes,
    copying_s,
    optimizer_s,
    trained_parameters,
)
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.workload import (
    DTYPE_BYTES,
    Linear,
    ModelWorkload,
    ModuleWorkload,
    Operation,
    Phase,
    total,
)

# What scaled_dot_product_attention ran, by the GPU of a published run: torchtitan's runs on H100s are older
# than torch's preference for cuDNN on Hopper, on B200s it prefers cuDNN itself (pytorch/torchtitan#1196), and
# KempnerForge's profile of April 2026 lists aten::_cudnn_attention_backward
# (benchmarks/profiling/13b_24gpu_profiling.md).
ATTENTION = {"h100-500w": "flash", "h100": "flash", "h200": "cudnn", "b200-capped": "cudnn"}
# KempnerForge (kempnerforge/distributed/tensor_parallel.py) gives every column-parallel layer a sequence-
# parallel input of its own: three all-gathers of one tensor before attention and two before the feed-forward
# network, where this project has one each, and as many reduce-scatters of their gradients. In the backward it
# recomputes the whole block, including the last reduce-scatter.
OWN_GATHERS = {
    "forward": {"all_gather": 5 / 2, "reduce_scatter": 1.0},
    "backward": {"all_gather": 7 / 4, "reduce_scatter": 7 / 3},
}
# torchtitan rotates queries and keys as complex numbers (torchtitan/models/llama/model.py, 2024): eager, it
# runs one product where this project runs these and two products.
NOT_FOR_COMPLEX = frozenset({"neg", "cat"})
BF16_BYTES = 2


def torchtitan_plan(plan: Plan) -> Plan:
    """Return the plan as torchtitan carries it out: it compiles only the blocks."""
    return replace(
        plan,
        units=(*plan.units[:-1], replace(plan.units[-1], compiled=False)),
    )


def torchtitan_workload(plan: Plan, work: ModelWorkload) -> ModelWorkload:
    """Return the workload of torchtitan's blocks."""
    if not plan.units[1].compiled:
        return _with_blocks(work, _rotating_complex_numbers)
    if not plan.float8.linears or plan.mesh.tp == 1:
        return work
    return _with_blocks(work, lambda block: _gathering_float8(block, plan.mesh.tp))


def kempnerforge_plan(plan: Plan) -> Plan:
    """Return the plan as KempnerForge carries it out: embedding and head are one unit, which is resharded
    after the forward, and parameters are stored in bfloat16."""
    first, *blocks, last = plan.units
    root = replace(first, modules=first.modules + last.modules, reshard_after_forward=True)
    return replace(
        plan,
        units=(root, *blocks),
        storage_dtype="bfloat16",
    )


def kempnerforge_workload(plan: Plan, work: ModelWorkload) -> ModelWorkload:
    """Return the workload of KempnerForge: moments in bfloat16, and with tensor parallelism its collectives,
    an embedding and logits that are not sharded."""
    work = replace(work, moment_bytes=BF16_BYTES)
    if plan.mesh.tp == 1:
        return work
    work = _with_blocks(work, _gathering_for_every_layer)
    embedding, head = work.modules["tok_embeddings"], work.modules["head"]
    whole = {
        "tok_embeddings": replace(embedding, parameters=embedding.parameters * plan.mesh.tp),
        "head": _with_whole_logits(head, plan.mesh.tp, work.seq_len),
    }
    return replace(work, modules={**work.modules, **whole})


NOTHING = UnitTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def kempnerforge_times(plan: Plan, work: ModelWorkload, hardware: Hardware, times: StepTimes) -> StepTimes:
    """Return the times with torch's AdamW, and without FSDP2 where KempnerForge has no data parallelism:
    autograd adds the gradients of the micro batches."""
    times = replace(times, optimizer_s=optimizer_s(plan, work, hardware, {}))
    if plan.mesh.data_parallel > 1:
        return times
    added = {unit.name: 3 * BF16_BYTES * trained_parameters(unit.modules, work) for unit in plan.units}
    units = {name: replace(NOTHING, sum_s=copying_s(moved, hardware)) for name, moved in added.items()}
    return replace(times, units=units, hook_s=0.0)


# Instructions of AdamW's kernel at that commit, as in `cost_model.ADAMW_INSTRUCTIONS`.
H200_ADAMW = {(4, 2): 128.2, (2, 4): 112.0, (2, 2): 140.5}


def own_h200_times(plan: Plan, work: ModelWorkload, hardware: Hardware, times: StepTimes) -> StepTimes:
    """Return the times of this project at b3daa89c (benchmarks/records/2026-11-26-gpu.json) on one rank.
    FSDP2 copied all weights when it gathered them, after a cast if they were stored in float32; it copied the
    gradients to float32, divided them by one, copied them, and cast them to the dtype of the weights."""
    stored, moved = DTYPE_BYTES[plan.storage_dtype], 0.0
    for unit in plan.units:
        parameters = sum(work.modules[name].parameters for name in unit.modules)
        cast = stored + BF16_BYTES if stored != BF16_BYTES else 0
        moved += parameters * (2 * BF16_BYTES + cast) * (1 + regathered(unit))
        moved += trained_parameters(unit.modules, work) * (6 + 8 + 8 + (4 + stored if stored != 4 else 0))
    update_s = optimizer_s(plan, work, hardware, H200_ADAMW) + copying_s(moved, hardware)
    return replace(times, units=dict.fromkeys(times.units, NOTHING), optimizer_s=update_s)


def _with_blocks(work: ModelWorkload, change: Callable[[ModuleWorkload], ModuleWorkload]) -> ModelWorkload:
    """Return the workload with changed blocks; equal blocks stay one object."""
    blocks = {id(m): change(m) for name, m in work.modules.items() if name.startswith("layers.")}
    return replace(work, modules={name: blocks.get(id(m), m) for name, m in work.modules.items()})


def _with_operations(
    module: ModuleWorkload, change: Callable[[str, Operation], Operation | None]
) -> ModuleWorkload:
    """Return the module with changed operations, each given with its phase; None removes one."""

    def changed(name: str, phase: Phase) -> Phase:
        return replace(phase, operations=tuple(filter(None, (change(name, op) for op in phase.operations))))

    return replace(
        module, forward=changed("forward", module.forward), backward=changed("backward", module.backward)
    )


def _rotating_complex_numbers(module: ModuleWorkload) -> ModuleWorkload:
    return _with_operations(module, lambda phase, op: None if op.name in NOT_FOR_COMPLEX else op)


def _gathering_float8(block: ModuleWorkload, tp: int) -> ModuleWorkload:
    """Return the block with tensor-parallel all-gathers of float8 (torchao/float8/float8_tensor_parallel.py),
    where this project gathers bfloat16 and casts the whole tensor."""
    forward, backward = (
        replace(phase, operations=tuple(_cast_first(phase.operations, tp)))
        for phase in (block.forward, block.backward)
    )
    return replace(block, forward=forward, backward=backward)


def _cast_first(operations: Sequence[Operation], tp: int) -> Iterator[Operation]:
    """Yield the operations with half the bytes in all-gathers. What casts the gathered tensor reads it twice,
    and writes it for each product in the layout that this needs. Cast before, a rank reads its part twice and
    writes it, and what was gathered is read and written in these layouts: DTensor joins the parts along the
    tokens by torch.cat, and a weight's gradient needs a transposed copy (preprocess_addmm in float8_ops.py).
    """
    gathered: Linear | None = None
    for operation in operations:
        if gathered and operation.kind == "memory":
            cast, read_less = gathered.times(2.5 / tp), gathered.times(0.5 - 2)
            operation = replace(operation, bytes=total((operation.bytes, read_less, cast)))
        gathered = operation.bytes if operation.name == "all_gather" else None
        yield replace(operation, bytes=operation.bytes.times(0.5)) if gathered else operation


def _gathering_for_every_layer(module: ModuleWorkload) -> ModuleWorkload:
    def own(phase: str, operation: Operation) -> Operation:
        factor = OWN_GATHERS[phase].get(operation.name, 1.0)
        return replace(operation, bytes=operation.bytes.times(factor))

    return _with_operations(module, own)


def _with_whole_logits(head: ModuleWorkload, tp: int, seq_len: int) -> ModuleWorkload:
    """Return the head as every rank gathers all logits[T, V] and computes the whole loss."""
    vocabulary = tp * head.weights[-1][0]

    def whole(phase: str, operation: Operation) -> Operation:
        return (
            replace(operation, bytes=operation.bytes.times(tp)) if operation.kind == "memory" else operation
        )

    head = _with_operations(head, whole)
    logits = Linear(0.0, float(seq_len * vocabulary * BF16_BYTES))
    gather = Operation("collective", "all_gather", Linear(), logits, "bfloat16", axis="tp")
    return replace(head, forward=replace(head.forward, operations=(*head.forward.operations, gather)))
