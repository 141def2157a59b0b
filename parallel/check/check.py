"""Proves that a sharded model computes what the unsharded one does: outputs and every gradient, eager and
compiled, on gloo processes that it starts itself.

The model is cut to the first blocks that contain each kind, and its plan to degrees of at most 2 and two
micro batches. Values are compared in float32; in the plan's dtype the model must run. All weights are moved
away from their initial values, because a bias of zeros would hide that nobody adds it, and equal ids become
random, because they hide what attention computes. The report names what of the plan was not run.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.check.kinds import TOLERANCE, floor_of, relative_error
from meshwright.parallel.check.processes import run_ranks
from meshwright.parallel.check.report import CheckReport, Mismatch
from meshwright.parallel.check.small_plan import compilable_on_cpu, cut_model, eager, not_run, small_plan
from meshwright.parallel.check.updates import Build, compare_steps
from meshwright.parallel.check.values import moved, whole_outputs, with_random_ids
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import Gradients, full_tensor
from meshwright.parallel.mesh import build_mesh, gather_from_all
from meshwright.parallel.model.forward import Example, observe
from meshwright.parallel.model.inputs import tokens_of
from meshwright.parallel.model.materialize import load_weights, materialize
from meshwright.parallel.model.parts import (
    Loss,
    call,
    check_signature,
    kind_of_loss,
    outputs_of_parts,
    own_part,
    repeated_rows,
    rows_of,
    some_rows,
)
from meshwright.parallel.plan.rules import written_mistakes
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel, summed

MOST_PARAMETERS = 250_000_000  # of the cut model, of which each process has several copies in float32


def check(
    model: nn.Module,
    plan: Plan,
    example: Example,
    loss: Loss | None = None,
    *,
    gradients: Gradients = "sum",
    optimizer: Build | None = None,
) -> CheckReport:
    """Compare the model, sharded, recomputed and compiled as planned, with the unsharded one.

    Args:
        model: not sharded, on the meta device (then its initialisers give values) or with values
        plan: for any number of processes: degrees and micro batches above 2 become 2
        example: arguments of the model's forward, with values; the first dimension of its tensors is the
            batch
        loss: a function of the model's outputs and the example, to be told whether it is a sum or a mean
        gradients: as the training loop gives it to apply_plan
        optimizer: function of a ShardedModel that returns its optimizer, as
            `functools.partial(mw.optimizer, name="muon", lr=0.01)`, to compare two of its steps; for one
            process it gets the unsharded model, with `mesh=None`

    The script that calls it needs `if __name__ == "__main__"`, because the processes import it. Raises
    PlanError for a model that is too large, or that cannot be sharded or compiled so.
    """
    if loss is not None:
        check_signature(loss, example)
    for mistake in written_mistakes(plan.mesh, observe(model, example).written):
        raise PlanError(f"check: {mistake.message}")
    cut, blocks = cut_model(model, plan)
    small = small_plan(plan, cut)
    if small.mesh.cp > 1 and not tokens_of(example):
        raise PlanError("check: cp splits tokens: give an example with ids [samples, tokens], or use cp=1")
    count = sum(p.numel() for p in cut.parameters())
    if count > MOST_PARAMETERS:
        raise PlanError(
            f"check: {count:,} parameters with one block of each kind are too many for a CPU: give a smaller "
            "model of the same classes and its plan"
        )
    narrow = small_plan(plan, cut, narrow=True)
    job = small, cut, example, gradients, None if narrow == small else narrow, optimizer
    found: dict[str, Any] = run_ranks(compare, small.mesh.world_size, job)[0]
    parts = found.pop("parts")
    found |= {
        "loss": kind_of_loss(parts, loss) if loss else "",
        "differences": tuple(_named(found["differences"], small.mesh.tp)),
        "not_run": (*not_run(plan, small), *found["not_run"]),
    }
    return CheckReport(small.mesh, blocks, **found)


def compare(
    plan: Plan,
    model: nn.Module,
    example: Example,
    gradients: Gradients = "sum",
    narrow: Plan | None = None,
    optimizer: Build | None = None,
) -> dict[str, Any]:
    """Compare the unsharded model on each rank's part of the batch, with its gradients reduced over the
    data-parallel ranks, and the sharded one, eager and compiled. Every rank calls it, and all get what they
    found together: the fields of a CheckReport after `blocks`. `narrow`: another plan, that must run;
    `optimizer`: builds the one whose steps are compared."""
    import torch._inductor.config as inductor

    from meshwright.parallel.compile.stats import count_compiled_graphs

    inductor.fallback_random = True  # the same random numbers as eager
    inductor.compile_threads = 1  # no pool of processes, whose semaphores os._exit leaves behind
    graphs_before = count_compiled_graphs()
    runs = {"eager": eager(plan)} | ({"compiled": compilable_on_cpu(plan)} if plan.compile.enabled else {})
    mesh = build_mesh(plan.mesh, "cpu")
    values = moved_values(model, runs["eager"], mesh)
    unsharded = with_values(model, values)
    example = with_random_ids(with_values(model, values), example)
    if narrow is not None:
        try:
            sharded_results(_shard(model, eager(narrow), mesh, values, gradients), example)
        except RuntimeError as refusal:
            raise PlanError(
                f"the model runs in float32, but not in the plan's param_dtype: {refusal}: cast what its "
                "forward adds or multiplies in another dtype, such as a buffer or an unsharded parameter"
            ) from refusal
    differences, compared, largest, hints = [], 0, 0.0, []
    expected: dict[str, Tensor] = {}
    for run, of_run in runs.items():
        sharded = _shard(model, of_run, mesh, values, gradients)
        expected = expected or expected_results(unsharded, sharded, example)
        results = sharded_results(sharded, example)
        floor = floor_of(t for name, t in expected.items() if not _is_output(name))
        for name in expected | results:
            nothing = torch.zeros_like((expected | results)[name])
            error, scale = relative_error(
                results.get(name, nothing), expected.get(name, nothing), 0.0 if _is_output(name) else floor
            )
            compared, largest = compared + 1, max(largest, error)
            if not error <= TOLERANCE:
                differences.append(Mismatch(run, name, error, scale))
        if optimizer is not None and run == "eager":
            of_gradients = {name: t for name, t in expected.items() if not _is_output(name)}
            twin = with_values(model, values)
            found, count, error, rule = compare_steps(sharded, twin, of_gradients, optimizer)
            differences, compared, largest = differences + found, compared + count, max(largest, error)
            hints.append(rule)
    by_rank = gather_from_all((differences, largest))
    buffers = dict(unsharded.named_buffers())
    written = [n for n, b in buffers.items() if n in values and not torch.equal(b, values[n])]
    return {
        "compared": compared,
        "largest": max(of_rank for _, of_rank in by_rank),
        "differences": _worst(found for found, _ in by_rank),
        "graphs": count_compiled_graphs() - graphs_before,
        "hints": tuple(hints),
        "parts": outputs_of_parts(unsharded, example),
        "not_run": [f"buffer {name}, which every rank writes for itself" for name in written],
    }


def expected_results(unsharded: nn.Module, sharded: ShardedModel, example: Example) -> dict[str, Tensor]:
    """Return what a rank of the sharded model ought to compute: outputs, of its own tokens, and gradients of
    the global batch, to which every rank of cp adds the same here."""
    mesh, own = sharded.plan.mesh, _own_tokens(sharded, example)
    unsharded.train(sharded.model.training)
    found = results_of(unsharded, micro_batches(sharded, example), sharded.data_rank)
    copies = mesh.cp * (1 if sharded.gradients == "sum" else mesh.cp * mesh.data_parallel)
    for name, tensor in found.items():
        if not _is_output(name):
            found[name] = summed(tensor, sharded.data_group) / copies
        elif own is not None and tensor.dim() > 1:
            found[name] = tensor[:, own]
    return found


def sharded_results(sharded: ShardedModel, example: Example) -> dict[str, Tensor]:
    """Return outputs and gradients of the sharded model, of the same micro batches."""
    count = (lambda _: 1) if sharded.gradients == "sum" else None
    parts = (part for part, _ in sharded.micro_batches(micro_batches(sharded, example), count))
    return results_of(sharded.model, parts, sharded.data_rank, _own_tokens(sharded, example))


def results_of(
    model: nn.Module, parts: Iterable[Example], seed: int, own: Tensor | None = None
) -> dict[str, Tensor]:
    """Run forward and backward of the micro batches. Return outputs and full gradients; every rank must call
    it. `own`: the tokens that the model gets; None: all."""
    outputs = {}
    for number, part in enumerate(parts):
        of_batch = f" of micro batch {number}" if number else ""
        for i, output in enumerate(_backward(model, part, seed, own)):
            outputs[f"output {i}{of_batch}"] = output
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs | {name: full_tensor(g) for name, g in found.items()}


def micro_batches(sharded: ShardedModel, example: Example) -> list[Example]:
    """Return a rank's rows of the example, in two parts of one and two thirds if the plan accumulates."""
    part = own_part(example, sharded.data_rank, sharded.plan.mesh.data_parallel)
    if sharded.plan.accumulation == 1:
        return [part]
    part = repeated_rows(part, 3)
    third = rows_of(part) // 3
    return [some_rows(part, 0, third), some_rows(part, third, rows_of(part))]


