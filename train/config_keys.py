"""The dotted keys of a config: their types, as the sections' dataclasses declare them, and their help, from
the docstrings of these."""

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from meshwright.parallel.structure import describe_type, members
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.config import Config, FactoryConfig
from meshwright.train.errors import ConfigError

FACTORY, ARGS = "model.factory", "model.args"
OF_FACTORY = tuple(f"model.{item.name}" for item in dataclasses.fields(FactoryConfig))


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
    return key in known_keys() or (key.startswith(f"{ARGS}.") and key.removeprefix(f"{ARGS}.").isidentifier())


def key_hint(key: str) -> str:
    """Return a hint for an unknown key: the nearest valid key, or the command that lists all keys."""
    if key.startswith(f"{ARGS}."):
        return f"An argument of the function is {ARGS}.NAME, whose value may be a mapping."
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


WIDTH = 80
PAGE = """usage: python -m train.main --config NAME_OR_PATH [--SECTION.KEY=VALUE ...]

Train a Llama, or a model of yours, sharded and compiled.

  python -m train.main --config llama_debug.yaml --train.steps=20
  torchrun --nproc_per_node=8 -m train.main --config llama_8b --parallel.tp=2
  torchrun --nproc_per_node=8 -m train.main --model.factory=mine:build

  --config X           YAML file: a path, or one of configs/; the last one wins
  --SECTION.KEY=VALUE  a key of the config, as in a file; overrides the files
  --print_config       print the resolved configuration and exit
  -h [KEY]             this page, or the keys that begin with KEY, such as
                       -h parallel, -h train.steps, -h all

sections, with the first line of their help:"""


def help_text(asked: str, configs: Iterable[str]) -> str:
    """Return the text of -h: the page, with the names of `configs`, or the keys that begin with `asked`
    ("all": all of them). Raises ConfigError."""
    asked = asked.removeprefix("--")
    if not asked or "=" in asked or asked in ("config", "print_config", "help", "-h"):
        # of model that of our Llama, where it may also be a model of yours
        about = {item.name: inspect.getdoc(sections_in(item.type)[0]) for item in dataclasses.fields(Config)}
        sections = [f"{name:10} {(text or '').splitlines()[0]}" for name, text in about.items()]
        lines = [_fill(line, "  ", " " * 13) for line in sections]
        return "\n".join([PAGE, *lines, "", _fill(f"configs: {', '.join(configs)}"), ""])
    keys = [t for key, t in _keys(Config, "") if asked == "all" or f"{key}.".startswith(f"{asked}.")]
    if not keys:
        raise ConfigError(f"-h {asked}: no key begins with that. {key_hint(asked)}")
    return "\n".join(keys)


def _fill(text: str, first: str = "", later: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later)


def _keys(kind: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its lines of help: default, description and rule."""
    about = dict(re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", inspect.getdoc(kind) or "", re.MULTILINE))
    for item in dataclasses.fields(kind):
        key = f"{prefix}{item.name}"
        if not dataclasses.is_dataclass(item.type) and item.name in about:
            yield key, _describe(key, item, about[item.name])
        for section in sections_in(item.type):
            yield from _keys(section, f"{key}.")


def _describe(key: str, item: dataclasses.Field[Any], about: str) -> str:
    made = dataclasses.MISSING if item.default_factory is dataclasses.MISSING else item.default_factory()
    default = made if item.default is dataclasses.MISSING else item.default
    given = "" if default is dataclasses.MISSING else to_yaml([default], default_flow_style=True)[1:-2]
    indent = " " * 4
    text, rule = (
        _fill(" ".join(about.split()), indent, indent),
        _fill(describe_type(item.type), indent, indent),
    )
    return f"--{key}={given}\n{text}\n{rule}\n"
