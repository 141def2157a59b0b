"""Convert plain data from YAML or JSON to dataclasses, with strict types."""

import dataclasses
import difflib
import numbers
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from meshwright.parallel.errors import PlanError, one_line

T = TypeVar("T")
# Field types with bounds. The upper bounds exclude infinity, and integers too large for torch.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
MOST = 10  # mistakes in a report
OPTIONAL = {"optional": True}  # metadata of a field whose key may be missing; it has a default
_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
}


class Written(str):
    """A scalar as it is written, such as 010 or no, with the `value` that YAML gives it: 10 or "no"."""

    value: Any


def value_of(written: Any) -> Any:
    """Return the values of `Written` scalars in lists and mappings, whose keys stay text."""
    if isinstance(written, list):
        return [value_of(each) for each in written]
    if isinstance(written, dict):
        return {str(key): value_of(each) for key, each in written.items()}
    return written.value if isinstance(written, Written) else written


def structure(cls: type[T], data: Any, place: str) -> T:
    """Convert `data` to the dataclass `cls`.

    The keys must be the fields, of which OPTIONAL ones may be missing, and each value of its field's type by
    the strict rules of msgspec.convert (true is not a number, an int is a float). Values that already have
    their type stay. ValueError that lists all mistakes, each with `place` (a file), key and value.
    """
    mistakes: list[str] = []
    converted: T = convert(cls, data, "", mistakes)
    if mistakes:
        raise ValueError(report(place, mistakes))
    return converted


def report(place: str, mistakes: Sequence[str]) -> str:
    """Return `place` and the mistakes as text: one on the same line, several on lines of their own, of many
    the first ten."""
    if len(mistakes) == 1:
        return one_line(f"{place}: {mistakes[0]}")
    more = [f"and {len(mistakes) - MOST} more"] if len(mistakes) > MOST else []
    return "\n".join([f"{place}:", *(f"  {one_line(mistake)}" for mistake in [*mistakes[:MOST], *more])])


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


def convert_fields(section: Any, name: str) -> None:
    """Convert the fields of a new dataclass, and of those in it, to their types, such as lists to tuples.
    Raises PlanError with a line for each value of another type. `name`: of the dataclass, which the keys
    begin with."""
    kind: Any = type(section)
    own, kinds = {}, _fields(kind)
    for key in kinds:
        value = getattr(section, key)
        if dataclasses.is_dataclass(value):
            convert_fields(value, _join(name, key))
        else:
            own[key] = value
    try:  # all at once, because planning makes thousands
        converted = msgspec.structs.asdict(msgspec.convert(own, _record(kind, *own)))
    except ValueError:
        mistakes: list[str] = []
        converted = {
            key: convert(kinds[key], value, _join(name, key), mistakes) for key, value in own.items()
        }
        if mistakes:
            raise PlanError("\n".join(mistakes)) from None
    vars(section).update(converted)


