"""What one rank computes, moves and keeps for each module of a model: the planner's view of the model's code.

`tracing/trace.py` reads it from the code itself; `cost_model.py` turns it into seconds, `memory_model.py`
into bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Linear:
    """A quantity that grows with the micro batch: `fixed` + `per_sequence` for each of its sequences."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def at(self, micro_batch_size: int) -> float:
        return self.fixed + self.per_sequence * micro_batch_size

    def times(self, factor: float) -> "Linear":
        return Linear(self.fixed * factor, self.per_sequence * factor)


@dataclass(frozen=True)
class Operation:
    """One kernel, one fused group of them, or one tensor-parallel collective.

    Args:
        kind: what bounds it: matmul and attention by operations, memory by bandwidth, collective by a link
        name: torch's name; of a collective all_gather, reduce_scatter or all_reduce
        flops: multiplications and additions; attention's count what a causal kernel does, half of the square
        bytes: read and written; of a collective its full side, as in `parallel.simulate.collectives`
        dtype: of what is multiplied or sent
    """

    kind: Literal["matmul", "attention", "memory", "collective"]
    name: str
    flops: Linear
    bytes: Linear
    dtype: str


@dataclass(frozen=True)
class Phase:
    """A module's forward or backward (recomputation included).

    `live_bytes`: bytes that it holds at its moments, only the moments that can be the fullest. A forward's
    count what it keeps, its output, and what passes; a backward's what the forward kept and is not yet freed,
    gradients, and what passes. `fixed` parts are gradients of weights, `per_sequence` parts are activations.
    Weights are in neither.
    """

    operations: tuple[Operation, ...]
    live_bytes: tuple[Linear, ...]


@dataclass(frozen=True)
class ModuleWorkload:
    """One module on one tp rank: its number of parameters, its two phases, the `saved_bytes` that the forward
    keeps for the backward (with its input, where it needs that), and those of its `output`.

    `weights`: rows, and values of a row, of each of its parameters, in its own order: sharding deals out
    rows. `float8`: how many of the parameters are multiplied in float8.
    """

    parameters: int
    forward: Phase
    backward: Phase
    saved_bytes: Linear
    output: Linear
    weights: tuple[tuple[int, int], ...] = ()
    float8: int = 0

    @property
    def float8_share(self) -> float:
        """Of the products with weights what is in float8."""
        return self.float8 / max(1, sum(rows * values for rows, values in self.weights if values > 1))


@dataclass(frozen=True)
class ModelWorkload:
    """A model's work, for sequences of `seq_len` tokens.

    `modules`: by name, in the order of `Plan.modules`. `trained`: the share of each one's parameters that is
    trained, where it is not all of them. `logits`: the module that makes the logits and their loss. `tables`:
    bytes of the model's buffers. `moment_bytes`: of one value of one of the optimizer's two moments.
    """

    modules: Mapping[str, ModuleWorkload]
    trained: Mapping[str, float]
    seq_len: int
    logits: str
    tables: int
    moment_bytes: int = 4

    @cached_property
    def _frozen_first(self) -> frozenset[str]:
        """The modules before the first one that is trained: they have no backward, and keep nothing for
        one."""
        return frozenset(takewhile(lambda name: self.trained.get(name, 1.0) == 0, self.modules))

    def has_backward(self, names: Iterable[str]) -> bool:
        """Whether any of these modules has a backward."""
        return not self._frozen_first.issuperset(names)

    def shortened(self, seq_len: int) -> "ModelWorkload":
        """What it holds for other sequences: activations are in proportion to tokens. What it does stays as
        it was."""
        share = seq_len / self.seq_len
        alike = {id(work): _shortened(work, share) for work in self.modules.values()}
        modules = {name: alike[id(work)] for name, work in self.modules.items()}
        return replace(self, modules=modules, seq_len=seq_len)


def _shortened(work: ModuleWorkload, share: float) -> ModuleWorkload:
    def shorter(size: Linear) -> Linear:
        return replace(size, per_sequence=size.per_sequence * share)

    forward, backward = (
        replace(phase, live_bytes=tuple(map(shorter, phase.live_bytes)))
        for phase in (work.forward, work.backward)
    )
    return replace(
        work,
        forward=forward,
        backward=backward,
        saved_bytes=shorter(work.saved_bytes),
        output=shorter(work.output),
    )


def total(sizes: Iterable[Linear]) -> Linear:
    """The sum."""
    fixed = per_sequence = 0.0
    for size in sizes:
        fixed, per_sequence = fixed + size.fixed, per_sequence + size.per_sequence
    return Linear(fixed, per_sequence)


def pareto_peaks(moments: Iterable[Linear]) -> tuple[Linear, ...]:
    """Those that are the largest for some micro batch."""
    kept: list[Linear] = []
    for moment in sorted(set(moments), key=lambda m: (-m.per_sequence, -m.fixed)):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)
