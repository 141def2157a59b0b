"""Convert plain data from YAML or JSON to dataclasses, with strict types."""

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
# Field types with bounds. The upper bounds exclude infinity, and integers too large for torch.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "Path": "a path",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a mapping of keys to values",
}


def structure(cls: type[T], data: Any, place: str) -> T:
    """Convert `data` to the dataclass `cls`.

    The keys must be exactly the fields, and each value of its field's type by the strict rules of
    msgspec.convert (true is not a number, an int is a float). Values that already have their type stay.
    ValueError that lists all mistakes, each with `place` (a file), key and value.
    """
    mistakes: list[str] = []
    converted: T = convert(cls, data, "", mistakes)
    if mistakes:
        raise ValueError(report(place, mistakes))
    return converted


def report(place: str, mistakes: Sequence[str]) -> str:
    """Return `place` and the mistakes as text: one on the same line, several on lines of their own."""
    if len(mistakes) == 1:
        return one_line(f"{place}: {mistakes[0]}")
    return "\n".join([f"{place}:", *(f"  {one_line(mistake)}" for mistake in mistakes)])


def wrong_keys(given: Iterable[Any], known: Sequence[str], place: str = "") -> list[str]:
    """Return messages for the unknown keys, each with the most similar known key, and for missing keys."""
    given, mistakes = list(given), []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
            mistakes.append(f"unknown key {_join(place, one_line(key, 80))}. {hint}")
    missing = [_join(place, key) for key in known if key not in given]
    if missing:
        mistakes.append(f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing")
    return mistakes


def convert(target: Any, value: Any, place: str, mistakes: list[str], strict: bool = True) -> Any:
    """Convert the value to the target type; dataclasses, lists and mappings by element, so that every mistake
    has its place: `mistakes` gets a line for each, and the result is then of no use.

    Not `strict`: text may be a number, as the keys of YAML and JSON are.
    """
    kind, inner = get_origin(target), get_args(target)
    if isinstance(target, type) and dataclasses.is_dataclass(target) and isinstance(value, dict):
        fields = _fields(target)
        if value.keys() != fields.keys():
            mistakes += wrong_keys(value, list(fields), place)
        parts = {
            key: convert(fields[key], part, _join(place, key), mistakes)
            for key, part in value.items()
            if key in fields
        }
        return None if mistakes else target(**parts)
    if kind is tuple and inner[1:] == (...,) and isinstance(value, list):
        return tuple(convert(inner[0], part, f"{place}[{i}]", mistakes) for i, part in enumerate(value))
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {
            convert(inner[0], key, f"{place}: key", mistakes, strict=False): convert(
                inner[1], part, _join(place, key), mistakes
            )
            for key, part in value.items()
        }
    try:
        return msgspec.convert(value, target, strict=strict)
    except ValueError as error:  # from msgspec, or for text with an unpaired surrogate
        shown = one_line(repr(value), 80)
        mistakes.append(f"{f'{place}={shown}' if place else shown}{_rule(str(error), target)}")
        return None


@cache
def _fields(cls: type) -> dict[str, Any]:
    return {item.name: item.type for item in dataclasses.fields(cls)}


def _rule(error: str, target: Any) -> str:
    """Return the violated rule, from msgspec's "Expected `int`, got `str` - at `$[0]`"."""
    kinds = get_args(target)
    if get_origin(target) is Literal:
        return f" must be one of {', '.join(map(str, kinds))}"
    if any(get_origin(kind) is Literal for kind in kinds):
        return f" must be {' or '.join(map(_name_type, kinds))}"
    message, _, element = error.partition(" - at `$")
    expected = re.fullmatch(r"Expected `([\w |]+)`(.*?)(?:, got .*)?", message, re.DOTALL)
    if not expected:
        return f": {message}"
    types = " or ".join(_TYPE_NAMES.get(name, name) for name in expected[1].split(" | "))
    return f"{f': {element[:-1]}' if element else ''} must be {types}{expected[2].removesuffix('.0')}"


def _name_type(kind: Any) -> str:
    names = get_args(kind) if get_origin(kind) is Literal else [_TYPE_NAMES[kind.__name__]]
    return ", ".join(map(str, names))


def _join(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)
