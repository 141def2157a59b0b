"""Steps whose loss or gradient is not finite: counted, and diagnosed if there are too many.

`train_step` skips such a step on the device, and all ranks skip it. To find the first value that is not
finite, the step is repeated with hooks on every module.
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

from meshwright.parallel.errors import first_of
from meshwright.parallel.fsdp import local_part
from meshwright.parallel.mesh import gather_from_all
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.sequences import Batch, BatchShape
from meshwright.train.data.training_data import Order
from meshwright.train.errors import NonFiniteError
from meshwright.train.hooks import Hook, StepDone
from meshwright.train.model.trained_model import LossOf
from meshwright.train.step import count_targets


@dataclass(frozen=True)
class BadValue:
    """A value that is not finite, such as "the output of layers.1". `place`: its position in the order of
    execution, which is the same on every rank; `micro_batch`: None for a value summed over all of them."""

    place: int
    what: str
    micro_batch: int | None


def first_bad_value(
    sharded: ShardedModel, micro_batches: Sequence[Batch], loss_of: LossOf
) -> BadValue | None:
    """Repeat a step's forward and backward without compilation; return the first value on this rank that is
    not finite, or None.

    Every rank repeats the full step whatever it finds, because the others need its shards of the weights.
    Leaves no gradients.
    """
    model, watch = sharded.model, _Watch()
    global_tokens = sharded.global_count(micro_batches, count_targets)
    with _eager(model), watch.modules(model):
        for i, batch in enumerate(sharded.accumulate(micro_batches)):
            watch.micro_batch, watch.in_forward = i, True
            loss = loss_of(model, batch, global_tokens)
            watch.check("the loss", [loss])
            watch.in_forward = False
            loss.backward()
        watch.micro_batch = None
        for name, p in model.named_parameters():
            squares = [_square(p.grad)] if p.grad is not None else []
            watch.check(f"the gradient of {name}, summed over the ranks (or its square)", squares)
    model.zero_grad(set_to_none=True)
    return watch.first


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all local values are finite. Makes no copies."""
    local = (local_part(x.detach()) for x in tensors)
    return all(
        bool(torch.linalg.vector_norm(x, float("inf")).isfinite())
        for x in local
        if x.numel() and x.is_floating_point()
    )