def convert(target: Any, value: Any, place: str, mistakes: list[str], strict: bool = True) -> Any:
    """Convert the value to the target type; dataclasses, lists and mappings by element, so that every mistake
    has its place: `mistakes` gets a line for each, and the result is then of no use.

    A scalar as it is written (`Written`) is text where the target is, otherwise what YAML makes of it. Not
    `strict`: text may be a number, as the keys of YAML and JSON are.
    """
    kind, inner = get_origin(target), get_args(target)
    if isinstance(target, type) and dataclasses.is_dataclass(target) and isinstance(value, dict):
        fields = _fields(target)
        optional = [item.name for item in dataclasses.fields(target) if item.metadata == OPTIONAL]
        if {*value, *optional} != fields.keys():
            mistakes += wrong_keys([*value, *optional], list(fields), place)
        parts = {
            key: convert(fields[key], part, _join(place, key), mistakes)
            for key, part in value.items()
            if key in fields
        }
        return None if mistakes else target(**parts)
    is_list, endless = isinstance(value, list | tuple), inner[1:] == (...,)
    if kind is tuple and is_list and (endless or len(inner) == len(value)):
        each = inner[:1] * len(value) if endless else inner
        return tuple(convert(each[i], part, f"{place}[{i}]", mistakes) for i, part in enumerate(value))
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {
            convert(inner[0], key, f"{place}: key", mistakes, strict=False): convert(
                inner[1], part, _join(place, key), mistakes
            )
            for key, part in value.items()
        }
    plain = value_of(value)
    if isinstance(value, Written):
        if is_text(target) and not (plain is None and accepts_null(target)):
            plain = str(value)
        elif isinstance(plain, str) and target is not Any:
            plain = _unquoted(plain)
    elif isinstance(plain, numbers.Real) and not isinstance(plain, int | float):  # such as numpy's
        plain = int(plain) if isinstance(plain, numbers.Integral) else float(plain)
    elif isinstance(plain, os.PathLike) and is_text(target):
        plain = os.fspath(plain)
    try:
        return msgspec.convert(plain, target, strict=strict)
    except ValueError as error:  # from msgspec, or for text with an unpaired surrogate
        shown = one_line(value if isinstance(value, Written) else repr(value_of(value)), 80)
        rule = f" must be {describe_type(target)}"
        if isinstance(error, UnicodeError) or (type(plain) is int and not -(2**63) <= plain < 2**63):
            rule = f": {error}"
        mistakes.append(f"{f'{place}={shown}' if place else shown}{rule}")
        return None


def _unquoted(text: str) -> Any:
    """Return the number, or true, false or null, that a text is: many programs write 3e-4 in quotes."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def members(target: Any) -> tuple[Any, ...]:
    """The types in a union; any other type alone."""
    return get_args(target) if get_origin(target) in (Union, types.UnionType) else (target,)


def accepts_null(target: Any) -> bool:
    """Return whether null is a value of the type."""
    return target is Any or types.NoneType in members(target)


def is_text(target: Any) -> bool:
    """Return whether all values of the type, but null, are text."""
    literals = [kind for kind in members(target) if get_origin(kind) is Literal]
    return all(
        kind in (str, types.NoneType) or (kind in literals and isinstance(get_args(kind)[0], str))
        for kind in members(target)
    )


def describe_type(target: Any) -> str:
    """Return the rule for a value of the type, such as `auto or an integer of at least 1`."""
    kind, inner = get_origin(target), get_args(target)
    if len(members(target)) > 1:
        return _or_list([describe_type(each) for each in inner])
    if kind is Literal:
        return _or_list(list(map(str, inner)))
    if kind is Annotated:
        return _describe_bounded(inner[0], inner[1])
    if kind is tuple and inner[1:] == (...,):
        return f"a list, such as [a, b], each {'any value' if inner[0] is Any else describe_type(inner[0])}"
    if kind is tuple:
        return f"a list of {len(inner)} values"
    return _NAMES.get(target, "a mapping of keys to values")


def _or_list(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _describe_bounded(kind: Any, meta: msgspec.Meta) -> str:
    """Return the rule for a value of the `kind` within bounds, without those that any finite value keeps."""
    bounds = {"of at least": meta.ge, "greater than": meta.gt, "at most": meta.le, "less than": meta.lt}
    endless = (None, -(2**63), 2**63 - 1, sys.float_info.max)
    rules = [f"{rule} {bound:.15g}" for rule, bound in bounds.items() if bound not in endless]
    if meta.pattern:
        rules.append(f"matching {meta.pattern}")
    name = "a finite number" if meta.le == sys.float_info.max else describe_type(kind)
    name = "a list that is not empty" if meta.min_length else name
    return " ".join([name, " and ".join(rules)]).strip()


@cache
def _record(cls: type, *names: str) -> type:
    """A struct with these fields of a dataclass, which msgspec converts in one call."""
    return msgspec.defstruct(cls.__name__, [(name, _fields(cls)[name]) for name in names])


@cache
def _fields(cls: type) -> dict[str, Any]:
    return {item.name: item.type for item in dataclasses.fields(cls)}


def _join(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)
