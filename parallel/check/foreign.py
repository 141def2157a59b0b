"""Proves that a model which somebody else's code has sharded trains as it does on one process: what the ranks
record, with the model as their function has sharded it, and their twin, one process with the unsharded model.

Both get the same values, rows and random numbers. Without a loop of theirs a step is two micro batches of a
random linear form of the outputs, in which every element of every output counts, and plain SGD, or an
optimizer of theirs. Each rank of the data-parallel axes gets other rows, and other numbers of them; the twin
runs the same micro batches one by one, and keeps the gradient of each, which is what tells a wrong reduction
from another fault.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.kinds import (
    NARROW,
    TOLERANCE,
    common_factor,
    floor_of,
    joined_gradients,
    relative_error,
)
from meshwright.parallel.check.processes import run_ranks
from meshwright.parallel.check.recorded import START, RankRecord, Seen, data_rank
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import MICRO_BATCHES, Subject, where
from meshwright.parallel.check.updates import update_tolerances
from meshwright.parallel.check.values import whole_outputs
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import full_tensor, names_by_parameter
from meshwright.parallel.mesh import gather_from_all
from meshwright.parallel.model.forward import Example
from meshwright.parallel.model.parts import call, some_rows

STEPS = 2
LOADED = ", loaded"  # ends the names of moments after a load
# parts of names of parameters that wrappers add
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def check_sharding(subject: Subject, tolerance: float = TOLERANCE) -> CheckReport:
    """Run the model on the mesh and on one process, and compare values, outputs, gradients, updates and an
    evaluation; with a loop of theirs what its optimizers get, updates, and a step after a load.

    Args:
        tolerance: of a relative difference, in float32

    Raises PlanError if no step changes a parameter, and if a process fails: its model or functions cannot be
    sent to it, or raise.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-saved-") as folder:
        subject = dataclasses.replace(subject, folder=Path(folder))
        ranks = run_ranks(record_rank, subject.mesh.world_size, (subject,), subject.device)
        twin = run_ranks(record_twin, 1, (subject, ranks), subject.device)[0]
    return compare_recorded(subject.mesh, twin, ranks, tolerance)