def _own_tokens(sharded: ShardedModel, example: Example) -> Tensor | None:
    return sharded.token_positions(tokens_of(example)) if sharded.plan.mesh.cp > 1 else None


def _is_output(name: str) -> bool:
    return name.startswith("output ")


def _worst(by_rank: Iterable[Sequence[Mismatch]]) -> list[Mismatch]:
    """Return the differences of all ranks, each tensor once: with the largest error."""
    worst: dict[tuple[str, str], Mismatch] = {}
    for each in (each for found in by_rank for each in found):
        key = (each.run, each.name)
        worst[key] = max(worst.get(key, each), each, key=lambda mismatch: mismatch.error)
    return list(worst.values())


def _shard(
    model: nn.Module, plan: Plan, mesh: Any, values: Mapping[str, Tensor], gradients: Gradients
) -> ShardedModel:
    """Return the sharded model; with cp in evaluation mode, because its ranks draw other random numbers."""
    sharded = apply_plan(on_meta(model), plan, mesh, gradients=gradients)
    load_weights(sharded, values)
    sharded.model.train(model.training and plan.mesh.cp == 1)
    return sharded


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device in float32; shared parameters stay shared."""

    def empty(_: str, tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    return _copy_with(model, empty)


def _copy_with(model: nn.Module, make: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of a model with what `make` returns for each parameter and buffer, and its name; shared
    ones stay shared."""
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        made, is_parameter = make(name, tensor), isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(model, memo)


