"""YAML, read strictly: what plain PyYAML lets pass in silence is an error here."""

from pathlib import Path
from typing import Any

import yaml


class YamlError(ValueError):
    """The file is missing, is not YAML, or is YAML of a kind that hides mistakes."""


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys (the last would win) and aliases (they can explode)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise YamlError(f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not allowed, repeat the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The node's mapping; YamlError, naming the line, for a key that stands twice or is no plain word."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlError(f"line {line}: a key must be a plain word, not a list or a mapping")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise YamlError(f"line {line}: key '{key}' stands twice (first in line {seen[key]}): delete one")
            seen[key] = line
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; an empty file is an empty mapping. Raises YamlError naming file and line."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except YamlError as error:
        raise YamlError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise YamlError(f"{path}:{line} {error.problem}") from None
    except (OSError, yaml.YAMLError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # The last four are PyYAML's on values such as 2001-13-45, `!!int x`, or a thousand brackets.
        raise YamlError(f"{path}: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise YamlError(f"{path}: the top level must be a mapping of keys to values, not a {type(value).__name__}")
    return value
