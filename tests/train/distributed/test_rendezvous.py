"""The rendezvous of a start in a store with entries of earlier starts, with threads as ranks: ranks that come
early, starts whose rank 0 died at any of its operations, other world sizes, and the operations of a rank."""

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.train.distributed.rendezvous import rendezvous, wait_until_read
from meshwright.train.errors import PeerLostError

LIMIT = timedelta(seconds=60)  # far more than a rendezvous of threads needs
OPERATIONS = ("add", "set", "get", "check", "wait", "compare_set", "multi_get")
Join = Callable[..., "Future[str]"]


class DiedError(Exception):
    """The process of a rank ends at an operation of the store."""


class CountedStore:
    """A rank's connection to a store: counts its operations, and signals `waiting` before one that may wait.
    With `dies_at` the rank dies before this operation, or before it waits for the facts of all."""

    def __init__(self, store: dist.Store, dies_at: int = 0) -> None:
        self.store, self.dies_at = store, dies_at
        self.counts, self.waiting = Counter[str](), threading.Event()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)
        return (lambda *args: self._run(name, operation, args)) if name in OPERATIONS else operation

    def _run(self, name: str, operation: Callable[..., Any], args: Sequence[Any]) -> Any:
        self.counts[name] += 1
        if self.counts.total() == self.dies_at or (self.dies_at and name == "multi_get"):
            raise DiedError
        if name in ("get", "wait", "multi_get"):
            self.waiting.set()
        return operation(*args)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Start rendezvous of a rank in a thread; the result is a token that all ranks of its start have."""
    monkeypatch.setattr(  # PrefixStore takes a store of torch only
        "meshwright.train.distributed.rendezvous.PrefixStore",
        lambda prefix, store: dist.PrefixStore(prefix, getattr(store, "store", store)),
    )
    with ThreadPoolExecutor(64) as threads:
        yield lambda *args: threads.submit(token_of_start, *args)


def token_of_start(store: Any, rank: int, world_size: int) -> str:
    own, verdict = rendezvous(store, rank, world_size, f"fact {rank}", " | ".join)
    assert verdict == " | ".join(f"fact {peer}" for peer in range(world_size))
    if rank == 0:
        assert not own.check(["token"]), "an earlier start has used this prefix"
        own.set("token", uuid.uuid4().hex)
    return own.get("token").decode()


def hash_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(LIMIT)
    return store


def one_token(futures: Sequence["Future[str]"]) -> str:
    """The token of a start, which must be the same for all of its ranks."""
    (token,) = {future.result(LIMIT.total_seconds()) for future in futures}
    return token


@contextmanager
def tcp_stores(libuv: bool) -> Iterator[Callable[[], dist.Store]]:
    """Connections to a store as torchrun keeps it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    yield lambda: dist.TCPStore(
        "127.0.0.1", host.port, is_master=False, wait_for_workers=False, timeout=LIMIT, use_libuv=libuv
    )


@pytest.mark.parametrize("libuv", [True, False])
def test_ranks_of_three_starts_meet_in_one_store_of_torchrun(libuv: bool, join: Join) -> None:
    """In the first start rank 0 dies while the others wait, which the second rank 0 wakes."""
    with tcp_stores(libuv) as connect:
        joined = [join(early := CountedStore(connect()), rank, 4) for rank in (1, 2, 3)]
        assert early.waiting.wait(LIMIT.total_seconds())
        dead = CountedStore(connect(), dies_at=4)
        assert isinstance(join(dead, 0, 4).exception(), DiedError)
        first = one_token([join(connect(), 0, 4), *joined])
        second = one_token([join(connect(), rank, 4) for rank in (3, 1, 0, 2)])
        assert first != second


@pytest.mark.parametrize("preceded", [False, True])
def test_rank_0_may_die_at_any_operation_of_two_starts(preceded: bool, join: Join) -> None:
    """Rank 1 has waited since before them, rank 2 and rank 3 come after one dead rank 0 each. At the latest
    rank 0 dies where it would wait for them. `preceded`: by a start that completed."""
    for first, second in product(range(1, 8), repeat=2):
        store = hash_store()
        if preceded:
            one_token([join(store, rank, 2) for rank in range(2)])
        ranks = [join(early := CountedStore(store), 1, 4)]
        assert early.waiting.wait(LIMIT.total_seconds())
        for rank, dies_at in ((2, first), (3, second)):
            died = join(CountedStore(store, dies_at), 0, 4)
            assert isinstance(died.exception(LIMIT.total_seconds()), DiedError)
            ranks.append(join(store, rank, 4))
        assert one_token([join(store, 0, 4), *ranks])


def test_dead_processes_of_an_unfinished_start_do_not_count(join: Join) -> None:
    """Ranks 1 and 2 had joined it, rank 0 waited for rank 3, then all died. The world is smaller now."""
    store = hash_store()
    assert isinstance(join(CountedStore(store, dies_at=3), 0, 4).exception(), DiedError)
    for rank in (1, 2):
        store.set(f"1/fact/{rank}", "dead")
    joined = join(again := CountedStore(store), 1, 3)
    assert again.waiting.wait(LIMIT.total_seconds())
    assert one_token([joined, join(store, 0, 3), join(store, 2, 3)])


@pytest.mark.parametrize("sizes", [(4, 2, 3), (2, 4, 1)])
def test_the_world_size_may_change_between_starts(sizes: Sequence[int], join: Join) -> None:
    store = hash_store()
    tokens = [one_token([join(store, rank, size) for rank in range(size)]) for size in sizes]
    assert len(set(tokens)) == len(sizes)


def test_the_operations_of_a_rank_do_not_grow_with_the_world(join: Join) -> None:
    most = {}
    for size in (2, 60):
        store = hash_store()
        for _ in range(2):
            ranks = [CountedStore(store) for _ in range(size)]
            one_token([join(connection, rank, size) for rank, connection in enumerate(ranks)])
        most[size] = ranks[0].counts.total(), max(rank.counts.total() for rank in ranks[1:])
    assert most[2][0] == most[60][0]
    assert max(most[2][1], most[60][1]) <= 6


def test_a_rank_0_that_was_replaced_ends(join: Join) -> None:
    store = hash_store()
    old = join(waiting := CountedStore(store), 0, 2)
    assert waiting.waiting.wait(LIMIT.total_seconds())
    assert one_token([join(store, 0, 1)])
    store.set("1/fact/1", "late")
    with pytest.raises(PeerLostError, match="newer start"):
        old.result(LIMIT.total_seconds())


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    store.set("1/fact/2", "")
    with pytest.raises(PeerLostError) as missing:
        rendezvous(store, 0, 6, "", "".join)
    with pytest.raises(PeerLostError) as waiting:
        rendezvous(store, 2, 6, "", "".join)
    for fact in ("4 of 6 ranks", "1, 3-5", "0.1 s", "MASTER_ADDR", "same command"):
        assert fact in str(missing.value)
    for fact in ("rank 0", "0.1 s", "MASTER_ADDR", "same command"):
        assert fact in str(waiting.value)


def test_rank_0_waits_until_all_have_read(join: Join) -> None:
    store = CountedStore(hash_store())
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(wait_until_read, store, 0, 3)
        assert store.waiting.wait(LIMIT.total_seconds())
        for rank in (1, 2):
            wait_until_read(store, rank, 3)
        waits.result(LIMIT.total_seconds())
    assert store.store.check(["read/1", "read/2"])
