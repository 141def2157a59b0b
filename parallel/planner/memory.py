"""Memory of one rank under a plan, by formula. Bytes throughout."""

from dataclasses import asdict, dataclass

from parallel.plan import Plan

FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelFootprint:
    """What a model says of its size, for planning; tuples have one entry per FSDP unit, in plan order.

    `saved_per_token`: values a unit keeps per token for its backward; `input_per_token`: what is left of them when
    it is checkpointed in full. `logits_per_token`: width of the output head.
    """

    unit_parameters: tuple[int, ...]
    saved_per_token: tuple[int, ...]
    input_per_token: tuple[int, ...]
    logits_per_token: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by kind, at the step's peak."""

    params: int
    grads: int
    optimizer: int
    unsharded: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def estimate_memory(plan: Plan, model: ModelFootprint, seq_len: int) -> MemoryEstimate:
    """Estimate a rank's memory: float32 sharded parameters, gradients and two Adam moments; the units that are
    gathered at once; what the forward keeps; the logits; the reduction's buffer. Allocator overhead is not in it.
    """
    shards = plan.mesh.dp_shard
    sharded = sum(-(-count // shards) for count in model.unit_parameters) * FLOAT32_BYTES
    tokens = plan.micro_batch_size * seq_len
    dtype_bytes = max(DTYPE_BYTES[unit.param_dtype] for unit in plan.units)
    largest = max(model.unit_parameters)
    reduce_bytes = max(DTYPE_BYTES[unit.reduce_dtype] for unit in plan.units)
    return MemoryEstimate(
        params=sharded,
        grads=sharded,
        optimizer=2 * sharded,
        unsharded=_unsharded(plan, model),
        activations=_activations(plan, model, tokens),
        # the logits, their float32 copy in the loss, and their gradient
        logits=tokens * model.logits_per_token * (2 * dtype_bytes + FLOAT32_BYTES),
        # the largest unit's whole gradient, and its copy on the way into the reduce-scatter
        buffers=largest * (dtype_bytes + reduce_bytes),
    )


def _unsharded(plan: Plan, model: ModelFootprint) -> int:
    """Gathered parameters: units that stay gathered after their forward, and of the others as many of the largest
    as are gathered at once (the one at work and those prefetched)."""
    sizes = [n * DTYPE_BYTES[u.param_dtype] for n, u in zip(model.unit_parameters, plan.units, strict=True)]
    stay = sum(size for size, unit in zip(sizes, plan.units, strict=True) if unit.reshard_after_forward is False)
    freed = sorted((s for s, u in zip(sizes, plan.units, strict=True) if u.reshard_after_forward is not False), reverse=True)
    ahead = max(max(unit.forward_prefetch, unit.backward_prefetch) for unit in plan.units)
    kept_parts = sum(  # resharding to a smaller group leaves each rank a part of that size
        size // unit.reshard_after_forward
        for size, unit in zip(sizes, plan.units, strict=True)
        if not isinstance(unit.reshard_after_forward, bool)
    )
    return stay + kept_parts + sum(freed[: 1 + ahead])


def _activations(plan: Plan, model: ModelFootprint, tokens: int) -> int:
    """What the forward keeps, and the one checkpointed unit that is being recomputed."""
    kept, recomputed = 0, 0
    for unit, saved, only_input in zip(plan.units, model.saved_per_token, model.input_per_token, strict=True):
        values = tokens * DTYPE_BYTES[unit.param_dtype]
        if unit.activation_checkpoint == "full":
            kept, recomputed = kept + only_input * values, max(recomputed, saved * values)
        else:
            kept += saved * values
    return kept + recomputed
