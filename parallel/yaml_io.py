"""The only reader and writer of YAML: reads by the core rules of YAML 1.2, writes what readers of 1.1 read
equally, and refuses files that PyYAML would silently accept."""

import re
from pathlib import Path
from typing import Any

import yaml

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Written, value_of

MAX_BYTES = 2**19  # of a file; three times a plan of 126 blocks with every unit written out


class YamlError(ValueError):
    """The file cannot be read, is not YAML, or uses YAML features that hide mistakes."""


class _StrictLoader(yaml.SafeLoader):
    """Safe loader of `Written` scalars that refuses duplicate keys, of which PyYAML takes the last; aliases,
    because a mapping could contain itself; and tags, because PyYAML reports wrong ones without a line."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. YamlError with the line for an alias or a tag."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"line {line}: aliases (*{event.anchor}) are not allowed: repeat the value")
        if event.tag:
            raise YamlError(f"line {line}: tags ({event.tag}) are not allowed: remove the tag")
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the node's object; a scalar as `Written`."""
        value = super().construct_object(node, deep)
        if not isinstance(node, yaml.ScalarNode):
            return value
        written = Written(node.value)
        written.value = value
        return written

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the node's mapping. YamlError with the line of a duplicate key or one that is no word."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                raise YamlError(f"line {line}: a key must be a plain word, not a list, a mapping or <<")
            key = key_node.value
            if key in seen:
                raise YamlError(
                    f"line {line}: key '{key}' appears twice (first in line {seen[key]}): merge them"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return an integer; with leading zeros it is decimal."""
        return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


class _Writer(yaml.SafeDumper):
    """Quotes text that the rules of YAML 1.1 or 1.2 would read as something else."""


_StrictLoader.yaml_implicit_resolvers = {}  # none of YAML 1.1: no, 1:30, 1_000
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _tag, _pattern, _first in (  # https://yaml.org/spec/1.2.2/#1032-tag-resolution
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    for _class in (_StrictLoader, _Writer):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def load_written(text: str) -> Any:
    """Return the `Written` scalar of a YAML text, such as one on a command line, or a list or mapping of
    them; None if it is empty or a comment. Raises YamlError."""
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise YamlError(one_line(f"{text}: {error}")) from None


def load_value(text: str) -> Any:
    """Return the value of a YAML text. Raises YamlError."""
    return value_of(load_written(text))


def load_mapping(path: Path, written: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file, {} for an empty file; `written`: as `load_written`. Raises
    YamlError, which names the file and, for errors of syntax and keys, the line."""
    try:
        value = yaml.load(read_text(path), _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise YamlError(one_line(f"{path}:{line} {error.problem}")) from None
    except RecursionError:
        raise YamlError(f"{path}: lists or mappings are nested too deeply") from None
    except (OSError, yaml.YAMLError, ValueError, OverflowError) as error:
        # read_text raises ValueError; Python raises it for thousands of digits
        raise YamlError(one_line(f"{path}: {error}")) from None
    if value in (None, ""):
        return {}
    if not isinstance(value, dict):
        kind = type(value_of(value)).__name__
        raise YamlError(f"{path}: the top level must be a mapping of keys to values, not a {kind}")
    mapping: dict[str, Any] = value if written else value_of(value)
    return mapping


def to_yaml(value: Any, **form: Any) -> str:
    """Return YAML text that reads back equal. `form`: options of PyYAML's dump."""
    return yaml.dump(value, Dumper=_Writer, **{"sort_keys": False, **form})


def read_text(path: Path) -> str:
    """Return a hand-written file's text. OSError; ValueError for one too large, not regular, or not UTF-8."""
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise ValueError("not a regular file")
    if path.stat().st_size > MAX_BYTES:  # such as a weights file named by mistake
        raise ValueError(f"larger than the limit of {MAX_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")
