"""What a rule says."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What is so, with its value, and how to mend it. kind: a run will fail; will be slow; or it may
    matter."""

    kind: Literal["fails", "slow", "note"]
    what: str
    remedy: str


def fails(what: str, remedy: str) -> Finding:
    """A run will fail."""
    return Finding("fails", what, remedy)


def is_slow(what: str, remedy: str) -> Finding:
    """A run will be slower than it could be."""
    return Finding("slow", what, remedy)


def note(what: str, remedy: str) -> Finding:
    """It matters in some cases."""
    return Finding("note", what, remedy)
