"""YAML, read strictly: what plain PyYAML lets pass in silence is an error here."""

from pathlib import Path
from typing import Any

import yaml

from meshwright.parallel.errors import one_line

MAX_BYTES = 2**19  # of a file; a plan of 126 blocks with every unit written out has a third


class YamlError(ValueError):
    """The file is missing, is not YAML, or is YAML of a kind that hides mistakes."""


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys, of which the last would win, aliases, because a mapping that
    holds itself has no end, and tags, because PyYAML fails on a wrong one without a line."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"line {line}: aliases (*{event.anchor}) are not allowed, repeat the value")
        if event.tag:
            raise YamlError(f"line {line}: tags ({event.tag}) are not allowed, leave it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The node's mapping; YamlError, naming the line, for a key that stands twice or is no plain word."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                raise YamlError(f"line {line}: a key must be a plain word, not a list, a mapping or <<")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise YamlError(
                    f"line {line}: key '{key}' stands twice (first in line {seen[key]}): delete one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; an empty file is an empty mapping. Raises YamlError naming file and
    line."""
    try:
        value = yaml.load(read_text(path), _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise YamlError(one_line(f"{path}:{line} {error.problem}")) from None
    except RecursionError:
        raise YamlError(f"{path}: lists or mappings are nested too deeply") from None
    except (OSError, yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two are ours, and PyYAML's on values such as 2001-13-45 or 1:1:1.5 with 300 parts.
        raise YamlError(one_line(f"{path}: {error}")) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise YamlError(
            f"{path}: the top level must be a mapping of keys to values, not a {type(value).__name__}"
        )
    return value


def read_text(path: Path) -> str:
    """The text of a file that people write. OSError; ValueError for one that is too large, not regular, or
    not UTF-8."""
    if path.exists() and not path.is_file():  # which may never end
        raise ValueError("it is no regular file")
    if path.stat().st_size > MAX_BYTES:  # such as weights, named by mistake
        raise ValueError(f"larger than the {MAX_BYTES:,} bytes that are read")
    return path.read_text(encoding="utf-8")
