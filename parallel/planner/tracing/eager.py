"""What a module does when it runs eagerly: every operation by itself, and what lives between them."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.parallel.operators import COLLECTIVES, PRODUCTS, VIEWS, attention_flops, inner_code
from meshwright.parallel.planner.workload import Linear, Operation, Phase, pareto_peaks

ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})  # no work
# Two micro batches tell what grows with them; not 1, which torch treats as special in places. What is done in
# chunks of so many tokens is taken to grow on where two sequences are shorter than a chunk.
WATCHED_SEQUENCES = (2, 3)


@dataclass(frozen=True)
class TracedModule:
    """A module on fake tensors and what to call it with: `inputs` have the micro batch as their first dim;
    `tables`, which come after the first input, are the same for every sequence."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    tables: tuple[Tensor, ...] = ()

    def call(self) -> Tensor:
        first, *rest = self.inputs
        result: Tensor = self.module(first, *self.tables, *rest)
        return result


@dataclass(frozen=True)
class _OpRecord:
    """An operation as it was seen with one micro batch: amounts are numbers."""

    kind: str
    name: str
    flops: float
    bytes: float
    dtype: str


@dataclass(frozen=True)
class RecordedPhase:
    """One module's forward or backward with one micro batch; `left`: bytes that live after it."""

    operations: list[_OpRecord]
    moments: list[int]
    left: int


class _GradientSink(torch.autograd.Function):
    """Stands for the modules after: takes a result without keeping it, and gives its gradient, which nobody
    else holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.new_empty(ctx.shape)


class _OpRecorder(TorchDispatchMode):
    """Notes every operation below autograd, and follows every storage from when it is seen to its end, but
    for those of `uncounted` tensors: weights and tables."""

    def __init__(self, uncounted: Iterable[Tensor]) -> None:
        super().__init__()
        # kept alive: another storage could get the address of one that is freed, and would not be counted
        self._kept = [tensor.untyped_storage() for tensor in uncounted]
        self._uncounted = {storage._cdata for storage in self._kept}
        self.operations: list[_OpRecord] = []
        self.moments: list[int] = []
        self.now = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live and key not in self._uncounted:
            self.now += size
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._live[key]
        self.now -= size

    def finish(self) -> RecordedPhase:
        """What was seen since the last time."""
        watched = RecordedPhase(self.operations, self.moments, self.now)
        self.operations, self.moments = [], []
        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if code := inner_code(func):
            with self:
                return code(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] or _written(func, args)
        for tensor in made:
            self.follow(tensor)
        if made and name not in VIEWS:
            self.moments.append(self.now)
        if made and name not in VIEWS | ALLOCATIONS:
            self.operations.append(
                _look_at(name, args, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)], made)
            )
        return result


def watch_eager(build: Callable[[int], TracedModule]) -> tuple[Phase, Phase, Linear, Linear]:
    """Forward, backward, bytes that the forward keeps, bytes of its output, of the module that `build`
    makes."""
    runs = [_watch(build(sequences)) for sequences in WATCHED_SEQUENCES]
    forwards, backwards, outputs = zip(*runs, strict=True)
    return (
        join_watched(forwards),
        join_watched(backwards),
        line([forward.left for forward in forwards]),
        line(outputs),
    )


def _watch(subject: TracedModule) -> tuple[RecordedPhase, RecordedPhase, int]:
    with _OpRecorder([*subject.module.parameters(), *subject.tables]) as watcher:
        watcher.follow(subject.inputs[0])
        result = subject.call()
        del subject  # its input lives on if the backward needs it
        output = result.untyped_storage().nbytes()
        forward = watcher.finish()
        end = _GradientSink.apply(result)
        del result
        left = watcher.finish().left
        end.backward(torch.empty_like(end))
        backward = watcher.finish()
    return RecordedPhase(forward.operations, forward.moments, left), backward, output


def _written(func: Any, args: Any) -> list[Tensor]:
    """What an operation that returns nothing writes into."""
    return [
        arg
        for arg, known in zip(args, func._schema.arguments, strict=False)
        if isinstance(arg, Tensor) and known.alias_info is not None and known.alias_info.is_write
    ]


def watch_call(call: Callable[[], Any], uncounted: Iterable[Any]) -> tuple[RecordedPhase, Any]:
    """A function's operations and what lives meanwhile, without the tensors among `uncounted`; and its
    result."""
    with _OpRecorder(value for value in uncounted if isinstance(value, Tensor)) as watcher:
        result = call()
        return watcher.finish(), result


def _look_at(name: str, args: Any, read: Sequence[Tensor], made: Sequence[Tensor]) -> _OpRecord:
    moved = float(sum(tensor.nbytes for tensor in (*read, *made)))
    dtype = str(made[0].dtype).removeprefix("torch.")
    if name in PRODUCTS:
        return _OpRecord("matmul", name, 2.0 * made[0].numel() * read[-2].shape[-1], moved, dtype)
    if "attention" in name:
        return _OpRecord("attention", name, attention_flops(name, args), moved, dtype)
    if name in COLLECTIVES:
        return _OpRecord(
            "collective", COLLECTIVES[name], 0.0, float(max(t.nbytes for t in (*read, *made))), dtype
        )
    return _OpRecord("memory", name, 0.0, moved, dtype)


def join_watched(watched: Sequence[RecordedPhase]) -> Phase:
    """What two micro batches show, as what any would do. Where the larger one did more operations, it did
    them in chunks: operations of a name are then taken together, and of the moments the fullest."""
    if len({len(one.operations) for one in watched}) > 1:
        watched = [
            RecordedPhase(_taken_together(one.operations), [max(one.moments)], one.left) for one in watched
        ]
    operations = tuple(
        Operation(
            one.kind, one.name, line([one.flops, other.flops]), line([one.bytes, other.bytes]), one.dtype
        )  # type: ignore[arg-type]
        for one, other in zip(*(w.operations for w in watched), strict=True)
    )
    return Phase(
        operations, pareto_peaks(line(pair) for pair in zip(*(w.moments for w in watched), strict=True))
    )


def _taken_together(operations: Sequence[_OpRecord]) -> list[_OpRecord]:
    sums: dict[tuple[str, str, str], _OpRecord] = {}
    for seen in operations:
        key = (seen.kind, seen.name, seen.dtype)
        before = sums.get(key, _OpRecord(seen.kind, seen.name, 0.0, 0.0, seen.dtype))
        sums[key] = replace(before, flops=before.flops + seen.flops, bytes=before.bytes + seen.bytes)
    return list(sums.values())


def line(amounts: Sequence[float]) -> Linear:
    """The line through two amounts, one for each of WATCHED_SEQUENCES."""
    (low, high), (first, second) = WATCHED_SEQUENCES, amounts
    slope = (second - first) / (high - low)
    return Linear(first - slope * low, slope)