class _Watch:
    """Checks values in the order of execution and keeps the first that is not finite."""

    def __init__(self) -> None:
        self.first: BadValue | None = None
        self.micro_batch: int | None = None
        self.in_forward = True  # and not in the recompute of a backward, whose values were checked before
        self._checked = 0
        self._hooks: list[RemovableHandle] = []

    def check(self, what: str, values: Iterable[Tensor]) -> None:
        """Keep the values' description if they are the first that are not finite."""
        self._checked += 1
        if self.first is None and not all_finite(values):
            self.first = BadValue(self._checked, what, self.micro_batch)

    @contextlib.contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Check every module's inputs and outputs, and the gradients of its inputs and own weights."""
        for name, module in model.named_modules():
            if name:  # the model itself would add no location
                self._hooks.append(module.register_forward_pre_hook(partial(self._before, name)))
                self._hooks.append(module.register_forward_hook(partial(self._after, name)))
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()

    def _before(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.in_forward:
            tensors = [x for x in inputs if isinstance(x, Tensor)]
            self.check(f"the input of {name}", tensors)
            for x in tensors:
                self._check_gradient(f"the gradient of the input of {name}", x, local_part)
            for weight, p in module.named_parameters(recurse=False):
                self._check_gradient(f"the gradient of {name}.{weight} (or its square)", p, _square)

    def _after(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if self.in_forward:
            self.check(f"the output of {name}", [output])

    def _check_gradient(self, what: str, x: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        if x.requires_grad:
            self._hooks.append(x.register_hook(lambda grad: self.check(what, [of(grad)])))


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Disable compilation within this context. The modules that were compiled recompute their activations
    instead, because these might not fit into memory."""
    from meshwright.parallel.activation_checkpoint import recompute  # late: few runs need it

    compiled = {
        module: call for module in model.modules() if (call := module._compiled_call_impl) is not None
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
    """Return the squared norm of this rank's part, which must be finite too for clipping."""
    return local_part(gradient).detach().norm().square()


_MANY = 8  # ranks, names or sequences listed in a message


@dataclass(frozen=True)
class NonFiniteFinding:
    """What one rank found about a skipped step: its parameters that are not finite, the first value that was
    not finite when the step was repeated, the sequences concerned, and whether it could be repeated, which
    takes more memory than a compiled step."""

    rank: int
    parameters: tuple[str, ...]
    first: BadValue | None
    sequences: str
    repeated: bool = True


WINDOW_STEPS = 100  # consecutive steps in which skipped ones count: a long run may have a few now and then


class NonFiniteGuard(Hook):
    """Counts skipped steps; every rank gets the same result at the same step.

    Before too many of them end the run, `save_good` is called with the position after the last step that was
    not skipped, if there was one: the skipped ones have changed nothing, and a restart repeats them.

    On a CPU a step's flag is read immediately. On a GPU it is copied to the host without waiting, and read
    after the next step has been enqueued, so that the device always has work: the warning and the end of the
    run then come one step late.
    """

    def __init__(
        self,
        max_skipped: int,
        sharded: ShardedModel,
        order: Order,
        shape: BatchShape,
        loss_of: LossOf,
        print_: Callable[[str], None],
    ) -> None:
        """`max_skipped` of WINDOW_STEPS steps may be skipped. The other arguments serve to repeat the first
        step above that limit and to name its sequences: model and loss of train_step, order and shape of the
        training loop; and to print a warning of each skipped step."""
        self.skipped = 0  # by this process
        self.save_good: Callable[[TrainPosition], None] = lambda position: None
        self._recent: list[int] = []  # skipped steps
        self._good: TrainPosition | None = None
        self._print = print_
        self._max_skipped, self._order, self._shape = max_skipped, order, shape
        self._sharded, self._loss_of = sharded, loss_of
        # steps whose flag has not been read, the flag, and the event after which that is on the host
        self._steps = deque[tuple[StepDone, Tensor, torch.cuda.Event | None]]()

    def columns(self) -> dict[str, int]:
        """Return the number of skipped steps, for a row of metrics; nothing while there are none."""
        return {"skipped_steps": self.skipped} if self.skipped else {}

    def after_step(self, done: StepDone) -> None:
        """Raises NonFiniteError, after a diagnosis by all ranks, if too many steps were skipped."""
        skipped, copied = _to_host(done.result.skipped)
        self._steps.append((done, skipped, copied))
        self._read(0 if copied is None else 1)

    def finish(self) -> None:
        """Like `after_step`, for the flags that have not been read: before a checkpoint, and at the end."""
        self._read(0)

    def _read(self, left: int) -> None:
        """Read the flags of all steps but the last `left`, of all if one is the step that ends the run."""
        last = None
        while len(self._steps) > left or (last and self._steps):
            done, skipped, copied = self._steps.popleft()
            if copied is not None:
                copied.synchronize()
            if not skipped.item():
                self._good = done.position
                continue
            self.skipped += 1
            self._recent = [step for step in self._recent if step > done.step - WINDOW_STEPS] + [done.step]
            if len(self._recent) > self._max_skipped:
                last = last or done
                continue
            self._print(
                f"warning: step {done.step} was skipped: its loss or gradient is not finite "
                f"({len(self._recent)} of at most {self._max_skipped} in {WINDOW_STEPS} steps)"
            )
        if last:
            if self._good:
                self.save_good(self._good)  # before the diagnosis, which needs more memory than a step
            raise NonFiniteError(self._diagnose(last))

    def _diagnose(self, done: StepDone) -> str:
        """Return all ranks' findings about a step. On a GPU the next may have changed weights slightly."""
        damaged = tuple(name for name, p in self._sharded.model.named_parameters() if not all_finite([p]))
        first, repeated = None, True
        try:
            first = first_bad_value(self._sharded, done.data.micro_batches, self._loss_of)
        except torch.OutOfMemoryError:
            repeated = False
        sequences = self._sequences(done.first_sample, None if first is None else first.micro_batch)
        found = NonFiniteFinding(dist.get_rank(), damaged, first, sequences, repeated)
        # out of memory possibly on this rank only, so no collective may follow
        findings = gather_from_all(found) if repeated else [found]
        last_sample = done.first_sample + self._shape.global_batch_size - 1
        return describe(done.step, self._max_skipped, findings, f"{done.first_sample} to {last_sample}")

    def _sequences(self, first_sample: int, micro_batch: int | None) -> str:
        """Return this rank's sequences, of a micro batch or the full step, by source and index in it."""
        positions, size = (
            self._shape.positions(first_sample, self._order.strided),
            self._shape.micro_batch_size,
        )
        if micro_batch is not None:
            positions = positions[micro_batch * size : (micro_batch + 1) * size]
        return self._order.describe(positions)


def describe(step: int, max_skipped: int, findings: Sequence[NonFiniteFinding], positions: str) -> str:
    """Return the message with the findings of all ranks and what to do; `positions` is the range of the
    step's sequences in the data order."""
    place = min((finding.first.place for finding in findings if finding.first), default=0)
    damaged, firsts, others = list[str](), list[str](), list[str]()
    for finding in findings:
        rank, first = f"rank {finding.rank}", finding.first
        if finding.parameters:
            names = first_of(finding.parameters, most=_MANY)
            damaged.append(f"{rank} has parameters that are not finite: {names}")
        if first and first.place == place:
            seen = f"its sequences: {finding.sequences}"
            firsts.append(f"{rank}: {first.what} is the first value that is not finite; {seen}")
        if not finding.repeated:
            others.append(f"{rank}: too little memory to repeat the step without compilation")
    if len(firsts) > _MANY:
        others.append(f"{len(firsts) - _MANY} other ranks: the same")
    if not firsts and not others:
        others.append(
            "not reproduced on any rank when the step was repeated: a fault of the hardware, the network or "
            "compiled code is likely"
        )
    return "\n".join(
        (
            f"the loss or gradient of step {step} is not finite, and at most "
            f"train.max_skipped_steps={max_skipped} of {WINDOW_STEPS} steps may be skipped. Diagnosis by "
            f"repeating the step (sequences {positions} of the data order):",
            *(*damaged[:_MANY], *firsts[:_MANY], *others),
            "The step changed no weight. The same command resumes from the last checkpoint; a lower "
            "optim.lr, a longer warm-up or other data may avoid the failure",
        )
    )


def _to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy of a flag on the host, and for a GPU the event of the copy's arrival."""
    if not flag.is_cuda:
        return flag, None
    arrived = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return arrived, event
