"""Steps whose loss or gradient is not finite: counted, and, when there are too many, explained.

`train_step` skips such a step by itself, on the device and on all ranks alike. To find the first value that
is not finite the step is run again, with every module watched.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.errors import first_of
from meshwright.parallel.fsdp import local_part, set_last_micro_batch
from meshwright.train.data.batch import Batch
from meshwright.train.data.loader import BatchShape, StepData
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.distributed.ranks import gather_from_all
from meshwright.train.errors import NonFiniteError
from meshwright.train.step import StepResult, count_targets, summed


@dataclass(frozen=True)
class BadValue:
    """A value that is not finite.

    Args:
        place: how many values came before it, in the order of execution, which is the same on every rank
        what: the value in words, as "the output of layers.1"
        micro_batch: the one it belongs to, counted from 0; None for what is added up over all of them
    """

    place: int
    what: str
    micro_batch: int | None


def first_bad_value(
    model: nn.Module, micro_batches: Sequence[Batch], data_parallel: dist.ProcessGroup
) -> BadValue | None:
    """Repeat the forward and backward of a step, not compiled; the first value on this rank that is not
    finite, or None.

    Every rank runs all of it, whatever it finds, because the others need its parts of the weights. Leaves no
    gradients.
    """
    global_tokens = summed(count_targets(micro_batches), data_parallel).clamp(min=1)
    watch = _Watch()
    with _eager(model), watch.modules(model):
        for i, batch in enumerate(micro_batches):
            set_last_micro_batch(model, last=i == len(micro_batches) - 1)
            watch.micro_batch, watch.in_forward = i, True
            loss = model(batch.tokens, batch.targets, batch.first) / global_tokens
            watch.look("the loss", [loss])
            watch.in_forward = False
            loss.backward()
        watch.micro_batch = None
        for name, p in model.named_parameters():
            if p.grad is not None:
                watch.look(
                    f"the gradient of {name}, summed over the ranks (or its square)", [_square(p.grad)]
                )
    model.zero_grad(set_to_none=True)
    return watch.first


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether everything that this rank holds of them is finite. Waits for the device, once, and makes no
    copies."""
    held = [local for x in tensors if (local := local_part(x.detach())).numel() and local.is_floating_point()]
    largest = torch._foreach_norm(held, float("inf")) if held else []
    return all(bool(torch.stack(of_device).isfinite().all()) for of_device in _by_device(largest))


class _Watch:
    """Looks at values as they come up and keeps the first that is not finite."""

    def __init__(self) -> None:
        self.first: BadValue | None = None
        self.micro_batch: int | None = None
        self.in_forward = True
        self._looked = 0
        self._on_gradients: list[RemovableHandle] = []

    def look(self, what: str, values: Iterable[Tensor]) -> None:
        """Note the values, if they are the first that are not finite."""
        self._looked += 1
        if self.first is None and not all_finite(values):
            self.first = BadValue(self._looked, what, self.micro_batch)

    @contextlib.contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Look at what goes into and comes out of every module, and at the gradients of its inputs and own
        weights."""
        hooks = []
        for name, module in model.named_modules():
            if name:  # not the model itself: it is what happens within that tells something
                hooks.append(module.register_forward_pre_hook(partial(self._before, name)))
                hooks.append(module.register_forward_hook(partial(self._after, name)))
        try:
            yield
        finally:
            for hook in (*hooks, *self._on_gradients):
                hook.remove()

    def _before(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self.in_forward:
            return  # recomputed in the backward: looked at before
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        self.look(f"the input of {name}", tensors)
        for x in tensors:
            self._look_at_gradient(f"the gradient of the input of {name}", x, local_part)
        for weight, p in module.named_parameters(recurse=False):
            self._look_at_gradient(f"the gradient of {name}.{weight} (or its square)", p, _square)

    def _after(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if self.in_forward:
            self.look(f"the output of {name}", [output])

    def _look_at_gradient(self, what: str, x: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        if x.requires_grad:
            self._on_gradients.append(x.register_hook(lambda grad: self.look(what, [of(grad)])))


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Nothing is compiled for the time; what was recomputes its activations instead, or they might not
    fit."""
    compiled = {
        module: module._compiled_call_impl
        for module in model.modules()
        if module._compiled_call_impl is not None
    }
    recomputing = [module for module in compiled if "forward" not in vars(module)]
    for module in compiled:
        module._compiled_call_impl = None
    for module in recomputing:
        recompute(module, ())
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
        for module in recomputing:
            del module.forward, module.saved_ops


def _square(gradient: Tensor) -> Tensor:
    """The square of the norm of this rank's part, which clipping needs to be finite too."""
    return local_part(gradient).detach().norm().square()


def _by_device(values: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[x for x in values if x.device == device] for device in {x.device for x in values}]


_MANY = 8  # ranks, names or sequences that a message lists


@dataclass(frozen=True)
class NonFiniteFinding:
    """What one rank found out about a step that was skipped.

    Args:
        rank: which one
        parameters: names of those of which its part is not finite
        first: what it came to first when the step was repeated, if to anything
        sequences: those that this was in, in words
        repeated: whether it could be, for it takes more memory than a compiled step
    """

    rank: int
    parameters: tuple[str, ...]
    first: BadValue | None
    sequences: str
    repeated: bool = True


@dataclass(frozen=True)
class _Step:
    """A step whose flag is on its way to the host, and what it takes to repeat it."""

    step: int
    first_sample: int
    micro_batches: list[Batch]
    skipped: Tensor
    copied: torch.cuda.Event | None


