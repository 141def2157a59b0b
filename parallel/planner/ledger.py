"""The tensors of one rank: the bytes that are live now, by kind, and all allocations of a step in order, from
which the memory follows that torch's caching allocator reserves on a GPU: every CUDA stream has a pool of its
own."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Literal, NamedTuple, get_args

Stream = Literal["compute", "all_gather", "reduce_scatter", "all_reduce"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
ALIGNMENT_BYTES = 512  # kMinBlockSize: sizes are rounded up to it
PAGE_BYTES = 20 * 2**20  # kLargeBuffer: a pool grows by multiples of it
KEPT = "kept"  # the group of tensors that no step frees
STEPS = 2  # the second still finds gaps that the first has made; later ones repeat it


class _Call(NamedTuple):
    """One call of a Ledger. `stream`: of new tensors; None if the group's tensors are moved `into` another
    group, or freed."""

    stream: Stream | None
    group: Hashable
    sizes: tuple[int, ...] = ()
    into: Hashable = None


class _Counted(NamedTuple):
    """Live bytes of one kind of MemoryBreakdown, and the stream that allocated them."""

    kind: str
    size: float
    stream: Stream


class Ledger:
    """Tensors in groups, by any key.

    Tensors without a `kind` are allocated, but are not in `live`: those inside of a module, whose trace has
    their sum at every moment. `count` adds such a sum to `live`.
    """

    def __init__(self) -> None:
        self.live: defaultdict[str, float] = defaultdict(float)  # bytes by kind
        self._counted: defaultdict[Hashable, list[_Counted]] = defaultdict(list)
        self._calls: list[_Call] = []

    def hold(self, stream: Stream, group: Hashable, *sizes: float, kind: str = "") -> None:
        """Allocate tensors, and add them to a group. Those in the group KEPT are never freed."""
        self._calls.append(_Call(stream, group, tuple(int(size) for size in sizes if size >= 1)))
        if kind:
            self.count(kind, group, sum(sizes), stream)

    def count(self, kind: str, group: Hashable, size: float, stream: Stream = "compute") -> None:
        """Add bytes to a kind, as long as the group exists."""
        self.live[kind] += size
        self._counted[group].append(_Counted(kind, size, stream))

    def drop(self, *groups: Hashable) -> None:
        """Free the tensors of groups, if there are any."""
        for group in groups:
            self._calls.append(_Call(None, group))
            for counted in self._counted.pop(group, ()):
                self.live[counted.kind] -= counted.size

    def move(self, group: Hashable, into: Hashable, kind: str = "") -> None:
        """Add a group's tensors to another group, and what of them is counted to another kind."""
        self._calls.append(_Call(None, group, (), into))
        for counted in self._counted.pop(group, ()):
            self.live[counted.kind] -= counted.size
            self.count(kind or counted.kind, into, counted.size, counted.stream)

    def repeat(self, owner: Hashable, others: Iterable[Hashable], states: Iterable[str]) -> None:
        """Let each of the others have what an owner has in these states, in groups (owner, state): of what is
        counted one tensor for each state and kind. The states change in their order."""
        sizes: dict[str, defaultdict[tuple[Stream, str], float]] = {}
        for state in states:
            sizes[state] = defaultdict(float)
            for counted in self._counted.get((owner, state), ()):
                sizes[state][counted.stream, counted.kind] += counted.size
        for other in others:
            for state, of_state in sizes.items():
                if (other, state) in self._counted:
                    self.drop((other, state))
                for (stream, kind), size in of_state.items():
                    self.hold(stream, (other, state), size, kind=kind)

    def reserved_bytes(self) -> dict[str, int]:
        """Return the size of each stream's pool after STEPS steps."""
        pools = {stream: StreamPool() for stream in STREAMS}
        groups: dict[Hashable, list[tuple[StreamPool, int]]] = defaultdict(list)
        for step in range(STEPS):
            for call in self._calls:
                if call.stream is None:
                    tensors = groups.pop(call.group, [])
                    if call.into is not None:
                        groups[call.into] += tensors
                        continue
                    for pool, address in tensors:
                        pool.free(address)
                elif call.group is not KEPT or step == 0:
                    pool = pools[call.stream]
                    groups[call.group] += [(pool, pool.allocate(size)) for size in call.sizes]
            for group in [group for group in groups if group is not KEPT]:
                for pool, address in groups.pop(group):
                    pool.free(address)
        return {stream: pool.reserved_bytes for stream, pool in pools.items()}


class StreamPool:
    """One pool with expandable segments: a range of addresses that only grows. A tensor is placed in the
    smallest gap that is large enough; if there is none, the range grows at its end.

    The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13): get_free_block and
    try_allocate_expandable_block. Tensors under 1 MiB, which have separate pages, are placed like others.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._sizes: dict[int, int] = {}  # of the tensors, by address
        self._gaps: list[tuple[int, int]] = []  # (size, address), sorted
        self._gap_sizes: dict[int, int] = {}  # by address
        self._gap_ending: dict[int, int] = {}  # address of a gap by its end

    def allocate(self, size: int) -> int:
        """Place a tensor; return its address."""
        size = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        address = self._find_gap(size)
        gap = self._remove_gap(address)
        self._sizes[address] = size
        if gap > size:
            self._add_gap(address + size, gap - size)
        return address

    def free(self, address: int) -> None:
        """Free the tensor at an address."""
        size = self._sizes.pop(address)
        if address + size in self._gap_sizes:
            size += self._remove_gap(address + size)
        if (before := self._gap_ending.get(address)) is not None:
            address, size = before, size + self._remove_gap(before)
        self._add_gap(address, size)

    def _find_gap(self, size: int) -> int:
        """Return the address of the smallest sufficient gap, last the one at the end, which can grow."""
        end = self.reserved_bytes
        for position in range(bisect_left(self._gaps, (size, 0)), len(self._gaps)):
            gap, address = self._gaps[position]
            if address + gap < end:
                return address
        last = self._gap_ending.get(end, end)
        if end - last < size:
            self.reserved_bytes += -(-(size - end + last) // PAGE_BYTES) * PAGE_BYTES
            if last < end:
                self._remove_gap(last)
            self._add_gap(last, self.reserved_bytes - last)
        return last

    def _add_gap(self, address: int, size: int) -> None:
        insort(self._gaps, (size, address))
        self._gap_sizes[address] = size
        self._gap_ending[address + size] = address

    def _remove_gap(self, address: int) -> int:
        size = self._gap_sizes.pop(address)
        del self._gaps[bisect_left(self._gaps, (size, address))], self._gap_ending[address + size]
        return size
