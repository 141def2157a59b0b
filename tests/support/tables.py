"""Tests over a table: every row is checked, and all failures are shown."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rows(table: str) -> list[tuple[str, str]]:
    """The rows "input -> facts" of a text. A line that begins with a space continues the row above it, and
    "#" begins a comment."""
    lines = [line for line in table.replace("\n ", " ").splitlines() if line and line[0] != "#"]
    return [(left, right) for left, _, right in (line.partition(" -> ") for line in lines)]


def try_each(rows: Iterable[tuple[Any, ...]], check: Callable[..., object]) -> None:
    """Call check(*row) for every row. Raises one AssertionError with every row that failed and its error."""
    failures = []
    for row in rows:
        try:
            check(*row)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{', '.join(map(_short, row))}:\n  {type(error).__name__}: {str(error)[:1000]}")
    assert not failures, f"{len(failures)} rows failed:\n" + "\n".join(failures)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
