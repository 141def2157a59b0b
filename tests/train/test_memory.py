"""Garbage is collected between steps, by the step count, and Python's collector is restored afterwards."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from meshwright.train.between_steps import GarbageCollector
from tests.support.steps import step_done


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of every collection, as reported by Python. Restores the collector."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.unfreeze()
    gc.enable()


@pytest.mark.sampled(3, day=1)
def test_it_collects_after_every_so_many_steps_and_never_by_itself(collections: list[int]) -> None:
    gc.collect()  # so that Python itself is not due before the first step
    collections.clear()
    garbage = GarbageCollector(50)
    seen = []
    for step in range(7, 160):
        garbage.after_step(step_done(step))
        keep = [Node() for _ in range(1000)]  # Python would collect every 700 objects
        seen += [step] * len(collections)
        collections.clear()
        del keep
    assert seen == [7, 50, 100, 150], "after the first step of the process, then by the step's number"
    garbage.close()


def test_every_collection_takes_old_garbage_too(collections: list[int]) -> None:
    garbage = GarbageCollector(10)
    garbage.after_step(step_done(1))
    node = Node()
    reference = weakref.ref(node)
    for step in range(2, 41):
        garbage.after_step(step_done(step))
    assert reference() is not None
    del node
    garbage.after_step(step_done(49))
    assert reference() is not None
    garbage.after_step(step_done(50))
    assert reference() is None
    garbage.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("steps", "enabled"), [(0, True), (60, True), (60, False)])
def test_the_collector_is_left_as_it_was(steps: int, enabled: bool, collections: list[int]) -> None:
    (gc.enable if enabled else gc.disable)()
    garbage = GarbageCollector(50)
    for step in range(1, steps + 1):
        garbage.after_step(step_done(step))
        assert not gc.isenabled()
    for _ in range(2):  # twice, as a `finally` may
        garbage.close()
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


def test_with_0_python_collects_as_ever(collections: list[int]) -> None:
    garbage = GarbageCollector(0)
    for step in range(100):
        garbage.after_step(step_done(step))
    assert gc.isenabled()
    assert 2 not in collections
    garbage.close()
