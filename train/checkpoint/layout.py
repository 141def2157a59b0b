"""Which part of which tensor is in which rank's file: a pure function of shapes, shardings and mesh.

The manifest contains all three, so ranks that read compute the layout as the ranks that wrote did, without
communication and without opening a file. Random states are not split: each is in the file of its rank.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from meshwright.train.checkpoint.manifest import DTYPES, SavedTensor, Sharding

RANDOM = "random."  # of the names of random states, which end with the rank
STATE = "hook."  # begins the names of tensors that are the state of hooks
# Of several ranks with the same part one writes it. Ranks share the larger parts; all smaller ones are in the
# first rank's file, so that few files have to be opened for them.
SMALL_BYTES = 2**20
Mesh = tuple[tuple[str, int], ...]  # axes with their degrees, outermost first: ranks are in row-major order


@dataclass(frozen=True)
class TensorPart:
    """A block of a tensor: its first index and its size along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: "TensorPart") -> "TensorPart":
        """Return the elements in both; with a size of 0 if there are none."""
        blocks = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ranges = [(max(a, b), min(a + size_a, b + size_b)) for a, size_a, b, size_b in blocks]
        return TensorPart(
            tuple(start for start, _ in ranges), tuple(max(0, stop - start) for start, stop in ranges)
        )

    def within(self, outer: "TensorPart") -> tuple[slice, ...]:
        """Return the slices of these elements in a tensor that contains `outer`."""
        blocks = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(start - first, start - first + size) for start, size, first in blocks)


def whole(shape: Sequence[int]) -> TensorPart:
    """Return the part that is the full tensor."""
    return TensorPart((0,) * len(shape), tuple(shape))


@cache
def part_of(shape: tuple[int, ...], sharding: Sharding, mesh: Mesh, index: tuple[int, ...]) -> TensorPart:
    """Return the part of a tensor that the rank with this index along each mesh axis has."""
    degrees, position = dict(mesh), {axis: i for (axis, _), i in zip(mesh, index, strict=True)}
    ranges = [(0, size) for size in shape]
    for axis, dim in sharding:
        ranges[dim] = _chunk(*ranges[dim], degrees[axis], position[axis])
    return TensorPart(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))


def _chunk(start: int, stop: int, degree: int, index: int) -> tuple[int, int]:
    """Return one of `degree` parts of a range, as of torch.chunk: equal, the last ones smaller or empty."""
    size = -(-(stop - start) // degree)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


@dataclass(frozen=True)
class CheckpointLayout:
    """The files of a checkpoint whose tensors, in this order, were saved on this mesh."""

    tensors: Mapping[str, SavedTensor]
    mesh: Mesh

    @cached_property
    def _turns(self) -> dict[str, int]:
        """Which of the ranks with the same part of a tensor writes it: the one with the fewest bytes so far,
        as most parts of a model come three times, with their moments, and differ in size."""
        turns, loads = dict[str, int](), dict[Sharding, list[tuple[int, int]]]()
        for name, tensor in self.tensors.items():
            if name.startswith(RANDOM):
                continue
            if (sharding := tensor.sharding) not in loads:
                loads[sharding] = [(0, turn) for turn in range(len(_holders(sharding, self.mesh)))]
            heap = loads[sharding]
            written, turns[name] = heap[0]
            heapq.heapreplace(heap, (written + tensor.size_bytes, turns[name]))
        return turns

    def written_by(self, rank: int) -> dict[str, TensorPart]:
        """Return the part of each tensor that a rank writes; without random states and empty parts."""
        index, parts = mesh_index(rank, self.mesh), {}
        for name, tensor in self.tensors.items():
            if name.startswith(RANDOM):
                continue
            part = part_of(tensor.shape, tensor.sharding, self.mesh, index)
            first = _first_holder(rank, tensor.sharding, self.mesh)
            if part.numel and self._writer(name, part, first) == rank:
                parts[name] = part
        return parts

    def stored(self, name: str, wanted: TensorPart) -> list[tuple[int, TensorPart]]:
        """Return the written parts of a tensor that overlap `wanted`, each with the rank that wrote it."""
        tensor = self.tensors[name]
        if name.startswith(RANDOM):
            return [(int(name.rpartition(".")[2]), whole(tensor.shape))]
        parts = _overlapping(tensor.shape, tensor.sharding, self.mesh, wanted)
        return [(self._writer(name, part, first), part) for first, part in parts]

    def _writer(self, name: str, part: TensorPart, first: int) -> int:
        """Return the rank that writes a part, of all that have it. `first`: the first of these."""
        tensor = self.tensors[name]
        if part.numel * DTYPES[tensor.dtype][1] < SMALL_BYTES:
            return first
        others = _holders(tensor.sharding, self.mesh)
        return first + others[self._turns[name]]


def mesh_index(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Return the index of a rank along each axis."""
    return tuple(rank // stride % degree for (_, degree), stride in zip(mesh, _strides(mesh), strict=True))


def _strides(mesh: Mesh) -> list[int]:
    """Return by how much the rank grows along each axis."""
    return [math.prod(degree for _, degree in mesh[place + 1 :]) for place in range(len(mesh))]


@cache
def _first_holder(rank: int, sharding: Sharding, mesh: Mesh) -> int:
    """Return the first of the ranks that have the same part of a tensor as `rank`."""
    axes = zip(mesh, _strides(mesh), mesh_index(rank, mesh), strict=True)
    split = {axis for axis, _ in sharding}
    return sum(stride * index for (axis, _), stride, index in axes if axis in split)


@cache
def _holders(sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Return the distances of the ranks that have the same part to the first of them, in order."""
    axes, split = zip(mesh, _strides(mesh), strict=True), {axis for axis, _ in sharding}
    steps = [range(0, stride * degree, stride) for (axis, degree), stride in axes if axis not in split]
    return tuple(map(sum, itertools.product(*steps)))


@cache
def _overlapping(
    shape: tuple[int, ...], sharding: Sharding, mesh: Mesh, wanted: TensorPart
) -> tuple[tuple[int, TensorPart], ...]:
    """Return the parts of a tensor that overlap `wanted`, each with the first rank that has it."""
    ranges = []
    for dim, size in enumerate(shape):
        start, stop = wanted.offsets[dim], wanted.offsets[dim] + wanted.sizes[dim]
        chunks = _chunks(size, tuple(axis for axis, split in sharding if split == dim), mesh)
        ranges.append([chunk for chunk in chunks if chunk[1] < stop and start < chunk[2]])
    parts = []
    for block in itertools.product(*ranges):
        offsets, sizes = (start for _, start, _ in block), (stop - start for _, start, stop in block)
        parts.append((sum(rank for rank, _, _ in block), TensorPart(tuple(offsets), tuple(sizes))))
    return tuple(parts)


@cache
def _chunks(size: int, axes: tuple[str, ...], mesh: Mesh) -> list[tuple[int, int, int]]:
    """Split a dim by axes: share in the rank's number, start and stop of each chunk that is not empty."""
    strides, degrees = {axis: s for (axis, _), s in zip(mesh, _strides(mesh), strict=True)}, dict(mesh)
    chunks = [(0, 0, size)]
    for axis in axes:
        chunks = [
            (rank + index * strides[axis], *_chunk(start, stop, degrees[axis], index))
            for rank, start, stop in chunks
            for index in range(degrees[axis])
        ]
    return [chunk for chunk in chunks if chunk[1] < chunk[2]]
