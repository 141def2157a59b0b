"""Plain data is converted to a dataclass, or refused with all mistakes, each with its place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from meshwright.parallel.structure import Amount, Count, Natural, Positive, structure


@dataclass(frozen=True)
class Inner:
    count: Count
    share: Positive = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    flag: bool | int
    rate: Amount
    path: str | None
    ahead: int | tuple[str, ...]
    inner: Inner
    parts: tuple[Inner, ...]
    shares: Mapping[str, Positive]
    anything: Mapping[str, Any]
    left: Natural
    pair: tuple[str, int]


DATA: dict[str, Any] = {
    "name": "n",
    "kind": "b",
    "flag": True,
    "rate": 3,
    "path": None,
    "ahead": ["x", "y"],
    "inner": {"count": 1, "share": 1},
    "parts": [{"count": 2, "share": 0.25}, Inner(3)],
    "shares": {"x": 1},
    "anything": {"k": [None, {"z": 1}]},
    "left": 2**63 - 1,
    "pair": ["a", 1],
}


def test_values_become_what_is_declared() -> None:
    made = structure(Outer, DATA, "f.yaml")
    expected = {
        **DATA,
        "rate": 3.0,
        "ahead": ("x", "y"),
        "inner": Inner(1, 1.0),
        "parts": (Inner(2, 0.25), Inner(3)),
        "shares": {"x": 1.0},
        "pair": ("a", 1),
    }
    assert repr(made) == repr(Outer(**expected))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", 3, "name=3 must be a string"),
        ("kind", "c", "kind='c' must be a or b"),
        ("flag", "yes", "flag='yes' must be true or false or an integer"),
        ("rate", True, "rate=True must be a finite number of at least 0"),
        ("rate", math.nan, "rate=nan must be a finite number of at least 0"),
        ("rate", 10**309, f"rate={'1' + '0' * 39} ... {'0' * 35}: Number out of range"),
        ("ahead", True, "ahead=True must be an integer or a list, such as [a, b], each a string"),
        ("ahead", ["x", 1], "ahead=['x', 1] must be an integer or a list, such as [a, b], each a string"),
        ("inner", {"count": 0, "share": 1}, "inner.count=0 must be an integer of at least 1"),
        ("inner", {"count": 1}, "inner.share is missing"),
        ("inner", {"count": 1, "share": 1, "shares": 2}, "unknown key inner.shares. Did you mean share?"),
        ("inner", {"count": 1, "share": 1, 7: 2}, "unknown key inner.7. Known: count, share."),
        ("parts", [{"count": 2, "share": 0}], "parts[0].share=0 must be a finite number greater than 0"),
        ("shares", {"x": 1, "y": -1}, "shares.y=-1 must be a finite number greater than 0"),
        ("shares", {2: 1}, "shares: key=2 must be a string"),
        ("rate", "\ud800", r"rate='\ud800': 'utf-8' codec can't encode character '\ud800'"),
        ("left", 2**63, f"left={2**63}: Expected `int` <= {2**63 - 1}"),
        ("pair", ["a", "b"], "pair[1]='b' must be an integer"),
        ("left", -1, "left=-1 must be an integer of at least 0"),
    ],
)
def test_a_wrong_value_is_named_with_place_and_rule(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^f\.yaml: ") as error:
        structure(Outer, DATA | {key: value}, "f.yaml")
    assert str(error.value).removesuffix(" in position 0: surrogates not allowed") == f"f.yaml: {message}"


def test_all_mistakes_are_in_one_report_of_bounded_lines() -> None:
    wrong = DATA | {"name": "x" * 5000, "kind": ["\n" * 5000], "left": [0] * 50_000, "k" * 5000: 1}
    with pytest.raises(ValueError, match=r"^f\.yaml:\n  unknown key kkk") as error:
        structure(Outer, wrong, "f.yaml")
    lines = str(error.value).splitlines()
    assert [line[:6] for line in lines[2:]] == ["  kind", "  left"]
    assert all(line.isprintable() and len(line) < 400 for line in lines)
