"""Proves that a sharded model computes what the unsharded one does: outputs and every gradient, eager and
compiled, on gloo processes that it starts itself.

The model is cut to the first blocks that contain each kind, and its plan to degrees of at most 2, in float32.
All weights are moved away from their initial values, because a bias of zeros would hide that nobody adds it.
"""

import copy
import dataclasses
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.errors import PlanError
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.model.describe import Example, call_arguments, observe
from meshwright.parallel.model.inputs import kind_of
from meshwright.parallel.model.materialize import load_weights, materialize
from meshwright.parallel.plan.rules import written_mistakes
from meshwright.parallel.plan.schema import ContextPlan, MeshPlan, Plan, UnitPlan
from meshwright.parallel.sharded_model import ShardedModel, summed

Loss = Callable[[Any, Example], Tensor]  # outputs, example -> a scalar
TOLERANCE = 1e-4  # of a relative difference in float32, which rounding keeps below 1e-5
MOST_PARAMETERS = 250_000_000  # of the cut model, of which each process has several copies in float32
MOST_BLOCKS = 8  # of the cut model
MOVED = 0.05  # standard deviation by which weights are moved, as a share of their own, at least


@dataclass(frozen=True)
class Mismatch:
    """A tensor that the sharded model computes differently.

    Args:
        run: eager or compiled
        name: an output, or the parameter whose gradient it is
        error: norm of the difference as a share of the norm
        scale: the factor by which the sharded tensor is too large, if it is otherwise right; else NaN
    """

    run: str
    name: str
    error: float
    scale: float


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Args:
        degrees: of the mesh that was checked
        blocks: those of the cut model
        compared: outputs and gradients
        largest: the largest relative difference
        differences: those above the tolerance, outputs first
        graphs: compiled graphs
        loss: what the caller's loss is over rows: "sum", "mean", "neither"; "" if none was given
    """

    degrees: MeshPlan
    blocks: tuple[str, ...]
    compared: int
    largest: float
    differences: tuple[Mismatch, ...]
    graphs: int
    loss: str = ""

    @property
    def same(self) -> bool:
        """Whether the sharded model computes the same."""
        return not self.differences

    def __str__(self) -> str:
        degrees = " x ".join(f"{axis} {getattr(self.degrees, axis)}" for axis in self.degrees.axes)
        head = (
            f"{self.compared} outputs and gradients on {degrees}, eager and compiled ({self.graphs} graphs)"
        )
        if self.same:
            return f"{head}: the same, largest difference {self.largest:.1e}{LOSSES[self.loss]}"
        lines = [f"{head}: {len(self.differences)} differ:{LOSSES[self.loss]}"]
        lines += [
            f"  {each.run} {each.name}: off by {each.error:.1e}{_smell(each, self)}"
            for each in self.differences
        ]
        return "\n".join(lines)


LOSSES = {
    "": "",
    "sum": '\nthe loss is a sum over rows: gradients="sum", divided by what micro_batches counts',
    "mean": '\nthe loss is a mean over rows: gradients="mean_of_ranks", if all ranks have equally many',
    "neither": "\nthe loss is neither a sum nor a mean over rows: use a sum, and gradients='sum'",
}


def check(model: nn.Module, plan: Plan, example: Example, loss: Loss | None = None) -> CheckReport:
    """Compare the model, sharded, recomputed and compiled as planned, with the unsharded one.

    Args:
        model: not sharded, on the meta device (then its initialisers give values) or with values
        plan: for any number of processes: degrees above 2 become 2
        example: arguments of the model's forward, with values; the first dimension of its tensors is the
            batch
        loss: a function of the model's outputs and the example, to be told whether it is a sum or a mean

    The script that calls it needs `if __name__ == "__main__"`, because the processes import it. Raises
    PlanError for a model that is too large, or that cannot be sharded or compiled so.
    """
    for mistake in written_mistakes(plan.mesh, observe(model, example)[1]):
        raise PlanError(f"check: {mistake.message}")
    cut, blocks = cut_model(model, plan)
    small = small_plan(plan, cut)
    count = sum(p.numel() for p in cut.parameters())
    if count > MOST_PARAMETERS:
        raise PlanError(
            f"check: {count:,} parameters with one block of each kind are too many for a CPU: give a smaller "
            "model of the same classes and its plan"
        )
    found = run_processes(small, cut, example, loss)
    return CheckReport(small.mesh, blocks, **{**found, "differences": tuple(found["differences"])})


def cut_model(model: nn.Module, plan: Plan) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of the model with the first blocks of its lists with each kind, and their names."""
    cut = copy.deepcopy(model)
    repeated = [
        unit.modules[0]
        for unit in plan.units
        if (unit.compiled or unit.activation_checkpoint != "none")
        and not any(unit.modules[0].startswith(f"{outer}.") for outer in plan.modules)
    ]
    lists: dict[str, list[str]] = {}
    for name in repeated:
        parent = name.rpartition(".")[0]
        if parent and isinstance(cut.get_submodule(parent), nn.ModuleList | nn.Sequential):
            lists.setdefault(parent, []).append(name)
    for parent, names in lists.items():
        kinds = [kind_of(cut.get_submodule(name)) for name in names]
        last = max(kinds.index(kind) for kind in kinds)
        kept = {name.rpartition(".")[2] for name in names[: min(last + 2, MOST_BLOCKS)]}
        for name in names:
            if (key := name.rpartition(".")[2]) not in kept:
                delattr(cut.get_submodule(parent), key)
    present = {name for name, _ in cut.named_modules()}
    return cut, tuple(name for name in repeated if name in present)


