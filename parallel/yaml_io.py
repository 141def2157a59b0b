"""Strict YAML reader: refuses files that PyYAML would silently accept."""

import re
from pathlib import Path
from typing import Any

import yaml

from meshwright.parallel.errors import one_line

MAX_BYTES = 2**19  # of a file; three times a plan of 126 blocks with every unit written out


class YamlError(ValueError):
    """The file cannot be read, is not YAML, or uses YAML features that hide mistakes."""


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys, of which PyYAML takes the last; aliases, because a mapping
    could contain itself; and tags, because PyYAML reports wrong ones without a line."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. YamlError with the line for an alias or a tag."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"line {line}: aliases (*{event.anchor}) are not allowed: repeat the value")
        if event.tag:
            raise YamlError(f"line {line}: tags ({event.tag}) are not allowed: remove the tag")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the node's mapping. YamlError with the line for a duplicate key or one that is not a plain
        word."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                raise YamlError(f"line {line}: a key must be a plain word, not a list, a mapping or <<")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise YamlError(
                    f"line {line}: key '{key}' appears twice (first in line {seen[key]}): merge them"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


# 1e-6 is a number, as in YAML 1.2; PyYAML takes it as text
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_value(text: str) -> Any:
    """Return the value of a YAML text, such as one on a command line. Raises YamlError."""
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise YamlError(one_line(f"{text}: {error}")) from None


def load_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; {} for an empty file. Raises YamlError, which names the file and,
    for errors of syntax and keys, the line."""
    try:
        value = yaml.load(read_text(path), _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise YamlError(one_line(f"{path}:{line} {error.problem}")) from None
    except RecursionError:
        raise YamlError(f"{path}: lists or mappings are nested too deeply") from None
    except (OSError, yaml.YAMLError, ValueError, OverflowError) as error:
        # read_text raises ValueError; PyYAML raises the last two for 2001-13-45 or 1:1:1.5 with 300 parts.
        raise YamlError(one_line(f"{path}: {error}")) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise YamlError(
            f"{path}: the top level must be a mapping of keys to values, not a {type(value).__name__}"
        )
    return value


def read_text(path: Path) -> str:
    """Return the text of a hand-written file. OSError; ValueError for a file that is too large, not regular,
    or not UTF-8."""
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise ValueError("not a regular file")
    if path.stat().st_size > MAX_BYTES:  # such as a weights file named by mistake
        raise ValueError(f"larger than the limit of {MAX_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")
