"""What becomes of one key of accelerate's, and the readers of its values that every rule shares."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.parallel.plan.rules import nearest

# as accelerate's str_to_bool
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


@dataclass(frozen=True)
class Verdict:
    """What becomes of a key, and why.

    `settings`: our dotted keys and their values. `launch`: options of torchrun, and environment variables, by
    name. A key is mapped where it has either, or where ours does what it asks for in any case. `notes`: what
    the user should know.
    """

    kind: Literal["mapped", "dropped", "refused"]
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A key as the user wrote it, its value, and what becomes of it."""

    key: str
    value: Any
    verdict: Verdict


# A rule decides about one key, from its value and from all that was given, by plain name and without what is
# null. ValueError: a wrong value.
Given = Mapping[str, Any]
Rule = Callable[[Any, Given], Verdict]


def mapped(why: str, settings: Mapping[str, Any], *notes: str) -> Verdict:
    return Verdict("mapped", why, settings, notes=notes)


def launched(why: str, launch: Mapping[str, str]) -> Verdict:
    """Mapped to how the run is started."""
    return Verdict("mapped", why, launch=launch)


def dropped(why: str, *notes: str) -> Verdict:
    return Verdict("dropped", why, notes=notes)


def refused(why: str) -> Verdict:
    return Verdict("refused", why)


def sets(key: str, read: Callable[[Any], Any], why: str) -> Rule:
    """A rule for a key that is one of ours, whose value `read` makes of theirs."""
    return lambda value, given: mapped(why, {key: read(value)})


def drops(why: str) -> Rule:
    """A rule for a key that changes nothing here, whatever its value."""
    return lambda value, given: dropped(why)


def refuses(why: str) -> Rule:
    """A rule for a key that is harmless only while it is empty or off."""
    return lambda value, given: refused(why) if is_set(value) else dropped("it is off")


def is_set(value: Any) -> bool:
    """Whether a value asks for anything: not null, false, "no", or empty, alone or in a list."""
    if isinstance(value, list):
        return any(is_set(part) for part in value)
    return value not in (None, False, "", {}) and str(value).lower() not in FALSE


def judge(key: str, value: Any, given: Given, rule: Rule) -> Item:
    """Apply a rule; a value that it cannot read is refused, and null is no value at all."""
    if value is None:
        return Item(key, value, dropped("it has no value"))
    try:
        return Item(key, value, rule(value, given))
    except ValueError as error:
        return Item(key, value, refused(str(error)))


def as_bool(value: Any) -> bool:
    """A truth value, also as the words that accelerate takes for one."""
    word = str(value).lower()
    if isinstance(value, bool | int | str) and word in (*TRUE, *FALSE):
        return word in TRUE
    raise ValueError("it must be true or false")


def as_int(value: Any, least: int = 1) -> int:
    """A whole number of at least `least`; digits in quotes are one too."""
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        value = int(value)
    if type(value) is not int or value < least:
        raise ValueError(f"it must be a whole number of at least {least}")
    return value


def as_choice(value: Any, choices: Iterable[str]) -> str:
    """One of several words, in any case; false is YAML's reading of a bare `no`."""
    word, known = "no" if value is False else str(value), {choice.upper(): choice for choice in choices}
    if word.upper() in known:
        return known[word.upper()]
    raise ValueError(f"it must be one of {', '.join(known.values())}.{nearest(word.upper(), known)}")


def as_numbered(value: Any, choices: Sequence[str]) -> str:
    """One of several words, in any case, or its number from 1."""
    number = str(value)
    if number.isdecimal() and 1 <= int(number) <= len(choices):
        return choices[int(number) - 1]
    try:
        return as_choice(value, choices)
    except ValueError as error:
        raise ValueError(f"{error} Or a number, 1 to {len(choices)}") from None
