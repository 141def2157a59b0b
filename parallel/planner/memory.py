"""Memory of one rank under a plan, by formula. Bytes throughout."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from parallel.plan import Plan, UnitPlan, prefetched, regathered

FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModuleFootprint:
    """Sizes of one module on one tp rank: parameters, and values per token that it keeps for its backward: everything,
    only the `products` (selective checkpointing), or only its `input` (full)."""

    parameters: int
    everything: int = 0
    products: int = 0
    input: int = 0


@dataclass(frozen=True)
class ModelFootprint:
    """What a model says of its size, for planning: its modules by name, the width of the output head, of which each tp
    rank has its share, and the share of each module's parameters that is trained, where it is not all of them."""

    modules: Mapping[str, ModuleFootprint]
    logits_per_token: int
    trained: Mapping[str, float] = field(default_factory=dict)


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
    gathered at once; what the forward keeps; the logits; the reduction's buffer. Allocator overhead is not in it,
    nor is what `cpu_offload` keeps in host memory.
    """
    counts = [_parameters(unit, model) for unit in plan.units]
    sharded = sum(-(-count // plan.mesh.dp_shard) for count in counts) * FLOAT32_BYTES
    trained = sum(-(-_trained(unit, model) // plan.mesh.dp_shard) for unit in plan.units) * FLOAT32_BYTES
    if plan.cpu_offload:
        sharded = trained = 0
    tokens = plan.micro_batch_size * seq_len
    dtype_bytes = max(DTYPE_BYTES[unit.param_dtype] for unit in plan.units)
    reduce_bytes = max(DTYPE_BYTES[unit.reduce_dtype] for unit in plan.units)
    return MemoryEstimate(
        params=sharded,
        grads=trained,
        optimizer=2 * trained,
        unsharded=_unsharded(plan, counts),
        activations=_activations(plan, model, tokens),
        # the logits, their float32 copy in the loss, and their gradient
        logits=tokens * model.logits_per_token * (2 * dtype_bytes + FLOAT32_BYTES),
        # the largest unit's whole gradient, and its copy on the way into the reduce-scatter
        buffers=max(_trained(unit, model) for unit in plan.units) * (dtype_bytes + reduce_bytes),
    )


def _parameters(unit: UnitPlan, model: ModelFootprint) -> int:
    return sum(model.modules[name].parameters for name in unit.modules)


def _trained(unit: UnitPlan, model: ModelFootprint) -> int:
    return sum(round(model.modules[name].parameters * model.trained.get(name, 1.0)) for name in unit.modules)


def _unsharded(plan: Plan, counts: list[int]) -> int:
    """Gathered parameters: units that stay gathered after their forward, and of the others as many of the largest
    as are gathered at once (the one at work and those prefetched)."""
    sizes = [(n * DTYPE_BYTES[unit.param_dtype], unit) for n, unit in zip(counts, plan.units, strict=True)]
    stay = sum(size for size, unit in sizes if not regathered(unit))
    freed = sorted((size for size, unit in sizes if regathered(unit)), reverse=True)
    ahead = max(len(prefetched(plan, unit, phase)) for unit in plan.units for phase in ("forward", "backward"))
    # resharding to a smaller group leaves each rank a part of that size
    kept_parts = sum(size // reshard for size, unit in sizes if type(reshard := unit.reshard_after_forward) is int)
    return stay + kept_parts + sum(freed[: 1 + ahead])


def _activations(plan: Plan, model: ModelFootprint, tokens: int) -> int:
    """What the forward keeps, and the one checkpointed unit that is being recomputed."""
    kept, recomputed = 0, 0
    for unit in plan.units:
        values = tokens * DTYPE_BYTES[unit.param_dtype]
        for name in unit.modules:
            module, everything = model.modules[name], model.modules[name].everything
            keeps = {"none": everything, "full": module.input, "selective": module.products,
                     "budget": module.input + round(unit.activation_budget * (everything - module.input))}  # fmt: skip
            kept += keeps[unit.activation_checkpoint] * values
            if unit.activation_checkpoint != "none":
                recomputed = max(recomputed, (everything - keeps[unit.activation_checkpoint] + module.input) * values)
    return kept + recomputed
