"""Whole matrices for their owners: which rank orthogonalises which matrix, and the two exchanges around it.

Every rank has a part of a matrix, as FSDP, tp and the blocks of a fused projection divide it. One packed
all-to-all over all ranks gives each owner its matrices, whole, and another gives every rank its parts of the
results. An owner gets the parts that the ranks of its own replica have; its results go to all replicas.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.model.owners import share_out
from meshwright.train.checkpoint.layout import Mesh, TensorPart, mesh_index, part_of
from meshwright.train.checkpoint.manifest import Sharding


@dataclass(frozen=True)
class Matrix:
    """A matrix: a region of a parameter.

    Args:
        name, shape, sharding: of the parameter
        region: of two dims, or of three with one expert
        cost: of its orthogonalisation, in operations
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    region: TensorPart
    cost: float


@dataclass(frozen=True)
class MatrixPiece:
    """What a rank has of a matrix that one owns.

    Args:
        other: with which of the two it is exchanged
        in_part: where it is in the part of the parameter that the rank has
        in_matrix: where in the matrix
    """

    matrix: Matrix
    other: int
    in_part: tuple[slice, ...]
    in_matrix: tuple[slice, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class MatrixExchange:
    """The exchange of matrices with their owners, as one rank takes part in it. Every rank must call it.

    Pieces are in the order of the other rank and then of the matrix, as an all-to-all sends them.

    Args:
        matrices: the same on all ranks
        dtype, device: of what is sent
    """

    def __init__(
        self, matrices: Sequence[Matrix], mesh: Mesh, rank: int, dtype: torch.dtype, device: str
    ) -> None:
        self.names = tuple(dict.fromkeys(matrix.name for matrix in matrices))
        self._ranks = math.prod(degree for _, degree in mesh)
        self._as_sent: dict[str, Any] = {"dtype": dtype, "device": device}
        owners = share_out([matrix.cost for matrix in matrices], self._ranks)
        by_owner = sorted(zip(owners, range(len(matrices)), strict=True))
        self.owned = [matrices[number] for owner, number in by_owner if owner == rank]
        parts = [_piece(matrices[number], owner, rank, mesh) for owner, number in by_owner]
        results = [
            _piece(matrix, other, other, mesh) for other in range(self._ranks) for matrix in self.owned
        ]
        self._parts, self._results = [p for p in parts if p.numel], [p for p in results if p.numel]
        self._given = [p for p in self._parts if _gives(p.matrix, rank, p.other, mesh)]
        self._got = [p for p in self._results if _gives(p.matrix, p.other, rank, mesh)]

    def to_owners(self, parts: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to give all owners their matrices. `parts`: what this rank has of each parameter. Returns a
        function that waits, and returns the matrices that this rank owns, each in the shape of its region."""
        sent = [parts[piece.matrix.name][piece.in_part] for piece in self._given]
        wait = self._begin(sent, self._given, self._got)

        def finish() -> list[Tensor]:
            received = wait()
            whole = [torch.empty(matrix.region.sizes, **self._as_sent) for matrix in self.owned]
            of = dict(zip(self.owned, whole, strict=True))
            for piece, values in zip(self._got, received, strict=True):
                of[piece.matrix][piece.in_matrix] = values
            return whole

        return finish

    def to_all(self, results: Sequence[Tensor]) -> Callable[[], list[tuple[MatrixPiece, Tensor]]]:
        """Begin to give all ranks their parts of the results, which are those of `owned`. Returns a function
        that waits, and returns those of this rank."""
        of = dict(zip(self.owned, results, strict=True))
        sent = [of[piece.matrix][piece.in_matrix] for piece in self._results]
        wait = self._begin(sent, self._results, self._parts)
        return lambda: [*zip(self._parts, wait(), strict=True)]

    def _begin(
        self, tensors: Sequence[Tensor], sent: Sequence[MatrixPiece], received: Sequence[MatrixPiece]
    ) -> Callable[[], list[Tensor]]:
        """Begin an all-to-all. Returns a function that waits, and returns what was received."""
        flat = [tensor.reshape(-1).to(**self._as_sent) for tensor in tensors]
        packed = torch.cat(flat) if flat else torch.empty(0, **self._as_sent)
        sizes = [piece.numel for piece in received]
        result, work = packed, None
        if self._ranks > 1:
            result = packed.new_empty(sum(sizes))
            get, give = _counts(received, self._ranks), _counts(sent, self._ranks)
            work = dist.all_to_all_single(result, packed, get, give, async_op=True)

        def wait() -> list[Tensor]:
            if work is not None:
                work.wait()
            pieces = zip(result.split(sizes), received, strict=True)
            return [values.view(piece.sizes) for values, piece in pieces]

        return wait


def _piece(matrix: Matrix, other: int, holder: int, mesh: Mesh) -> MatrixPiece:
    """Return what the holder has of a matrix."""
    part = part_of(matrix.shape, matrix.sharding, mesh, mesh_index(holder, mesh))
    common = part.overlap(matrix.region)
    return MatrixPiece(matrix, other, common.within(part), common.within(matrix.region), common.sizes)


def _gives(matrix: Matrix, source: int, owner: int, mesh: Mesh) -> bool:
    """Whether a rank gives an owner its part: of those that have the same one, the rank whose place on the
    axes that do not split the parameter is the owner's."""
    split = {axis for axis, _ in matrix.sharding}
    places = zip(mesh, mesh_index(source, mesh), mesh_index(owner, mesh), strict=True)
    return all(axis in split or of_source == of_owner for (axis, _), of_source, of_owner in places)


def _counts(pieces: Sequence[MatrixPiece], ranks: int) -> list[int]:
    """Return the number of values to or from each rank."""
    counts = [0] * ranks
    for piece in pieces:
        counts[piece.other] += piece.numel
    return counts
