"""Hooks are closed once each, in reverse order, whatever they are."""

from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.train.hooks import Hook, Hooks

closed: list[str] = []


@dataclass
class Named(Hook):
    """Without a hash, and equal to any other of its name."""

    run: Any
    name: str = "yours"

    def close(self) -> None:
        closed.append(self.name)


class Late(Hook):
    def __init__(self, run: Any) -> None:
        raise ValueError("no room")


def test_they_are_closed_in_reverse_order_also_when_a_later_one_cannot_be_made() -> None:
    closed.clear()
    hooks = Hooks()
    yours = hooks.make([Named, Named], None)
    hooks.extend([Named(None, "first"), *yours, Named(None, "last")], lambda _: None)
    hooks.close()
    assert closed == ["last", "yours", "yours", "first"]
    closed.clear()
    hooks = Hooks()
    with pytest.raises(ValueError, match="no room"), hooks.closed_at_exit():
        hooks.make([Named, Late, Named], None)
    assert closed == ["yours"]
