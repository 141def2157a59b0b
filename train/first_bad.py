"""Where in a step the first value comes up that is not finite: the step is run again, and every module
watched."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.fsdp import local_part, set_last_micro_batch
from meshwright.train.step import Batch, count_targets, summed


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


def parameters_not_finite(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of which this rank's part is not finite."""
    return tuple(name for name, p in model.named_parameters() if not all_finite([p]))


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
