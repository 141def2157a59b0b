"""The tensors of one rank: the bytes that are live now, by kind, and all allocations of a step in order, from
which the memory follows that torch's caching allocator reserves on a GPU: every CUDA stream has a pool of its
own. `ModuleTensors` writes those inside of a module's forward and backward, in order."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple, get_args

from meshwright.parallel.planner.workload import Buffer, Linear, ModelWorkload, ModuleWorkload, total

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


PASSING = "passing"  # the group of the hidden states between two modules, or of their gradient
RESULT = "result"  # the group of what becomes PASSING at the module's end
MOST_PIECES = 256  # of the activations of a module that was traced eagerly


class _Change(NamedTuple):
    """A buffer of a module that is allocated or freed. `saved`: the backward uses it too."""

    number: int
    role: str
    size: int
    frees: bool
    saved: bool


class ModuleTensors:
    """Writes the tensors of modules' forwards and backwards into a ledger; all are on the compute stream."""

    def __init__(self, ledger: Ledger, work: ModelWorkload, micro_batch_size: int) -> None:
        self._ledger, self._work, self._sequences = ledger, work, micro_batch_size
        self._given = {after: work.modules[name].output for name, after in pairwise(work.modules)}
        self._largest_output = max(module.output.at(micro_batch_size) for module in work.modules.values())
        self._changes: dict[tuple[int, int], tuple[list[_Change], list[_Change]]] = {}

    def given(self, name: str) -> Linear:
        """Return the bytes of a module's input, the output of the module before."""
        return self._given.get(name, Linear())

    def forward(self, name: str) -> None:
        """Run a module's forward. Without a backward it keeps no tensor but its result."""
        ledger = self._ledger
        for change in self._changes_of(name)[0]:
            group = (name, change.number)
            if change.role == "input":
                if change.saved:
                    ledger.move(PASSING, group)
            elif not change.frees:
                ledger.hold("compute", RESULT if change.role == "output" else group, change.size)
            elif change.role != "output":
                ledger.drop(group)
        ledger.drop(PASSING)
        ledger.move(RESULT, PASSING)
        if not self._work.has_backward((name,)):
            self.release(name)

    def release(self, name: str) -> None:
        """Free the tensors that a module has saved for its backward."""
        self._ledger.drop(*((name, change.number) for change in self._saved(name)))

    def restore(self, name: str) -> None:
        """Allocate the tensors that a module has saved for its backward again."""
        for change in self._saved(name):
            self._ledger.hold("compute", (name, change.number), change.size)

    def backward(self, name: str, weight_gradients: Hashable) -> None:
        """Run a module's backward. `weight_gradients`: the group of the gradients of its weights."""
        ledger = self._ledger
        groups = {"weight_grad": weight_gradients, "input_grad": RESULT, "output_grad": PASSING}
        for change in self._changes_of(name)[1]:
            group = groups.get(change.role, (name, change.number))
            if not change.frees:
                ledger.hold("compute", group, change.size)
            elif change.saved and change.role in groups:  # a gradient that the forward has computed
                ledger.move((name, change.number), group)
            elif group not in (weight_gradients, RESULT):
                ledger.drop(group)
        ledger.drop(PASSING)
        ledger.move(RESULT, PASSING)

    def _saved(self, name: str) -> list[_Change]:
        return [change for change in self._changes_of(name)[0] if change.saved and not change.frees]

    def _changes_of(self, name: str) -> tuple[list[_Change], list[_Change]]:
        """Return the changes in a module's forward and in its backward, in order."""
        module, given = self._work.modules[name], self.given(name)
        if (key := (id(module), int(given.at(self._sequences)))) not in self._changes:
            buffers = module.buffers or _estimate_buffers(
                module, given, self._sequences, self._largest_output
            )
            self._changes[key] = _changes(buffers, self._sequences)
        return self._changes[key]


def _changes(buffers: Sequence[Buffer], sequences: int) -> tuple[list[_Change], list[_Change]]:
    timed = [
        (time, frees, number, buffer.begin < 0 <= buffer.end)
        for number, buffer in enumerate(buffers)
        for frees, time in ((False, buffer.begin), (True, buffer.end))
        if frees or buffer.role != "output_grad"  # the next module's backward has allocated it
    ]
    phases: tuple[list[_Change], list[_Change]] = ([], [])
    for time, frees, number, saved in sorted(timed):
        role, size = buffers[number].role, int(buffers[number].size.at(sequences))
        phases[time >= 0].append(_Change(number, role, size, frees, saved))
    return phases


def _estimate_buffers(
    module: ModuleWorkload, given: Linear, sequences: int, piece: float
) -> tuple[Buffer, ...]:
    """Return the buffers of a module that was traced eagerly: of activations only the sum is known, so they
    are in pieces of the size of a hidden state.

    Args:
        given: bytes of the module's input
        piece: bytes of a hidden state
    """

    def pieces(size: Linear) -> list[Linear]:
        amount = max(0.0, size.per_sequence * sequences)
        each = max(piece, amount / MOST_PIECES, 1.0)
        count, rest = divmod(amount, each)
        return [Linear(part) for part in (max(0.0, size.fixed), *[each] * int(count), rest) if part]

    def peak(moments: Sequence[Linear], *others: Linear) -> list[Linear]:
        largest = max(moments, key=lambda moment: moment.at(sequences), default=Linear())
        return pieces(total((largest, *(other.times(-1) for other in others))))

    saves_input = module.saved_bytes.at(sequences) >= given.at(sequences)
    saved = total((module.saved_bytes, given.times(-1))) if saves_input else module.saved_bytes
    gradients = max((moment.fixed for moment in module.backward.live_bytes), default=0.0)
    weights = list(map(prod, module.weights)) or [1]
    # a module without parameters of its own, such as an embedding with tied weights, adds to a gradient
    role, end = ("weight_grad", 4) if module.parameters else ("inner", 3)
    return (
        Buffer("input", given, -3, 2 if saves_input else -1),
        *(Buffer("inner", size, -2, 2) for size in pieces(saved)),
        Buffer("output", module.output, -2, -1),
        *(
            Buffer("inner", size, -1, -1)
            for size in peak(module.forward.live_bytes, given, saved, module.output)
        ),
        Buffer("output_grad", module.output, 0, 3),
        *(
            Buffer("inner", size, 1, 1)
            for size in peak(module.backward.live_bytes, module.saved_bytes, module.output)
        ),
        *(Buffer(role, Linear(gradients * weight / sum(weights)), 3, end) for weight in weights),  # type: ignore[arg-type]
        Buffer("input_grad", given, 3, 4),
    )
