"""JSON from disk, which anyone may have written: bounded in size and depth, with one kind of error."""

import json
from pathlib import Path
from typing import Any

from meshwright.parallel.yaml_io import read_bounded


def read_json(path: Path, limit_bytes: int) -> dict[str, Any]:
    """The mapping that a JSON file holds. ValueError if it is no regular file, is larger than `limit_bytes`,
    is not JSON in UTF-8 or holds no mapping; OSError if it cannot be read."""
    return parse_mapping(read_bounded(path, limit_bytes).decode("utf-8"))


def parse_mapping(text: str) -> dict[str, Any]:
    """The mapping that a JSON text holds. ValueError if it holds something else, or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no mapping of names to values")
    return value
