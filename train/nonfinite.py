"""Steps whose loss or gradient is not finite: counted, and, when there are too many, explained.

`train_step` skips such a step by itself, on the device and on all ranks alike.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.train.data.loader import BatchShape, SampleOrder, StepData
from meshwright.train.first_bad import BadValue, first_bad_value, parameters_not_finite
from meshwright.train.step import Batch, StepResult

_MANY = 8  # ranks, names or sequences that a message lists


class NonFiniteError(RuntimeError):
    """Too many steps were not finite, or something that is not finite would have been saved."""


@dataclass(frozen=True)
class Finding:
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


class FiniteGuard:
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
        damaged = parameters_not_finite(self._model)
        positions = f"{done.first_sample} to {done.first_sample + self._shape.global_batch_size - 1}"
        try:
            first = first_bad_value(self._model, done.micro_batches, self._data_parallel)
        # perhaps on this rank alone: nothing more can be agreed on with the others
        except torch.OutOfMemoryError:
            alone = Finding(
                dist.get_rank(), damaged, None, self._sequences(done.first_sample, None), repeated=False
            )
            return describe(done.step, self._max_skipped, [alone], positions)
        micro_batch = None if first is None else first.micro_batch
        found = _gather(
            Finding(dist.get_rank(), damaged, first, self._sequences(done.first_sample, micro_batch))
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
        return "; ".join(f"{_listed(ids)} of {source}" for source, ids in by_source.items())


def describe(step: int, max_skipped: int, found: Sequence[Finding], positions: str) -> str:
    """The findings of all ranks in words, and what to do; `positions` of the step's sequences in the order of
    the run."""
    places = [one.first.place for one in found if one.first is not None]
    lines = [
        f"the loss or gradient of step {step} is not finite, and no more than "
        f"train.max_skipped_steps={max_skipped} may be "
        f"skipped. It was repeated to find out more (its sequences stand at {positions} of the order):"
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
            "or of "
            "compiled code is likely"
        )
    lines.append(
        "No weight was changed by it. The same command goes on from the last checkpoint; a lower optim.lr, a "
        "longer "
        "warm-up or other data may avoid it"
    )
    return "\n".join(lines)


def _damaged(found: Sequence[Finding]) -> list[str]:
    """Of the first ranks, what they hold that is not finite."""
    damaged = [one for one in found if one.parameters]
    return [
        f"rank {one.rank} holds values that are not finite: {_listed(one.parameters)}"
        for one in damaged[:_MANY]
    ]


def _listed(items: Sequence[object]) -> str:
    more = f" and {len(items) - _MANY} more" if len(items) > _MANY else ""
    return ", ".join(str(item) for item in items[:_MANY]) + more


def _gather(mine: Finding) -> list[Finding]:
    """The findings of all ranks, exchanged on the host."""
    found: list[Finding] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a flag on the host, and, where it is still under way from a GPU, what says when it has
    arrived."""
    if not flag.is_cuda:
        return flag, None
    arrived = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return arrived, event
