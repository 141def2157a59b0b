"""The model and the plan that a check runs: the first blocks of each kind, on degrees of at most 2."""

import copy
import dataclasses
from collections.abc import Iterator

from torch import nn

from meshwright.parallel.model.inputs import kind_of
from meshwright.parallel.plan.schema import AXES, Float8Plan, MeshPlan, Plan, UnitPlan


def cut_model(model: nn.Module, plan: Plan) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of the model with the first blocks of its lists with each kind, and their names."""
    cut = copy.deepcopy(model)
    lists: dict[str, list[str]] = {}
    for name in plan.blocks:
        parent = name.rpartition(".")[0]
        if parent and isinstance(cut.get_submodule(parent), nn.ModuleList | nn.Sequential):
            lists.setdefault(parent, []).append(name)
    for parent, names in lists.items():
        kinds = [kind_of(cut.get_submodule(name)) for name in names]
        last = max(kinds.index(kind) for kind in kinds)
        for name in names[last + 2 :]:
            delattr(cut.get_submodule(parent), name.rpartition(".")[2])
    present = {name for name, _ in cut.named_modules()}
    return cut, tuple(name for name in plan.blocks if name in present)


def small_plan(plan: Plan, cut: nn.Module, narrow: bool = False) -> Plan:
    """Return the plan for the cut model, with degrees and micro batches of at most 2, in float32, or `narrow`
    in the plan's dtype."""
    present = {name for name, _ in cut.named_modules()}
    tp, cp, replicate = (min(2, degree) for degree in (plan.mesh.tp, plan.mesh.cp, plan.mesh.dp_replicate))
    shard = min(2, plan.mesh.dp_shard) if tp * cp * replicate > 1 else 2
    units = tuple(_small_unit(unit, narrow) for unit in plan.units if present.issuperset(unit.modules))
    return dataclasses.replace(
        plan,
        mesh=MeshPlan(replicate, shard, tp, cp),
        accumulation=min(2, plan.accumulation),
        cpu_offload=False,
        storage_dtype="float32",
        async_tp=False,
        float8=Float8Plan("none", (), False),
        modules=tuple(name for name in plan.modules if name in present),
        units=units,
        blocks=tuple(name for name in plan.blocks if name in present),
        unsharded=tuple(name for name in plan.unsharded if name.rpartition(".")[0] in present),
    )


def _small_unit(unit: UnitPlan, narrow: bool) -> UnitPlan:
    dtypes = {} if narrow else {"param_dtype": "float32", "output_dtype": "same"}
    return dataclasses.replace(
        unit,
        **dtypes,  # type: ignore[arg-type]
        reshard_after_forward=bool(unit.reshard_after_forward),
        forward_prefetch=1,
        backward_prefetch=1,
        reduce_dtype="float32",
    )


def eager(plan: Plan) -> Plan:
    units = tuple(dataclasses.replace(unit, compiled=False) for unit in plan.units)
    return dataclasses.replace(plan, compile=dataclasses.replace(plan.compile, enabled=False), units=units)


def compilable_on_cpu(plan: Plan) -> Plan:
    """Return the plan without recomputation if it splits weights over tp: torch cannot compile both on a CPU
    if a block has a random operator, as torch's attention is (parallel/compile/apply.py)."""
    if plan.mesh.tp == 1:
        return plan
    units = tuple(
        dataclasses.replace(unit, activation_checkpoint="none", saved_ops=(), activation_budget=1.0)
        for unit in plan.units
    )
    return dataclasses.replace(plan, units=units)


def not_run(plan: Plan, small: Plan) -> Iterator[str]:
    """Yield the parts of the plan that the small one does not have, or that a CPU runs otherwise."""
    yield from (f"{axis} {n}" for axis in AXES if (n := getattr(plan.mesh, axis)) > getattr(small.mesh, axis))
    for key in ("accumulation", "cpu_offload", "storage_dtype", "async_tp", "float8"):
        if (value := getattr(plan, key)) != getattr(small, key):
            yield f"{key} {getattr(value, 'recipe', value)}"
    for key in ("reshard_after_forward", "forward_prefetch", "backward_prefetch", "reduce_dtype"):
        ran = {getattr(unit, key) for unit in small.units}
        asked = dict.fromkeys(getattr(unit, key) for unit in plan.units)
        yield from (f"{key} {value}" for value in asked if value not in ran)
    if any(unit.param_dtype != "float32" for unit in plan.units):
        yield "a comparison of values in param_dtype, in which it ran"
    if any(unit.activation_checkpoint == "offload" for unit in plan.units):
        yield "offload's copies beside computation"
    if plan.mesh.cp > 1:
        yield "dropout"
    if plan.compile.enabled:
        yield "code that is compiled for a GPU"
        if small != compilable_on_cpu(small):
            yield "recomputation of compiled blocks with tp"