class NonFiniteGuard:
    """Counts the steps that were skipped; every rank calls it, and hears the same at the same step.

    On a CPU a step's flag is read at once. On a GPU it is copied to the host without waiting, and read when
    the step after it has been enqueued, so the device always has work: news is then one step late, and so is
    the end of the run.
    """

    def __init__(
        self,
        max_skipped: int,
        model: nn.Module,
        order: SampleOrder,
        shape: BatchShape,
        data_parallel: dist.ProcessGroup,
    ) -> None:
        """`max_skipped`: how many steps may be skipped. The rest is what it takes to repeat the step that is
        one too many, and to name its sequences: model, order and shape as the loop has them, and the group of
        train_step."""
        self.skipped = 0
        self._max_skipped, self._model, self._order, self._shape = max_skipped, model, order, shape
        self._data_parallel = data_parallel
        self._steps: deque[_Step] = deque()

    def step_done(self, step: int, first_sample: int, data: StepData, result: StepResult) -> list[str]:
        """Called after each step, which began at position `first_sample` of the order of all ranks. Returns
        lines to show; raises NonFiniteError, after a diagnosis of all ranks together, if a step was skipped
        that must not be."""
        skipped, copied = _to_host(result.skipped)
        self._steps.append(_Step(step, first_sample, data.micro_batches, skipped, copied))
        return self._read(0 if copied is None else 1)

    def finish(self) -> list[str]:
        """As `step_done`, for what has not been read yet: before a checkpoint, and at the end."""
        return self._read(0)

    def _read(self, left: int) -> list[str]:
        """Count all steps but the last `left`."""
        lines = []
        while len(self._steps) > left:
            done = self._steps.popleft()
            if done.copied is not None:
                done.copied.synchronize()
            if not done.skipped.item():
                continue
            self.skipped += 1
            if self.skipped > self._max_skipped:
                raise NonFiniteError(self._diagnose(done))
            lines.append(
                f"warning: step {done.step} was skipped: its loss or gradient is not finite "
                f"({self.skipped} of at most {self._max_skipped})"
            )
        return lines

    def _diagnose(self, done: _Step) -> str:
        """What all ranks together find out about a step. On a GPU the step after it may have changed the
        weights a little."""
        damaged = tuple(name for name, p in self._model.named_parameters() if not all_finite([p]))
        positions = f"{done.first_sample} to {done.first_sample + self._shape.global_batch_size - 1}"
        try:
            first = first_bad_value(self._model, done.micro_batches, self._data_parallel)
        # perhaps on this rank alone: nothing more can be agreed on with the others
        except torch.OutOfMemoryError:
            alone = NonFiniteFinding(
                dist.get_rank(), damaged, None, self._sequences(done.first_sample, None), repeated=False
            )
            return describe(done.step, self._max_skipped, [alone], positions)
        micro_batch = None if first is None else first.micro_batch
        found = gather_from_all(
            NonFiniteFinding(dist.get_rank(), damaged, first, self._sequences(done.first_sample, micro_batch))
        )
        return describe(done.step, self._max_skipped, found, positions)

    def _sequences(self, first_sample: int, micro_batch: int | None) -> str:
        """This rank's sequences, of one micro batch or of the whole step, by source and index in it."""
        shape = self._shape
        begin = first_sample + shape.data_rank * shape.accumulation * shape.micro_batch_size
        count = shape.accumulation * shape.micro_batch_size
        if micro_batch is not None:
            begin, count = begin + micro_batch * shape.micro_batch_size, shape.micro_batch_size
        by_source: dict[str, list[int]] = {}
        for source, index in self._order.rows(begin, count).tolist():
            by_source.setdefault(self._order.names[source], []).append(index)
        return "; ".join(f"{first_of(ids, most=_MANY)} of {source}" for source, ids in by_source.items())


def describe(step: int, max_skipped: int, found: Sequence[NonFiniteFinding], positions: str) -> str:
    """The findings of all ranks in words, and what to do; `positions` of the step's sequences in the order of
    the run."""
    places = [one.first.place for one in found if one.first is not None]
    lines = [
        f"the loss or gradient of step {step} is not finite, and no more than "
        f"train.max_skipped_steps={max_skipped} may be skipped. It was repeated to find out more (its "
        f"sequences stand at {positions} of the order):"
    ]
    lines += _damaged(found)
    firsts = [one for one in found if one.first is not None and one.first.place == min(places)]
    lines += [
        f"rank {one.rank}: {one.first.what} is the first value that is not finite; its sequences: "
        f"{one.sequences}"
        for one in firsts[:_MANY]
        if one.first is not None
    ]
    if len(firsts) > _MANY:
        lines.append(f"{len(firsts) - _MANY} other ranks: likewise")
    if not found[0].repeated:
        lines.append(f"rank {found[0].rank}: no memory to repeat it, which takes more than a compiled step")
    elif not places:
        lines.append(
            "not found again when the step was repeated, on no rank: a fault of the hardware, of the network "
            "or of compiled code is likely"
        )
    lines.append(
        "No weight was changed by it. The same command goes on from the last checkpoint; a lower optim.lr, a "
        "longer warm-up or other data may avoid it"
    )
    return "\n".join(lines)


def _damaged(found: Sequence[NonFiniteFinding]) -> list[str]:
    """Of the first ranks, what they hold that is not finite."""
    damaged = [one for one in found if one.parameters]
    return [
        f"rank {one.rank} holds values that are not finite: {first_of(one.parameters, most=_MANY)}"
        for one in damaged[:_MANY]
    ]


def _to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a flag on the host, and, where it is still under way from a GPU, what says when it has
    arrived."""
    if not flag.is_cuda:
        return flag, None
    arrived = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return arrived, event
