"""What a process of a check computed: tensors by the moment, what they are and their names, and how the ranks
of a mesh share the batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.parallel.plan.schema import AXES, MeshPlan

DATA_AXES = AXES[:2]  # whose ranks get different rows; the others get the same ones
START = "after sharding"


@dataclass(frozen=True)
class Seen:
    """Which tensor. `moment`: such as "step 1, micro batch 2"; `what`: value, change, buffer, output,
    gradient or loss; `name`: of the parameter or buffer, or the output's number."""

    moment: str
    what: str
    name: str

    def __str__(self) -> str:
        of = " of " if self.what in ("gradient", "value", "change") else " "
        return f"{self.what}{of}{self.name}"


@dataclass
class RankRecord:
    """What one rank recorded, or the unsharded twin.

    Args:
        tensors: whole ones as far as torch knows: DTensors are gathered, plain ones are this rank's
        of_rank: of the twin: the outputs, by the index of a data-parallel rank
        factor: of the twin: which all gradients of the ranks have in common; a fault in a loop of theirs
        parts: of the twin: each part of a gradient, [data-parallel ranks, micro batches, *shape]
        tied: names of one parameter, those after the first by the first
        frozen: parameters without a gradient
        whole: whether the rank holds every parameter whole
        hint: what to look at first if something differs
        notes: what was not run so
        tolerances: of the twin: of the changes of parameters by an optimizer of the caller's
        rule: of the twin: that rule in words
        last: the values at the last look
    """

    tensors: dict[Seen, Tensor | None] = field(default_factory=dict)
    of_rank: dict[tuple[int, Seen], Tensor] = field(default_factory=dict)
    factor: float = 1.0
    parts: dict[Seen, Tensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    whole: bool = True
    hint: str = ""
    notes: tuple[str, ...] = ()
    tolerances: Mapping[str, float] = field(default_factory=dict)
    rule: str = ""
    last: dict[str, Tensor] = field(default_factory=dict)

    def of(self, moment: str, what: str) -> dict[str, Tensor | None]:
        """Return the tensors of a moment by name."""
        wanted = (moment, what)
        return {seen.name: t for seen, t in self.tensors.items() if (seen.moment, seen.what) == wanted}


def data_rank(mesh: MeshPlan, rank: int) -> int:
    """Return the index of a rank's rows: 0 .. data_parallel - 1."""
    return rank // (mesh.cp * mesh.tp)


def groups_over(mesh: MeshPlan, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the groups of ranks that differ only in their positions on these axes."""
    ranks = torch.arange(mesh.world_size).view([getattr(mesh, axis) for axis in AXES])
    grouped = ranks.permute(sorted(range(len(AXES)), key=lambda dim: AXES[dim] in axes))
    found: list[list[int]] = grouped.reshape(-1, math.prod(getattr(mesh, axis) for axis in axes)).tolist()
    return found
