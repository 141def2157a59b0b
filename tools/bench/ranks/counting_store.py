"""A rendezvous store that counts the operations and bytes of one rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store


@dataclass
class StoreTraffic:
    """What a rank does in the store: operations by kind (a `multi_get` is one), bytes of the values that it
    sets and gets, and connections that it adds."""

    operations: Counter[str] = field(default_factory=Counter)
    set_bytes: int = 0
    got_bytes: int = 0
    connections: int = 0

    @property
    def total(self) -> int:
        """Number of operations."""
        return self.operations.total()


class CountingStore(Store):
    """Forwards every operation to `store`, which the ranks share, and counts it in this rank's `traffic`."""

    def __init__(self, store: Any, traffic: StoreTraffic) -> None:
        super().__init__()
        self.store, self.traffic = store, traffic
        self._clones: list[CountingStore] = []  # C++ keeps a clone, but not its Python half

    def clone(self) -> "CountingStore":
        """Return a store with a connection of its own that counts in the same traffic."""
        self.traffic.connections += 1
        self._clones.append(CountingStore(self.store.clone(), self.traffic))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """Count and forward."""
        self._count("set", [value])
        self.store.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Count and forward."""
        self._count("compare_set", [desired])
        return self.store.compare_set(key, expected, desired)

    def add(self, key: str, value: int) -> int:
        """Count and forward."""
        self._count("add")
        return self.store.add(key, value)

    def get(self, key: str) -> bytes:
        """Count and forward."""
        return self._received("get", [self.store.get(key)])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count and forward."""
        return self._received("multi_get", self.store.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        """Count and forward."""
        self._count("check")
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Count and forward."""
        self._count("wait")
        self.store.wait(keys, *([] if timeout is None else [timeout]))

    def has_extended_api(self) -> bool:
        """Return whether `store` has multi_get."""
        return self.store.has_extended_api()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `store`."""
        self.store.set_timeout(timeout)

    def _count(self, kind: str, values: Sequence[str | bytes] = ()) -> None:
        self.traffic.operations[kind] += 1
        self.traffic.set_bytes += sum(map(len, values))

    def _received(self, kind: str, values: list[bytes]) -> list[bytes]:
        self.traffic.operations[kind] += 1
        self.traffic.got_bytes += sum(map(len, values))
        return values
