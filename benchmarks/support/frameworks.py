"""What the frameworks of published runs do differently from this project, read from their code: as changes of
the plan and of the workload that stand for one of their runs.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import StepTimes, UnitTimes
from meshwright.parallel.planner.workload import (
    Linear,
    ModelWorkload,
    ModuleWorkload,
    Operation,
    Phase,
    total,
)

ATTENTION = "flash"  # of scaled_dot_product_attention in both
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
        plan, attention=ATTENTION, units=(*plan.units[:-1], replace(plan.units[-1], compiled=False))
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
        attention=ATTENTION,
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


def kempnerforge_times(plan: Plan, times: StepTimes) -> StepTimes:
    """Return the times without FSDP2, which KempnerForge does not use without data parallelism."""
    if plan.mesh.dp_shard * plan.mesh.dp_replicate > 1:
        return times
    nothing = UnitTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return replace(times, units=dict.fromkeys(times.units, nothing), hook_s=0.0)


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
