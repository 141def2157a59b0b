"""The workload of a model: the operations, memory traffic and live memory of each module on one rank.

`tracing/trace.py` derives it from the model's code; `cost_model.py` converts it to seconds, `memory_model.py`
to bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Linear:
    """A quantity that is linear in the micro batch: `fixed` + `per_sequence` x number of sequences."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def at(self, micro_batch_size: int) -> float:
        """Return the value for a micro batch."""
        return self.fixed + self.per_sequence * micro_batch_size

    def times(self, factor: float) -> "Linear":
        """Return the quantity multiplied by a factor."""
        return Linear(self.fixed * factor, self.per_sequence * factor)


@dataclass(frozen=True)
class Operation:
    """One kernel, one group of fused kernels, or one collective of tensor or context parallelism.

    Args:
        kind: matmul or attention (limited by compute), memory (by bandwidth) or collective (by a link)
        name: torch's name; for a collective all_gather, reduce_scatter, all_reduce or all_to_all
        flops: multiplications and additions; attention counts those of a causal kernel, half of the square
        bytes: read plus written; for a collective those of the unsharded tensor, as in
            `parallel.simulate.collectives`
        dtype: of the operands or of the tensor sent
        head_dim: of attention: width of a head
        axis: of a collective: tp or cp
    """

    kind: Literal["matmul", "attention", "memory", "collective"]
    name: str
    flops: Linear
    bytes: Linear
    dtype: str
    head_dim: int = 0
    axis: str = ""


@dataclass(frozen=True)
class Phase:
    """A module's forward or backward (including recompute).

    `live_bytes`: bytes live at each moment that can be the peak. In a forward they are saved activations, the
    output and temporaries; in a backward saved activations that are not yet freed, gradients and temporaries.
    `fixed` parts are gradients of weights, `per_sequence` parts are activations. Weights are not counted.
    """

    operations: tuple[Operation, ...]
    live_bytes: tuple[Linear, ...]


Role = Literal["input", "output", "output_grad", "input_grad", "weight_grad", "inner"]


@dataclass(frozen=True)
class Buffer:
    """A tensor of a module and its lifetime.

    Args:
        role: input, output and their gradients, which other modules use too; gradients of weights; the rest
        begin, end: the first and the last kernel with the buffer; the forward's are numbered up to -1, the
            backward's from 1, and 0 is the time between them
    """

    role: Role
    size: Linear
    begin: int
    end: int


@dataclass(frozen=True)
class ModuleWorkload:
    """The workload of one module on one rank of tp and cp.

    Args:
        parameters: number of parameters
        forward, backward: the two phases
        saved_bytes: activations saved for the backward, including the input if the backward needs it
        output: bytes of the output
        weights: (rows, values per row) of each parameter in module order; sharding distributes rows
        float8: number of parameters that are multiplied in float8
        buffers: in the order in which they are allocated; empty if the module was run eagerly
        of_loss: live bytes, as in Phase, in the backward of a loss that is no part of the module, after which
            FSDP2 enters the module's unit
    """

    parameters: int
    forward: Phase
    backward: Phase
    saved_bytes: Linear
    output: Linear
    weights: tuple[tuple[int, int], ...] = ()
    float8: int = 0
    buffers: tuple[Buffer, ...] = ()
    of_loss: tuple[Linear, ...] = ()


def with_loss(logits: ModuleWorkload, loss: ModuleWorkload) -> ModuleWorkload:
    """Return the workload of a module that computes logits and of their loss, which is no part of it, has no
    weights, and takes the logits first."""
    forward, backward = (
        [total((logits.saved_bytes, live)) for live in phase.live_bytes]
        for phase in (loss.forward, loss.backward)
    )
    return replace(
        logits,
        forward=Phase(
            logits.forward.operations + loss.forward.operations,
            pareto_peaks([*logits.forward.live_bytes, *forward]),
        ),
        backward=replace(logits.backward, operations=loss.backward.operations + logits.backward.operations),
        saved_bytes=total((logits.saved_bytes, loss.saved_bytes)),
        output=loss.output,
        buffers=_around(logits.buffers, loss.buffers) if logits.buffers else (),
        of_loss=pareto_peaks(backward),
    )


def _around(outer: Iterable[Buffer], inner: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Return the buffers of two modules, of which the inner one runs between the outer's phases."""
    start, end = min(each.begin for each in inner), max(each.end for each in inner)

    def shift(time: int) -> int:
        return time + (start if time < 0 else end if time else 0)

    moved = [replace(each, begin=shift(each.begin), end=shift(each.end)) for each in outer]
    of_outer, of_inner = ({each.role: each for each in reversed(part)} for part in (moved, inner))
    result, given = of_outer["output"], of_inner["input"]
    result_grad, given_grad = of_outer["output_grad"], of_inner["input_grad"]
    between = replace(result, end=given.end), replace(given_grad, end=result_grad.end)
    both = [each for each in (*moved, *inner) if each not in (result, given, result_grad, given_grad)]
    both += [replace(each, role="inner") for each in between]
    return tuple(sorted(both, key=lambda each: each.begin))


@dataclass(frozen=True)
class MuonWorkload:
    """What Muon updates of a model; AdamW updates the rest.

    Args:
        shares: of each module's trained parameters; 0 if not listed
        blocks: (rows, columns) of the matrices that it orthogonalises, of each block
        dtype: in which they are exchanged and orthogonalised
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class ModelWorkload:
    """The workload of a model.

    Args:
        modules: by name, in the order of `Plan.modules`
        trained: share of each module's parameters that is trained; 1 if not listed
        seq_len: tokens per sequence, on all ranks of cp together
        logits: name of the module with the logits and the loss
        tables: bytes of the model's buffers and position tables
        moment_bytes: bytes per value of each of the optimizer's moments
        muon: what Muon updates
        saves: whether checkpoints are written from copies in host memory
        repeats: number of equal blocks that a block of a shortened model stands for; 1 if it is not listed
    """

    modules: Mapping[str, ModuleWorkload]
    trained: Mapping[str, float]
    seq_len: int
    logits: str
    tables: int
    moment_bytes: int = 4
    muon: MuonWorkload = MuonWorkload()
    saves: bool = False
    repeats: Mapping[str, int] = field(default_factory=dict)

    def moments(self, name: str) -> float:
        """Return the number of moments of a module's trained values: AdamW has two, Muon one."""
        return 2 - self.muon.shares.get(name, 0.0)

    def count(self, name: str) -> int:
        """Return the number of modules that a module stands for."""
        return self.repeats.get(name, 1)

    @cached_property
    def _frozen_first(self) -> frozenset[str]:
        """The modules before the first trained one: they have no backward and save no activations."""
        return frozenset(takewhile(lambda name: self.trained.get(name, 1.0) == 0, self.modules))

    def kind(self, name: str) -> tuple[int, float]:
        """Return what makes modules equal: the workload, which all blocks share, and the trained share."""
        return id(self.modules[name]), self.trained.get(name, 1.0)

    def has_backward(self, names: Iterable[str]) -> bool:
        """Whether any of these modules has a backward."""
        return not self._frozen_first.issuperset(names)


def total(sizes: Iterable[Linear]) -> Linear:
    """Return the sum."""
    fixed = per_sequence = 0.0
    for size in sizes:
        fixed, per_sequence = fixed + size.fixed, per_sequence + size.per_sequence
    return Linear(fixed, per_sequence)


def pareto_peaks(moments: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the moments that are the largest for some micro batch."""
    kept: list[Linear] = []
    for moment in sorted(set(moments), key=lambda m: (-m.per_sequence, -m.fixed)):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)
