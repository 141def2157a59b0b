"""Which values of a graph inductor computes in one kernel: an outline of its rules for GPUs
(torch/_inductor/ir.py and scheduler.py, torch 2.13).

A value that only fused kernels read is not stored, unless it is expensive to compute again: each of those
kernels computes it itself. Kernels of stored values are then joined: with the producers of what they read,
and with kernels that read the same tensors.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from torch.fx import Node

# config.realize_reads_threshold: a value with several users is stored if computing it reads more tensors
MOST_INLINED_READS = 4
# Limits of a kernel that sums over rows and over columns (MixOrderReduction.can_fuse, and
# config.triton.mix_order_reduction_max_reads).
MIXED_READS, MIXED_ROWS, MIXED_ELEMENTS = 10, 4096, 5 * 2**20


@dataclass(frozen=True)
class Loop:
    """The loop that computes a value.

    Args:
        elements: its iterations: for an elementwise operation the elements of the result
        results: elements of the result
        sums: the dimensions that a reduction removes: the first ones (rows) or others; "" for none
    """

    elements: int
    results: int
    sums: Literal["", "first", "others"] = ""


@dataclass(frozen=True)
class Value:
    """A tensor that a graph computes.

    Args:
        sources: the tensors that it is computed from
        loop: None for an operation that is never fused, such as a matmul
        stored: whether an operation that is never fused reads it, or the caller
        part_of: the operation with several results that computes it
    """

    sources: frozenset[Node]
    loop: Loop | None
    stored: bool
    part_of: Node | None = None


@dataclass(eq=False)
class Kernel:
    """Values computed together. `uses`: each value, in order, with the tensors that computing it reads;
    `reads`: tensors read from memory; `writes`: values that others read."""

    uses: dict[Node, set[Node]]
    reads: set[Node]
    loops: list[Loop]
    writes: set[Node] = field(default_factory=set)

    @property
    def nodes(self) -> list[Node]:
        """The values."""
        return [*self.uses]

    @property
    def elements(self) -> int:
        """The iterations of the longest loop."""
        return max(loop.elements for loop in self.loops)

    def sums(self, dims: str) -> list[Loop]:
        """Return the reductions of the first dimensions or of others."""
        return [loop for loop in self.loops if loop.sums == dims]


def fuse(values: Mapping[Node, Value], elements: Mapping[Node, int]) -> dict[Node, Kernel]:
    """Map every stored value to its kernel.

    Args:
        values: in an order in which they can be computed
        elements: of all tensors, computed or given
    """
    kernels: dict[Node, Kernel] = {}
    for node, reads in _stored_values(values).items():
        loop, part_of = values[node].loop, values[node].part_of
        kernels[node] = kernel = Kernel({node: reads}, reads, [loop] if loop else [])
        producers = dict.fromkeys(kernels[source] for source in sorted(reads) if source in kernels)
        for producer in sorted(producers, key=lambda each: -sum(elements[n] for n in each.nodes)):
            if producer.nodes[0] is part_of or (
                _can_follow(producer, kernel) and _is_independent(producer, kernel, kernels)
            ):
                kernel = _join(producer, kernel, kernels)
    _join_siblings(kernels, elements, _have_same_loop)
    _join_siblings(kernels, elements, _can_mix)
    return kernels


def _stored_values(values: Mapping[Node, Value]) -> dict[Node, set[Node]]:
    """Return the values that a kernel writes to memory, with the tensors that computing them reads."""
    users = Counter(source for value in values.values() for source in value.sources)
    stored, inlined = dict[Node, set[Node]](), dict[Node, set[Node]]()
    for node, value in values.items():
        reads = set[Node]().union(*(inlined.get(source, {source}) for source in value.sources))
        expensive = users[node] > 1 and len(reads) > MOST_INLINED_READS
        is_stored = value.stored or value.loop is None or value.loop.sums or expensive
        (stored if is_stored else inlined)[node] = reads
    return stored


def _can_follow(producer: Kernel, kernel: Kernel) -> bool:
    """Whether a kernel can be computed in its producer's loop: over the same elements, or over the results of
    the producer's reductions."""
    if not producer.loops or not kernel.loops or kernel.sums("first"):
        return False
    results = {loop.results for loop in producer.loops if loop.sums}
    return kernel.elements in results or (kernel.elements == producer.elements and not producer.sums("first"))


def _is_independent(first: Kernel, second: Kernel, kernels: Mapping[Node, Kernel]) -> bool:
    """Whether no other kernel must run after one of them and before the other."""
    return not (_is_between(first, second, kernels) or _is_between(second, first, kernels))


def _is_between(first: Kernel, last: Kernel, kernels: Mapping[Node, Kernel]) -> bool:
    """Whether `last` reads what another kernel computes from results of `first`."""
    waiting = [kernel for kernel in _producers(last, kernels) if kernel is not first]
    seen = set[Kernel]()
    while waiting:
        kernel = waiting.pop()
        if kernel is first:
            return True
        if kernel not in seen:
            seen.add(kernel)
            waiting += _producers(kernel, kernels)
    return False


def _producers(kernel: Kernel, kernels: Mapping[Node, Kernel]) -> set[Kernel]:
    return {kernels[source] for source in kernel.reads if source in kernels}


def _join_siblings(
    kernels: dict[Node, Kernel], elements: Mapping[Node, int], can_join: Callable[[Kernel, Kernel], bool]
) -> None:
    """Join pairs of kernels that `can_join` allows, that read the same large tensor, and of which neither
    depends on the other; those with the most in common first."""
    while True:
        pairs = {
            (first, second): shared
            for first, second in combinations(dict.fromkeys(kernels.values()), 2)
            if first.loops and second.loops and can_join(first, second)
            if (shared := _shared_elements(first, second, elements))
            if first not in _producers(second, kernels) and second not in _producers(first, kernels)
            if _is_independent(first, second, kernels)
        }
        if not pairs:
            return
        _join(*max(pairs, key=lambda pair: pairs[pair]), kernels)


def _shared_elements(first: Kernel, second: Kernel, elements: Mapping[Node, int]) -> int:
    """Return the elements of the tensors that both kernels read in full, one in each iteration."""
    return sum(elements[node] for node in first.reads & second.reads if elements[node] >= first.elements)


def _have_same_loop(first: Kernel, second: Kernel) -> bool:
    """Whether two kernels have equally long loops, and sum over the same rows if one does."""
    reduced = [{loop.results for loop in kernel.sums("first")} for kernel in (first, second)]
    return first.elements == second.elements and reduced[0] == reduced[1]


def _can_mix(first: Kernel, second: Kernel) -> bool:
    """Whether one kernel can sum over rows and the other over columns of the same tensor, in one kernel."""
    columns, rows = (first, second) if first.sums("first") else (second, first)
    of_columns, of_rows = columns.sums("first"), rows.sums("others")
    if not of_columns or not of_rows or rows.sums("first") or columns.elements != rows.elements:
        return False
    height, width = of_rows[0].results, of_columns[0].results
    return (
        height * width == rows.elements >= MIXED_ELEMENTS
        and height >= max(MIXED_ROWS, 2 * width)
        and len(first.reads | second.reads) <= MIXED_READS
    )


def _join(first: Kernel, second: Kernel, kernels: dict[Node, Kernel]) -> Kernel:
    """Add the second kernel to the first, and return it."""
    first.uses |= second.uses
    first.loops += second.loops
    first.reads = (first.reads | second.reads).difference(first.uses)
    kernels.update(dict.fromkeys(second.nodes, first))
    return first
