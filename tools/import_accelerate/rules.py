"""The verdict on one accelerate key, and the readers of values that all rules share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.parallel.plan.rules import nearest

# as accelerate's str_to_bool
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


@dataclass(frozen=True)
class Verdict:
    """Whether a key is mapped, dropped or refused, and why.

    `settings`: dotted keys of this trainer and their values. `launch`: torchrun options and environment
    variables, by name. A key is mapped if it has either, or if this trainer always does what it requests.
    `notes`: remarks for the user.
    """

    kind: Literal["mapped", "dropped", "refused"]
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A key as the user wrote it, its value, and the verdict."""

    key: str
    value: Any
    verdict: Verdict


# A rule returns the verdict on one key from its value and all given values: plain names, without nulls. It
# raises ValueError for a wrong value.
Given = Mapping[str, Any]
Rule = Callable[[Any, Given], Verdict]


def mapped(why: str, settings: Mapping[str, Any], *notes: str) -> Verdict:
    """Return the verdict on a key that becomes settings of this trainer."""
    return Verdict("mapped", why, settings, notes=notes)


def launched(why: str, launch: Mapping[str, str]) -> Verdict:
    """Return the verdict on a key that becomes part of the launch command."""
    return Verdict("mapped", why, launch=launch)


def dropped(why: str, *notes: str) -> Verdict:
    """Return the verdict on a key that changes nothing."""
    return Verdict("dropped", why, notes=notes)


def refused(why: str) -> Verdict:
    """Return the verdict on a key or value that this trainer does not support."""
    return Verdict("refused", why)


def sets(key: str, read: Callable[[Any], Any], why: str) -> Rule:
    """Return a rule that maps a key to our `key`, with the value converted by `read`."""
    return lambda value, given: mapped(why, {key: read(value)})


def drops(why: str) -> Rule:
    """Return a rule that drops a key with any value."""
    return lambda value, given: dropped(why)


def refuses(why: str) -> Rule:
    """Return a rule that refuses a key unless it is empty or off."""
    return lambda value, given: refused(why) if is_set(value) else dropped("it is off")


def is_set(value: Any) -> bool:
    """Return whether a value switches something on: not null, false, "no" or empty, alone or in a list."""
    if isinstance(value, list):
        return any(is_set(part) for part in value)
    return value not in (None, False, "", {}) and str(value).lower() not in FALSE


def judge(key: str, value: Any, given: Given, rule: Rule) -> Item:
    """Apply a rule. A value that it cannot read is refused; a null is dropped."""
    if value is None:
        return Item(key, value, dropped("it has no value"))
    try:
        return Item(key, value, rule(value, given))
    except ValueError as error:
        return Item(key, value, refused(str(error)))


def as_bool(value: Any) -> bool:
    """Return a truth value, also from the strings that accelerate accepts. Raises ValueError."""
    text = str(value).lower()
    if isinstance(value, bool | int | str) and text in (*TRUE, *FALSE):
        return text in TRUE
    raise ValueError("it must be true or false")


def as_int(value: Any, least: int = 1) -> int:
    """Return an integer of at least `least`, also from digits in quotes. Raises ValueError."""
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        value = int(value)
    if type(value) is not int or value < least:
        raise ValueError(f"it must be an integer of at least {least}")
    return value


def as_choice(value: Any, choices: Iterable[str]) -> str:
    """Return one of several choices, in any case. YAML reads a bare `no` as false. Raises ValueError."""
    text, known = "no" if value is False else str(value), {choice.upper(): choice for choice in choices}
    if text.upper() in known:
        return known[text.upper()]
    raise ValueError(f"it must be one of {', '.join(known.values())}.{nearest(text.upper(), known)}")


def as_numbered(value: Any, choices: Sequence[str]) -> str:
    """Return one of several choices, given by name in any case or by number from 1. Raises ValueError."""
    number = str(value)
    if number.isdecimal() and 1 <= int(number) <= len(choices):
        return choices[int(number) - 1]
    try:
        return as_choice(value, choices)
    except ValueError as error:
        raise ValueError(f"{error} Or a number, 1 to {len(choices)}") from None
