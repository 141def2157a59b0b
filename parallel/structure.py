"""Plain data, as YAML and JSON have it, as the dataclass that declares what it must be."""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from meshwright.parallel.errors import one_line

T = TypeVar("T")
# What a field may be beyond its type. The upper bounds leave out infinity, and integers too large for torch.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a word",
    "Path": "a path",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a mapping of keys to values",
}


def structure(cls: type[T], data: Any, place: str) -> T:
    """`data` as the dataclass `cls`: every field is given, no other key is, and each value is of its field's
    declared type, as msgspec.convert reads it strictly (true is no number, an int is a float). What is of its
    type already stays. Raises ValueError with all mistakes, each with `place` (a file), key and value."""
    mistakes: list[str] = []
    made: T = _make(cls, data, "", mistakes)
    if mistakes:
        raise ValueError(report(place, mistakes))
    return made


def report(place: str, mistakes: Sequence[str]) -> str:
    """One mistake on a line with its place; several below it."""
    if len(mistakes) == 1:
        return one_line(f"{place}: {mistakes[0]}")
    return "\n".join([f"{place}:", *(f"  {one_line(mistake)}" for mistake in mistakes)])


def wrong_keys(given: Iterable[Any], wanted: Sequence[str], place: str = "") -> list[str]:
    """Keys that are not among the wanted ones, each with the nearest of these, and those that are missing."""
    given, mistakes = list(given), []
    for key in given:
        if key not in wanted:
            near = difflib.get_close_matches(str(key), wanted, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(wanted)}."
            mistakes.append(f"unknown key {_join(place, one_line(key, 80))}. {hint}")
    missing = [_join(place, key) for key in wanted if key not in given]
    if missing:
        mistakes.append(f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing")
    return mistakes


def _make(wanted: Any, value: Any, place: str, mistakes: list[str]) -> Any:
    """The value as the wanted type; dataclasses, lists and mappings part by part, so that the place of every
    mistake is known."""
    kind, inner = get_origin(wanted), get_args(wanted)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted) and isinstance(value, dict):
        fields = _fields(wanted)
        if value.keys() != fields.keys():
            mistakes += wrong_keys(value, list(fields), place)
        parts = {
            key: _make(fields[key], part, _join(place, key), mistakes)
            for key, part in value.items()
            if key in fields
        }
        return None if mistakes else wanted(**parts)
    if kind is tuple and inner[1:] == (...,) and isinstance(value, list):
        return tuple(_make(inner[0], part, f"{place}[{i}]", mistakes) for i, part in enumerate(value))
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {
            _make(inner[0], key, f"{place}: key", mistakes): _make(
                inner[1], part, _join(place, key), mistakes
            )
            for key, part in value.items()
        }
    try:
        return msgspec.convert(value, wanted)
    except ValueError as error:  # msgspec's own, and of text with half of a surrogate pair
        shown = one_line(repr(value), 80)
        mistakes.append(f"{f'{place}={shown}' if place else shown}{_rule(str(error), wanted)}")
        return None


@cache
def _fields(cls: type) -> dict[str, Any]:
    return {item.name: item.type for item in dataclasses.fields(cls)}


def _rule(error: str, wanted: Any) -> str:
    """What the value must be, of msgspec's "Expected `int`, got `str` - at `$[0]`"."""
    if get_origin(wanted) is Literal:
        return f" must be one of {', '.join(map(str, get_args(wanted)))}"
    said, _, inside = error.partition(" - at `$")
    expected = re.fullmatch(r"Expected `([\w |]+)`(.*?)(?:, got .*)?", said, re.DOTALL)
    if not expected:
        return f": {said}"
    types = " or ".join(_WORDS.get(name, name) for name in expected[1].split(" | "))
    return f"{f': {inside[:-1]}' if inside else ''} must be {types}{expected[2].removesuffix('.0')}"


def _join(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)
