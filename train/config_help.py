"""The text of `train.main -h`: a page, and on request the keys, from the docstrings of their sections."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from meshwright.parallel.structure import describe_type
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.config import Config
from meshwright.train.config_keys import key_hint, sections_in
from meshwright.train.config_parser import list_configs
from meshwright.train.errors import ConfigError

PAGE = """usage: python -m train.main --config NAME_OR_PATH [--SECTION.KEY=VALUE ...]

Train a Llama, or a model of yours, sharded and compiled.

  python -m train.main --config llama_debug.yaml --train.steps=20
  torchrun --nproc_per_node=8 -m train.main --config llama_8b.yaml --parallel.tp=2
  torchrun --nproc_per_node=8 -m train.main --model.factory=mine:build --model.args.depth=12

  --config X           YAML file: a path, or one of configs/; later ones override earlier ones
  --SECTION.KEY=VALUE  a key of the config, as in the file; these override the files
  --print_config       print the resolved configuration and exit
  -h [KEY]             this page, or the keys that begin with KEY: -h parallel, -h train.steps, -h all

sections, with the first line of their help:
"""


def help_text(asked: str) -> str:
    """Return the page, or the keys that begin with `asked` ("all": all of them). Raises ConfigError."""
    asked = asked.removeprefix("--")
    if not asked or "=" in asked or asked == "config":
        sections = [(item.name, _about(item.type)) for item in dataclasses.fields(Config)]
        lines = [f"  {name:11}{about}" for name, about in sections]
        names = ", ".join(path.stem for path in list_configs())
        return f"{PAGE}{chr(10).join(lines)}\n\n{textwrap.fill(f'configs: {names}', 100)}\n"
    keys = [text for key, text in _keys(Config, "") if asked == "all" or _is_below(key, asked)]
    if not keys:
        raise ConfigError(f"-h {asked}: no key begins with that. {key_hint(asked)}")
    return "\n".join(keys)


def _is_below(key: str, asked: str) -> bool:
    return f"{key}.".startswith(f"{asked}.")


def _about(kind: Any) -> str:
    """The first line of a section's docstring; of our Llama's, where it may also be a model of yours."""
    return (inspect.getdoc(sections_in(kind)[0]) or "").partition("\n")[0]


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
    text = textwrap.fill(" ".join(about.split()), 100, initial_indent="    ", subsequent_indent="    ")
    return f"--{key}={given}\n{text}\n    {describe_type(item.type)}\n"
