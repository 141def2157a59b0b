"""The dotted keys of a config and their types, as the sections' dataclasses declare them."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from meshwright.parallel.structure import members
from meshwright.train.config import Config

FACTORY, ARGS, BLOCKS = "model.factory", "model.args", "model.blocks"


@cache
def types() -> dict[str, Any]:
    """The declared type of each dotted key and section."""

    def types_in(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(section):
            yield f"{prefix}{item.name}", item.type
            for inner in sections_in(item.type):
                yield from types_in(inner, f"{prefix}{item.name}.")

    return dict(types_in(Config, ""))


def type_of(key: str) -> Any:
    """Return the declared type of a key or a section."""
    return Any if key.startswith(f"{ARGS}.") else types()[key]


def sections_in(declared: Any) -> list[Any]:
    """The dataclasses in a declared type, such as RopeScaling | None."""
    return [each for each in members(declared) if dataclasses.is_dataclass(each)]


@cache
def known_keys() -> tuple[str, ...]:
    """All dotted keys of a config."""
    return tuple(key for key, declared in types().items() if not sections_in(declared))


def is_config_key(key: str) -> bool:
    """Return whether `key` is a dotted key or a section of the config."""
    return key in types() or has_value(key)


def has_value(key: str) -> bool:
    """Return whether `key` is a dotted key of the config, or an argument of the model's factory."""
    return key in known_keys() or key.startswith(f"{ARGS}.")


def key_hint(key: str) -> str:
    """Return a hint for an unknown key: the nearest valid key, or the command that lists all keys."""
    known = known_keys()
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else "All keys: python -m train.main -h all."


def above(key: str) -> list[str]:
    """The sections that contain a key."""
    names = key.split(".")
    return [".".join(names[:number]) for number in range(1, len(names))]


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values of nested ones. A known key is a leaf, also with a mapping
    (data.mixture); of a factory's arguments each is one."""
    for name, written in data.items():
        key = f"{prefix}{name}"
        if isinstance(written, dict) and written and (key == ARGS or not has_value(key)):
            yield from leaves(written, f"{key}.")
        else:
            yield key, written


def keys_of(section: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each key of the config section `name` ("": of all)."""
    for item in dataclasses.fields(section):
        value, key = getattr(section, item.name), f"{name}.{item.name}".removeprefix(".")
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, key)
        else:
            yield key, value
