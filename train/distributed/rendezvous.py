"""Rendezvous: the ranks of one start find each other in a store that may have entries of earlier starts, and
exchange one fact each."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from meshwright.train.distributed.ranks import as_ranges
from meshwright.train.errors import PeerLostError

STARTS = "starts"  # how often a rank 0 has started
COMPLETE, SUPERSEDED = "complete ", "superseded"
READ_S = 3.0  # for reading a verdict; shorter than exit.PRINT_FIRST_S


def rendezvous(
    store: Store, rank: int, world_size: int, fact: str, judge: Callable[[Sequence[str]], str]
) -> tuple[Store, str]:
    """Wait until all ranks have come. Return the store with a key prefix that is new for this start, and the
    verdict of rank 0: `judge` of the facts of all ranks in order. Both are equal on all ranks. Raises
    PeerLostError after the store's timeout.

    torchrun (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py) keeps one store for its workers over all
    restarts, and the entries of dead processes remain in it: gloo would connect to addresses where no process
    listens. TORCHELASTIC_RESTART_COUNT cannot be the prefix, because each node counts only its own failures.

    Each rank 0 therefore takes a new number, which no other start in this store has, and ends the unfinished
    starts before it. The others write their facts under the newest number and wait for its end: complete,
    with the verdict, or superseded, after which they wait for the next number.

    Another rank than 0 needs 4 to 6 operations, whatever the world size: nothing is polled.
    """
    try:
        if rank == 0:
            start, verdict = _lead(store, world_size, fact, judge)
        else:
            start, verdict = _follow(store, rank, fact)
    except DistStoreError as error:
        raise PeerLostError(_explain_timeout(store, rank, world_size)) from error
    return PrefixStore(f"start {start}", store), verdict


def _lead(store: Store, world_size: int, fact: str, judge: Callable[[Sequence[str]], str]) -> tuple[int, str]:
    """Rank 0: return the number of this start, and the verdict."""
    start = store.add(STARTS, 1)
    for earlier in range(start - 1, 0, -1):
        store.set(f"{earlier}/started", "")  # its rank 0 may have died before it did this
        if _end(store, earlier, SUPERSEDED) != SUPERSEDED:
            break  # complete, and so are those before it, or superseded
    store.set(f"{start}/started", "")
    verdict = judge([fact, *_read_all(store, [_key(start, peer) for peer in range(1, world_size)])])
    if _end(store, start, COMPLETE + verdict) == SUPERSEDED:
        raise PeerLostError("a newer start of this run has replaced this process, which ends")
    return start, verdict


def _follow(store: Store, rank: int, fact: str) -> tuple[int, str]:
    """Another rank: return the number of the start that completed with this process, and the verdict."""
    start = store.add(STARTS, 0)
    while True:
        # A start that has ended ended without this process.
        if start and not store.check([f"{start}/end"]):
            store.set(_key(start, rank), fact)
            end = store.get(f"{start}/end").decode()  # waits for it
            if end != SUPERSEDED:
                return start, end.removeprefix(COMPLETE)
        start += 1
        store.wait([f"{start}/started"])


def _key(start: int, rank: int) -> str:
    return f"{start}/fact/{rank}"


def _end(store: Store, start: int, end: str) -> str:
    """Set the end of a start unless it has one; return the one it has."""
    key = f"{start}/end"
    first: str = store.compare_set(key, "", end).decode()
    # compare_set does not wake waiting clients in the TCPStore without libuv (torch 2.11 to 2.13)
    store.set(key, first)
    return first


def _read_all(store: Store, keys: Sequence[str]) -> list[str]:
    """Wait for the keys and return their values, in two round trips."""
    if not keys:
        return []
    return [value.decode() for value in store.multi_get(list(keys))]


def _explain_timeout(store: Store, rank: int, world_size: int) -> str:
    after = f"after {store.timeout.total_seconds():g} s"  # type: ignore[attr-defined]
    way_out = "start all ranks with the same command; every node must reach MASTER_ADDR at MASTER_PORT"
    if rank:
        return f"rank 0 has not joined {rank} of {world_size} {after}, or waits for others: {way_out}"
    start = store.add(STARTS, 0)
    missing = [peer for peer in range(1, world_size) if not store.check([_key(start, peer)])]
    return f"{len(missing)} of {world_size} ranks have not joined {after}: {as_ranges(missing)}; {way_out}"


def wait_until_read(store: Store, rank: int, world_size: int) -> None:
    """Wait on rank 0 until the other ranks have read the verdict, before it exits: it may host the store.
    Every rank calls it, with the store that `rendezvous` returned."""
    if rank:
        store.set(f"read/{rank}", "")
        return
    with contextlib.suppress(RuntimeError):
        store.wait([f"read/{peer}" for peer in range(1, world_size)], timedelta(seconds=READ_S))
