"""The memory that torch's caching allocator reserves on a GPU: every CUDA stream has a pool of its own."""

from bisect import bisect_left, insort
from typing import Literal, get_args

Stream = Literal["compute", "all_gather", "reduce_scatter", "all_reduce"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
ALIGNMENT_BYTES = 512  # kMinBlockSize: sizes are rounded up to it
PAGE_BYTES = 20 * 2**20  # kLargeBuffer: a pool grows by multiples of it


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