def small_plan(plan: Plan, cut: nn.Module) -> Plan:
    """Return the plan for the cut model, with degrees of at most 2, in float32."""
    present = {name for name, _ in cut.named_modules()}
    tp, replicate = min(2, plan.mesh.tp), min(2, plan.mesh.dp_replicate)
    shard = min(2, plan.mesh.dp_shard) if tp * replicate > 1 else 2
    units = tuple(_small_unit(unit) for unit in plan.units if present.issuperset(unit.modules))
    return dataclasses.replace(
        plan,
        mesh=MeshPlan(replicate, shard, tp),
        context=ContextPlan(),
        accumulation=1,
        cpu_offload=False,
        storage_dtype="float32",
        modules=tuple(name for name in plan.modules if name in present),
        units=units,
        unsharded=tuple(name for name in plan.unsharded if name.rpartition(".")[0] in present),
    )


def _small_unit(unit: UnitPlan) -> UnitPlan:
    return dataclasses.replace(
        unit,
        reshard_after_forward=bool(unit.reshard_after_forward),
        forward_prefetch=1,
        backward_prefetch=1,
        param_dtype="float32",
        reduce_dtype="float32",
        output_dtype="same",
    )


def run_processes(plan: Plan, model: nn.Module, example: Example, loss: Loss | None) -> dict[str, Any]:
    """Compare on as many processes as the plan has, and return what they found together."""
    with tempfile.TemporaryDirectory(prefix="meshwright-check-") as name:
        folder = Path(name)
        try:
            torch.save((plan, model, example, loss), folder / "job.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PlanError(
                f"check: the model cannot be sent to the processes ({error}): define its classes and "
                "functions at the top of a module"
            ) from error
        processes = plan.mesh.world_size
        spawn(_run_rank, args=(processes, str(folder)), nprocs=processes, join=True)
        results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]
    if errors := [result["error"] for result in results if "error" in result]:
        raise PlanError(f"check: {errors[0]}")
    found: dict[str, Any] = results[0]
    return found


