"""The simulated caching allocator: where tensors are placed, and how much each stream's pool reserves."""

import itertools
import random

import pytest

from meshwright.parallel.planner.ledger import ALIGNMENT_BYTES, KEPT, PAGE_BYTES, Ledger, StreamPool

MIB = 2**20


def filled(*sizes: int) -> tuple[StreamPool, list[int]]:
    """A pool with tensors, and their addresses."""
    pool = StreamPool()
    return pool, [pool.allocate(size) for size in sizes]


def test_sizes_are_rounded_to_512_bytes_and_the_pool_to_pages_of_20_mib() -> None:
    pool, addresses = filled(1, 513, 1024)
    assert addresses == [0, 512, 1536]
    assert pool.reserved_bytes == PAGE_BYTES == 20 * MIB
    assert pool.allocate(50 * MIB) == 2560
    assert pool.reserved_bytes == 60 * MIB, "only what the gap at the end lacks is added"


def test_the_smallest_sufficient_gap_is_taken_and_the_one_at_the_end_last() -> None:
    pool, (first, _, second, _, third, _) = filled(*(size * MIB for size in (8, 1, 6, 1, 4, 1)))
    for address in (first, second, third):
        pool.free(address)
    reserved = pool.reserved_bytes
    assert pool.allocate(5 * MIB) == second, "not the first gap of 8 MiB"
    assert pool.allocate(7 * MIB) == first
    assert pool.allocate(2 * MIB) == third
    assert pool.allocate(19 * MIB) == 21 * MIB, "no gap is left: at the end, where 19 MiB are free"
    assert pool.reserved_bytes == reserved


def test_memory_that_is_free_but_in_pieces_is_no_help() -> None:
    """The head of a language model: gathered weights, their gradient, logits. The buffer of the gradient's
    reduction is as large as the two others together, but the gradient is between them."""
    pool, (weights, _, logits) = filled(100 * MIB, 100 * MIB, 60 * MIB)
    pool.free(weights)
    pool.free(logits)
    assert pool.allocate(160 * MIB) == 200 * MIB
    assert pool.reserved_bytes == 360 * MIB, "100 MiB are not used"


def test_random_tensors_never_overlap_and_all_gaps_are_found_again() -> None:
    chance, pool = random.Random(5), StreamPool()
    live: dict[int, int] = {}
    for _ in range(3000):
        if live and chance.random() < 0.5:
            address = chance.choice(list(live))
            pool.free(address)
            del live[address]
        else:
            size = chance.choice((1000, MIB, chance.randrange(1, 50 * MIB)))
            live[pool.allocate(size)] = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        in_order = sorted(live.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(in_order))
        assert all(a + size <= pool.reserved_bytes for a, size in in_order)
    reserved = pool.reserved_bytes
    for address in live:
        pool.free(address)
    assert pool.allocate(reserved) == 0
    assert pool.reserved_bytes == reserved


def test_each_stream_has_its_own_pool_and_memory_of_another_is_no_help() -> None:
    ledger = Ledger()
    ledger.hold("compute", "a", 20 * MIB)
    ledger.drop("a")
    ledger.hold("all_gather", "b", 40 * MIB)
    ledger.hold("all_gather", "b", 40 * MIB)
    pools = {"compute": 20 * MIB, "all_gather": 80 * MIB, "reduce_scatter": 0, "all_reduce": 0}
    assert ledger.reserved_bytes() == pools


@pytest.mark.parametrize(("group", "reserved"), [(KEPT, 60), ("other", 40)])
def test_what_is_kept_is_in_the_way_in_the_next_step(group: str, reserved: int) -> None:
    """It is placed where the first step has freed a tensor, so the second step's is placed elsewhere."""
    ledger = Ledger()
    ledger.hold("compute", "first", 40 * MIB)
    ledger.drop("first")
    ledger.hold("compute", group, 1 * MIB)
    assert ledger.reserved_bytes()["compute"] == reserved * MIB