def moved_values(model: nn.Module, plan: Plan, mesh: Any) -> dict[str, Tensor]:
    """Return the model's parameters, each moved by random numbers, and its buffers, as whole tensors."""
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        sharded = apply_plan(on_meta(model), plan, mesh, gradients="sum")
        materialize(sharded, seed=0)
        model = sharded.model
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer.detach().clone() for name, buffer in buffers} | moved(model)


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the unsharded model on the CPU with these parameters and buffers, shared as before."""
    return _copy_with(model, lambda name, _: values[name].clone())


def _backward(model: nn.Module, part: Example, seed: int, own: Tensor | None) -> list[Tensor]:
    """Run forward and backward of a sum of the outputs with fixed random factors. Returns the outputs."""
    torch.manual_seed(seed)
    outputs = whole_outputs(call(model, part, own))
    generator, factors = torch.Generator().manual_seed(seed), []
    for output in outputs:
        if own is None or output.dim() < 2:
            factors.append(torch.randn(output.shape, generator=generator))
        else:
            shape = (len(output), output.shape[1] * tokens_of(part) // len(own), *output.shape[2:])
            factors.append(torch.randn(shape, generator=generator)[:, own])
    loss = sum((o * f).sum() for o, f in zip(outputs, factors, strict=True) if o.requires_grad)
    if not isinstance(loss, Tensor):
        raise PlanError("no output of the model depends on its parameters: there is nothing to train")
    loss.backward()
    return [output.detach() for output in outputs]


def _named(differences: Sequence[Mismatch], tp: int) -> Iterator[Mismatch]:
    """Yield the differences with what they look like."""
    outputs_differ = any(_is_output(each.name) for each in differences)
    only_compiled = not any(each.run == "eager" for each in differences)
    for each in differences:
        kind = each.kind
        if kind:
            pass  # of an update
        elif math.isfinite(each.scale):
            kind = f"{each.scale:.3g} times what it should be"
        elif only_compiled:
            kind = "only if compiled"
        elif tp > 1 and not outputs_differ:
            kind = "a whole weight that every tp rank uses on its part of the heads needs the style per_head"
        elif tp > 1 and _is_output(each.name):
            kind = "a split layer of another formula, or positions and masks made from a part of the tokens"
        yield dataclasses.replace(each, kind=kind)
