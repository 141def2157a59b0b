"""Trace a module in eager mode: every operation, and the memory live at each of them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.parallel.operators import (
    COLLECTIVES,
    FLOAT8_PRODUCT,
    GROUPED_PRODUCTS,
    PRODUCTS,
    VIEWS,
    attention_flops,
    attention_head_dim,
    collective_axis,
    custom_op_body,
)
from meshwright.parallel.planner.workload import Linear, Operation, Phase, pareto_peaks, total

ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})  # no work
# Two micro batches show which amounts grow with them; not 1, a size that torch treats specially in places.
# Work in chunks of tokens is extrapolated linearly, even if two sequences are shorter than a chunk.
RECORDED_SEQUENCES = (2, 3)


@dataclass(frozen=True)
class TracedModule:
    """A module on fake tensors with the arguments of one call.

    `tables`: tensors among the arguments that the caller holds for all modules, such as position tables; the
    first of the others is the result of the module before.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[Tensor, ...] = ()

    @property
    def input(self) -> Tensor | None:
        """The tensor that the module before has made; None for a module that gets only numbers."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        held = {id(table) for table in self.tables}
        return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in held), None)

    def call(self) -> list[Tensor]:
        """Run the module's forward, and return the results that have gradients."""
        leaves = tree_leaves(self.module(*self.args, **self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass(frozen=True)
class RecordedPhase:
    """A forward or backward recorded with one micro batch size: its operations, whose amounts are `fixed`,
    the live bytes at each moment, and the bytes `left` after it."""

    operations: list[Operation]
    moments: list[int]
    left: int


class _GradientSink(torch.autograd.Function):
    """A substitute for the modules that follow: takes results without saving them, and returns their
    gradients, to which no one else holds a reference."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in results]
        return results[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(gradient.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


class _OpRecorder(TorchDispatchMode):
    """Records every operation below autograd, and tracks the lifetime of every storage except those of
    `uncounted` tensors: weights and tables."""

    def __init__(self, uncounted: Iterable[Tensor]) -> None:
        super().__init__()
        # references that keep them alive: otherwise a new storage could get a freed one's address and not be
        # counted
        self._kept = [tensor.untyped_storage() for tensor in uncounted]
        self._uncounted = {storage._cdata for storage in self._kept}
        self.operations: list[Operation] = []
        self.moments: list[int] = []
        self.now = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live and key not in self._uncounted:
            self.now += size
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._live[key]
        self.now -= size

    def finish(self) -> RecordedPhase:
        """Return the record since the previous call."""
        recorded = RecordedPhase(self.operations, self.moments, self.now)
        self.operations, self.moments = [], []
        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if code := custom_op_body(func):
            with self:
                return code(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] or _written(func, args)
        for tensor in made:
            self.track(tensor)
        if made and name not in VIEWS:
            self.moments.append(self.now)
        if made and name not in VIEWS | ALLOCATIONS:
            self.operations.append(
                record_op(name, args, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)], made)
            )
        return result


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as the kernels that CUDA has for it, without values: one in the forward, and one for each
    gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, recorder: _OpRecorder, x: Tensor, weight: Tensor) -> Tensor:
        result, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        ctx.recorder = recorder
        recorder.operations.append(record_op("rms_norm", (), [x, weight], [result, scale]))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        results = torch.empty_like(x), torch.empty_like(weight)
        for made in results:
            read = [gradient, x, weight, scale]
            ctx.recorder.operations.append(record_op("rms_norm_backward", (), read, [made]))
        return None, *results


@contextmanager
def _cuda_kernels(recorder: _OpRecorder) -> Iterator[None]:
    """Context in which RMSNorm is the kernels of CUDA, also in what a backward recomputes, where the engine
    switches torch's function modes off."""
    functional: Any = F
    plain = F.rms_norm

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        return plain(x, shape, weight, eps) if weight is None else _FusedNorm.apply(recorder, x, weight)

    functional.rms_norm = rms_norm
    try:
        yield
    finally:
        functional.rms_norm = plain


def trace_eager(
    build: Callable[[int], TracedModule], on_cuda: bool = False
) -> tuple[Phase, Phase, Linear, Linear]:
    """Return forward, backward, saved and output bytes of the module that `build` returns for sequences, run
    by the kernels of a CPU or of CUDA."""
    runs = [_record(build(sequences), on_cuda) for sequences in RECORDED_SEQUENCES]
    forwards, backwards, outputs = zip(*runs, strict=True)
    return (
        join_phases(forwards),
        join_phases(backwards),
        fit_line([forward.left for forward in forwards]),
        fit_line(outputs),
    )


def _record(subject: TracedModule, on_cuda: bool) -> tuple[RecordedPhase, RecordedPhase, int]:
    """Return the forward, the backward, and the bytes of the output."""
    held = [*subject.module.parameters(), *subject.module.buffers(), *subject.tables]
    with _OpRecorder(held) as recorder, _cuda_kernels(recorder) if on_cuda else nullcontext():
        if subject.input is not None:
            recorder.track(subject.input)
        results = subject.call()
        del subject  # its input stays alive only if the backward needs it
        output = sum(result.untyped_storage().nbytes() for result in results)
        forward = recorder.finish()
        end = _GradientSink.apply(*results) if results else None
        del results
        left = recorder.finish().left
        if end is not None:
            end.backward(torch.empty_like(end))
        backward = recorder.finish()
    return RecordedPhase(forward.operations, forward.moments, left), backward, output


def _written(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors that an operation without a result writes into."""
    return [
        arg
        for arg, declared in zip(args, func._schema.arguments, strict=False)
        if isinstance(arg, Tensor) and declared.alias_info is not None and declared.alias_info.is_write
    ]


def record_call(call: Callable[[], Any], uncounted: Iterable[Any]) -> tuple[RecordedPhase, Any]:
    """Return the record of a call, not counting the tensors in `uncounted`, and the call's result."""
    with _OpRecorder(value for value in uncounted if isinstance(value, Tensor)) as recorder:
        result = call()
        return recorder.finish(), result


def record_op(name: str, args: Any, read: Sequence[Tensor], made: Sequence[Tensor]) -> Operation:
    """Return an operation with its amounts for one micro batch size."""
    moved = Linear(sum(tensor.nbytes for tensor in (*read, *made)))
    dtype = str(made[0].dtype).removeprefix("torch.")
    if name in GROUPED_PRODUCTS:
        flops = Linear(2.0 * GROUPED_PRODUCTS[name] * read[0].numel() * read[1].shape[-1])
        return Operation("matmul", name, flops, moved, dtype)
    if name in PRODUCTS:
        in_float8 = name == FLOAT8_PRODUCT
        left = read[0] if in_float8 else read[-2]  # its scales come last, and a bias first
        flops = Linear(2.0 * made[0].numel() * left.shape[-1])
        return Operation("matmul", name, flops, moved, "float8" if in_float8 else dtype)
    if "attention" in name:
        flops = Linear(attention_flops(name, args))
        return Operation("attention", name, flops, moved, dtype, attention_head_dim(name, args))
    if name in COLLECTIVES:
        full = Linear(max(t.nbytes for t in (*read, *made)))
        return Operation("collective", COLLECTIVES[name], Linear(), full, dtype, axis=collective_axis(args))
    return Operation("memory", name, Linear(), moved, dtype)


def join_phases(recorded: Sequence[RecordedPhase]) -> Phase:
    """Combine the records of both RECORDED_SEQUENCES into a phase that is linear in the micro batch. If the
    larger micro batch ran more operations, it ran in chunks: then operations of one name are summed, and only
    the largest moment counts."""
    if len({len(phase.operations) for phase in recorded}) > 1:
        recorded = [
            RecordedPhase(_sum_by_name(phase.operations), [max(phase.moments)], phase.left)
            for phase in recorded
        ]
    operations = tuple(
        replace(
            small,
            flops=fit_line([small.flops.fixed, large.flops.fixed]),
            bytes=fit_line([small.bytes.fixed, large.bytes.fixed]),
        )
        for small, large in zip(*(phase.operations for phase in recorded), strict=True)
    )
    return Phase(
        operations,
        pareto_peaks(fit_line(pair) for pair in zip(*(phase.moments for phase in recorded), strict=True)),
    )


def _sum_by_name(operations: Sequence[Operation]) -> list[Operation]:
    sums: dict[Operation, Operation] = {}
    for operation in operations:
        key = replace(operation, flops=Linear(), bytes=Linear())
        before = sums.get(key, key)
        flops, moved = total((before.flops, operation.flops)), total((before.bytes, operation.bytes))
        sums[key] = replace(before, flops=flops, bytes=moved)
    return list(sums.values())


def fit_line(amounts: Sequence[float]) -> Linear:
    """Return the line through two amounts, one for each of RECORDED_SEQUENCES."""
    (low, high), (first, second) = RECORDED_SEQUENCES, amounts
    slope = (second - first) / (high - low)
    return Linear(first - slope * low, slope)
