"""The tensors of one rank: the bytes that are live now, by kind, and all allocations of a step in order, from
which the allocator's pools follow."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from meshwright.parallel.planner.allocator import STREAMS, Stream, StreamPool

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