def record_rank(subject: Subject) -> RankRecord:
    """Record what a rank of the mesh computes. Every rank calls it."""
    model, example = subject.start()
    random = is_random(copy.deepcopy(model), example)
    mesh, given, names = subject.device_mesh(), model, {name for name, _ in named(model)}
    model = subject.sharded(model, mesh)
    found = RankRecord(whole=not any(isinstance(p, DTensor) for p in model.parameters()))
    if all(module is not given for module in model.modules()):
        found.hint = f"{where(subject.shard)} returned another model than the one that it got"
        if names.isdisjoint(name for name, _ in named(model)):
            raise PlanError(f"check: {found.hint}, with other names: shard the one that it gets")
    elif model is given and found.whole:
        found.hint = f"does {where(subject.shard)} return the model that it shards?"
    look(found, START, model)
    found.tied = ties(model)
    found.frozen = frozen(model)
    if subject.loop is not None:
        if random:
            raise PlanError(
                "check: the model draws random numbers in training, as for dropout, and of a loop of yours "
                "each rank draws others: give it without dropout"
            )
        _record_loop(subject, found, model, example, mesh)
        return found
    if random and subject.mesh.tp * subject.mesh.cp > 1:
        model.eval()
        found.notes = ("dropout, of which ranks of tp and cp draw other random numbers",)
    own = own_rank(subject)
    optimizer = subject.new_optimizer(model, mesh)
    for step in range(STEPS):
        for number, part in enumerate(subject.batches(example, step)[own]):
            moment = _moment(step, number)
            outputs = backward(model, part, _seed(own, number))
            found.tensors |= {Seen(moment, "output", str(i)): output for i, output in enumerate(outputs)}
            found.tensors |= {Seen(moment, "gradient", n): g for n, g in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        look(found, f"after step {step + 1}", model)
    evaluate(subject, found, model, example, (own,))
    return found


def record_twin(subject: Subject, ranks: Sequence[RankRecord]) -> RankRecord:
    """Record what the unsharded model computes, on one process. `ranks`: what these recorded: if all their
    gradients have a common factor, the twin's step is by as much."""
    model, example = subject.start()
    found = RankRecord(tied=ties(model), frozen=frozen(model))
    for name, parameter in named(model):
        parameter.requires_grad_(parameter.requires_grad and name not in ranks[0].frozen)
    look(found, START, model)
    if subject.loop is not None:
        _record_loop(subject, found, model, example, None, ranks)
        return found
    model.train(not any(rank.notes for rank in ranks))
    optimizer = subject.new_optimizer(model, None)
    if subject.optimizer is not None:
        tolerances, found.rule = update_tolerances(model, optimizer)
        found.tolerances = {clean(name): tolerance for name, tolerance in tolerances.items()}
    for step in range(STEPS):
        batches, parts = subject.batches(example, step), dict[str, Tensor]()
        trained = {name: p for name, p in named(model) if p.requires_grad and name not in found.tied}
        for name, parameter in trained.items():
            parts[name] = parameter.new_zeros(len(batches), MICRO_BATCHES, *parameter.shape)
        used = set[str]()
        for number in range(MICRO_BATCHES):
            moment = _moment(step, number)
            for rank, of_rank in enumerate(batches):
                outputs = backward(model, of_rank[number], _seed(rank, number))
                for i, output in enumerate(outputs):
                    found.of_rank[rank, Seen(moment, "output", str(i))] = output
                for name, parameter in trained.items():
                    if parameter.grad is not None:
                        parts[name][rank, number] = parameter.grad
                        used.add(name)
                optimizer.zero_grad()
            for name in used:
                seen = Seen(moment, "gradient", name)
                found.tensors[seen] = parts[name].sum((0, 1))
                if step == 0:
                    found.parts[seen] = parts[name][:, : number + 1].clone()
        if step == 0:
            found.factor = common_factor(found, ranks, _moment(0, 0))
        for name in used:
            trained[name].grad = found.factor * parts[name].sum((0, 1))
        if subject.optimizer is not None:  # with exactly what the ranks step with
            for name, gradient in joined_gradients(found, ranks, moment).items():
                if name in trained and gradient.shape == trained[name].shape:
                    trained[name].grad = gradient.to(subject.device)
        optimizer.step()
        optimizer.zero_grad()
        look(found, f"after step {step + 1}", model)
    evaluate(subject, found, model, example, range(len(batches)))
    return found


def _record_loop(
    subject: Subject,
    found: RankRecord,
    model: nn.Module,
    example: Example,
    mesh: DeviceMesh | None,
    ranks: Sequence[RankRecord] = (),
) -> None:
    """Record the steps of somebody's loop, and of another that loads what the first has saved after the
    last. One process gets all rows of a step as one batch, and steps with the gradients of the `ranks`."""

    def run(loop: Any, model: nn.Module, step: int, moment: str) -> None:
        """Record one step of a loop."""
        if mesh is None:
            own = [subject.rows_of_step(example, step)]
        else:
            own = subject.batches(example, step)[own_rank(subject)]
        with gradients_of_optimizers(model, joined_gradients(found, ranks, moment)) as caught:
            loss = loop.step(own)
        found.tensors |= {Seen(moment, "gradient", name): g for name, g in gathered(caught).items()}
        if not caught:
            found.notes = ("gradients, with which no optimizer of torch stepped",)
        if loss is not None:
            loss = full_tensor(loss.detach()) if isinstance(loss, Tensor) else torch.tensor(float(loss))
            found.tensors[Seen(moment, "loss", "the step")] = loss.float().cpu()
        look(found, f"after {moment}", model)

    loop = subject.new_loop(model, mesh)
    for step in range(STEPS):
        run(loop, model, step, f"step {step + 1}")
    everyone = range(subject.mesh.data_parallel) if mesh is None else (own_rank(subject),)
    if not (hasattr(loop, "save") and hasattr(loop, "load")):
        found.notes += ("saving and loading, which the loop does not have",)
        evaluate(subject, found, model, example, everyone)
        return
    last, saved_at = f"step {STEPS + 1}", f"after step {STEPS}"
    if mesh is None:
        for name, value in found.last.items():
            found.tensors[Seen(f"{saved_at}{LOADED}", "value", name)] = value
    else:
        loop.save(subject.folder)
        dist.barrier()
    run(loop, model, STEPS, last)
    evaluate(subject, found, model, example, everyone)  # last: FSDP2 leaves its root whole
    if mesh is None:
        saved = model.state_dict().keys()
        for seen, tensor in [*found.tensors.items()]:
            of_last = seen.moment in (last, f"after {last}") and seen.what != "buffer"
            if of_last or (seen.what == "buffer" and seen.moment != START and seen.name in saved):
                found.tensors[dataclasses.replace(seen, moment=f"{seen.moment}{LOADED}")] = tensor
        return
    torch.manual_seed(1)
    model = subject.sharded(subject.built()[0].to(subject.device).train(), mesh)
    loop = subject.new_loop(model, mesh)
    loop.load(subject.folder)
    found.last.clear()
    look(found, f"{saved_at}{LOADED}", model)
    run(loop, model, STEPS, f"{last}{LOADED}")


def look(found: RankRecord, moment: str, model: nn.Module) -> None:
    """Record the parameters of a model, or what changed since the last look, because a step of a real
    learning rate changes little of a value; and buffers, after a load without those that are not saved."""
    for name, parameter in named(model):
        value = whole(parameter)
        last = found.last.get(name)
        seen = Seen(moment, "value" if last is None else "change", name)
        found.tensors[seen] = value if last is None else value - last
        found.last[name] = value
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved or not moment.endswith(LOADED):
            found.tensors[Seen(moment, "buffer", clean(name))] = whole(buffer)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, of a DTensor all of it, on the CPU; a complex one as pairs of numbers."""
    found = full_tensor(tensor.detach()).cpu().clone()
    return torch.view_as_real(found) if found.is_complex() else found


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all names of the parameters, without those of wrappers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield clean(name), parameter


def frozen(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, parameter in named(model) if not parameter.requires_grad)


def clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def ties(model: nn.Module) -> dict[str, str]:
    """Return the names of one parameter after the first, with the first."""
    shared = names_by_parameter(model).values()
    return {clean(name): clean(first) for first, *others in shared for name in others}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of all trained parameters, as `gathered` does."""
    return gathered({name: p.grad for name, p in named(model) if p.requires_grad})


def gathered(of: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return gradients whole, as far as torch knows; None: there is none. A DTensor is gathered only if all
    ranks have it. Every rank calls it."""
    everywhere = set.intersection(*gather_from_all({name for name, g in of.items() if g is not None}))
    return {
        name: None if g is None or (isinstance(g, DTensor) and name not in everywhere) else whole(g)
        for name, g in of.items()
    }


@contextmanager
def gradients_of_optimizers(
    model: nn.Module, others: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor | None]]:
    """Context that notes a rank's gradients when torch's optimizers step: of each parameter when the first
    that has it steps. They then step with `others`, where these are the same but for rounding, of which Adam
    makes a full step if it is all there is of a gradient."""
    caught: dict[str, Tensor | None] = {}
    stepped = set[str]()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if ids.isdisjoint(map(id, names.values())):
            return
        now = {name: p.grad for name, p in names.items() if p.requires_grad and name not in stepped}
        own = {name: gradient for name, gradient in now.items() if id(names[name]) in ids}
        for name, gradient in now.items():
            if name in own or name not in caught:
                caught[name] = None if gradient is None else gradient.detach().clone()
        stepped.update(own)
        if not others:
            return
        floor = floor_of(own.values())
        for name, gradient in own.items():
            other = others.get(name)
            if gradient is None or other is None or relative_error(other, gradient, floor)[0] > NARROW:
                continue
            gradient.copy_(other)

    names = dict(named(model))
    handle = register_optimizer_step_pre_hook(note)
    try:
        yield caught
    finally:
        handle.remove()


def backward(model: nn.Module, part: Example, seed: int) -> list[Tensor]:
    """Run forward and backward of a sum of the outputs, with random factors of their size. Returns them."""
    torch.manual_seed(seed)
    outputs = whole_outputs(call(model, part))
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), device=outputs[0].device) if outputs else torch.zeros(())
    for output in outputs:
        factors = torch.randn(output.shape, generator=generator).to(output.device)
        size = output.detach().norm() / max(1, len(output) if output.dim() else 1) ** 0.5
        loss = loss + (output * factors).sum() / torch.where(size > 0, size, 1.0)
    if not loss.requires_grad:
        raise PlanError(
            "no output of the model depends on its parameters: there is nothing to train. An output in an "
            "object that is no pytree, as of a plain dataclass, is not seen"
        )
    loss.backward()
    return [output.detach().cpu() for output in outputs]


def evaluate(
    subject: Subject, found: RankRecord, model: nn.Module, example: Example, data_ranks: Sequence[int]
) -> None:
    """Record the outputs of a model in evaluation mode, for the rows of some data-parallel ranks."""
    model.eval()
    for rank in data_ranks:
        with torch.no_grad():
            outputs = whole_outputs(call(model, subject.batches(example, 0)[rank][-1]))
        for i, output in enumerate(outputs):
            seen = Seen("evaluation", "output", str(i))
            found.of_rank[rank, seen] = found.tensors[seen] = output.cpu()


def own_rank(subject: Subject) -> int:
    """Return the index of this rank's rows."""
    return data_rank(subject.mesh, dist.get_rank())


def is_random(model: nn.Module, example: Example) -> bool:
    """Return whether a model in training mode draws random numbers."""

    def states() -> list[Tensor]:
        on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *on_gpu]

    before = states()
    with torch.no_grad():
        call(model, some_rows(example, 0, 1))
    return not all(map(torch.equal, before, states()))


def _moment(step: int, number: int) -> str:
    return f"step {step + 1}, micro batch {number + 1}"


def _seed(rank: int, number: int) -> int:
    return rank * MICRO_BATCHES + number