def _run_rank(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    plan, model, example, loss = torch.load(f"{folder}/job.pt", weights_only=False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    try:
        result = compare(plan, model, example, loss)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    torch.save(result, f"{folder}/{rank}.pt")
    os._exit(0)  # other ranks may still wait for one that failed


def compare(plan: Plan, model: nn.Module, example: Example, loss: Loss | None = None) -> dict[str, Any]:
    """Compare the unsharded model on each rank's part of the batch, with its gradients summed over the
    data-parallel ranks, and the sharded one, eager and compiled. Every rank calls it, and all get what they
    found together: the fields of a CheckReport after `blocks`."""
    import torch._inductor.config as inductor

    from meshwright.parallel.compile.stats import count_compiled_graphs

    inductor.fallback_random = True  # the same random numbers as eager
    graphs_before = count_compiled_graphs()
    eager = dataclasses.replace(
        plan,
        compile=dataclasses.replace(plan.compile, enabled=False),
        units=tuple(dataclasses.replace(unit, compiled=False) for unit in plan.units),
    )
    runs = {"eager": eager} | ({"compiled": _compilable_on_cpu(plan)} if plan.compile.enabled else {})
    mesh = build_mesh(plan.mesh, "cpu")
    values = moved_values(model, eager, mesh)
    differences, compared, largest = [], 0, 0.0
    unsharded = with_values(model, values)
    expected: dict[str, Tensor] = {}
    for run, of_run in runs.items():
        sharded = _shard(model, of_run, mesh)
        load_weights(sharded, values)
        part = own_part(example, sharded.data_rank, plan.mesh.data_parallel)
        if not expected:
            expected = _backward(unsharded, part, sharded.data_rank)
            for name, gradient in gradients(unsharded).items():
                expected[name] = summed(gradient, sharded.data_group)
        for own, _ in sharded.micro_batches([part], count=lambda _: 1):
            outputs = _backward(sharded.model, own, sharded.data_rank)
        results = outputs | gradients(sharded.model)
        for name in expected | results:
            nothing = torch.zeros_like((expected | results)[name])
            error, scale = relative_error(results.get(name, nothing), expected.get(name, nothing))
            compared, largest = compared + 1, max(largest, error)
            if not error <= TOLERANCE:
                differences.append(Mismatch(run, name, error, scale))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (differences, largest))
    return {
        "compared": compared,
        "largest": max(of_rank for _, of_rank in by_rank),
        "differences": _worst(found for found, _ in by_rank),
        "graphs": count_compiled_graphs() - graphs_before,
        "loss": kind_of_loss(unsharded, example, loss) if loss else "",
    }


def _worst(by_rank: Iterable[Sequence[Mismatch]]) -> list[Mismatch]:
    """Return the differences of all ranks, each tensor once: with the largest error."""
    worst: dict[tuple[str, str], Mismatch] = {}
    for each in (each for found in by_rank for each in found):
        key = (each.run, each.name)
        worst[key] = max(worst.get(key, each), each, key=lambda mismatch: mismatch.error)
    return list(worst.values())


def _compilable_on_cpu(plan: Plan) -> Plan:
    """Return the plan without recomputation if it splits weights over tp: torch cannot compile both on a CPU
    if a block has a random operator, as torch's attention is (parallel/compile/apply.py)."""
    if plan.mesh.tp == 1:
        return plan
    units = tuple(
        dataclasses.replace(unit, activation_checkpoint="none", saved_ops=(), activation_budget=1.0)
        for unit in plan.units
    )
    return dataclasses.replace(plan, units=units)


def _shard(model: nn.Module, plan: Plan, mesh: Any) -> ShardedModel:
    return apply_plan(on_meta(model), plan, mesh, gradients="sum")


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device in float32; shared parameters stay shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def moved_values(model: nn.Module, plan: Plan, mesh: Any) -> dict[str, Tensor]:
    """Return the model's parameters, each moved by random numbers, and its buffers, as whole tensors."""
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        sharded = _shard(model, plan, mesh)
        materialize(sharded, seed=0)
        model = sharded.model
    values = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        values[name] = tensor.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole = whole.detach().float()
        spread = max(float(whole.std(correction=0)), MOVED)
        values[name] = whole + MOVED * spread * torch.randn(whole.shape, generator=generator)
    return values


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the unsharded model on the CPU with these parameters and buffers, shared as before."""
    copied = copy.deepcopy(model).to_empty(device="cpu").float()
    named = dict(model.named_parameters(remove_duplicate=False))
    first_of = {id(parameter): name for name, parameter in reversed(named.items())}
    own = {
        name: nn.Parameter(values[name].clone(), requires_grad=named[name].requires_grad)
        for name in first_of.values()
    }
    for name, parameter in named.items():
        parent, _, key = name.rpartition(".")
        setattr(copied.get_submodule(parent), key, own[first_of[id(parameter)]])
    for name, _ in model.named_buffers(remove_duplicate=False):
        parent, _, key = name.rpartition(".")
        setattr(copied.get_submodule(parent), key, values[name].clone())
    return copied


def kind_of_loss(model: nn.Module, example: Example, loss: Loss) -> str:
    """Return whether a loss is the "sum" or "mean" over an example's rows, by unequal parts, or "neither"."""
    rows = _rows(example)
    parts = [_some_rows(example, 0, rows), _some_rows(example, 0, 1), _some_rows(example, 1, rows)]
    was_training = model.training
    model.eval()  # no dropout
    with torch.no_grad():
        whole, first, rest = (float(loss(_call(model, part), part)) for part in parts)
    model.train(was_training)
    kinds = {"sum": first + rest, "mean": (first + (rows - 1) * rest) / rows}
    return next(
        (kind for kind, value in kinds.items() if math.isclose(value, whole, rel_tol=1e-4)), "neither"
    )


def _call(model: nn.Module, part: Example) -> Any:
    args, kwargs = call_arguments(part)
    return model(*args, **kwargs)


def _backward(model: nn.Module, part: Example, seed: int) -> dict[str, Tensor]:
    """Run forward and backward of a sum of the outputs with fixed random factors. Returns the outputs."""
    torch.manual_seed(seed)
    outputs = [leaf for leaf in tree_leaves(_call(model, part)) if isinstance(leaf, Tensor)]
    outputs = [output for output in outputs if output.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    factors = [torch.randn(output.shape, generator=generator) for output in outputs]
    loss = sum((o * f).sum() for o, f in zip(outputs, factors, strict=True) if o.requires_grad)
    if not isinstance(loss, Tensor):
        raise PlanError("no output of the model depends on its parameters: there is nothing to train")
    loss.backward()
    return {f"output {i}": output.detach() for i, output in enumerate(outputs)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients by parameter. Every rank must call it."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def own_part(example: Example, rank: int, parts: int) -> Example:
    """Return a rank's rows of the example's tensors; an example of fewer rows than ranks is used by all."""
    rows = _rows(example)
    if rows < parts:
        return example
    return _some_rows(example, rows * rank // parts, rows * (rank + 1) // parts)


def _rows(example: Example) -> int:
    leaves = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    return leaves[0].shape[0] if leaves else 0


def _some_rows(example: Example, start: int, stop: int) -> Example:
    rows = _rows(example)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() and tensor.shape[0] == rows else tensor

    part: Example = tree_map_only(Tensor, cut, example)
    return part


def relative_error(tensor: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the norm of the difference as a share of the norm, and the factor between them, NaN if they
    differ by more than a factor."""
    if tensor.shape != expected.shape:
        return math.inf, math.nan
    norm = float(expected.norm())
    if not norm:
        return float(tensor.norm()), math.nan
    error = float((tensor - expected).norm()) / norm
    scale = float((tensor * expected).sum()) / norm**2
    exact = float((tensor - scale * expected).norm()) / norm <= TOLERANCE
    return (error if math.isfinite(error) else math.inf), (scale if exact else math.nan)


def _smell(difference: Mismatch, report: CheckReport) -> str:
    """Return what a difference hints at; "" for nothing known."""
    tp, scale = report.degrees.tp, difference.scale
    outputs_differ = any(each.name.startswith("output") for each in report.differences)
    if math.isfinite(scale):
        return f": {scale:.3g} times too large"
    if difference.run == "compiled" and not any(each.run == "eager" for each in report.differences):
        return ": only if compiled"
    if tp > 1 and not outputs_differ and not difference.name.startswith("output"):
        return ": a whole weight that every tp rank uses on its part of the heads needs the style per_head"
    if outputs_differ and tp > 1 and difference.name.startswith("output"):
        return ": a split layer of another formula, or positions and masks made from a part of the tokens"
    return ""
