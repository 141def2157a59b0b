"""Bounds of numbers in the config, written beside the fields that they hold for."""

import math
from dataclasses import field, fields, is_dataclass
from typing import Any


def bounded(default: float, low: float, high: float = math.inf) -> Any:
    """A dataclass field with a default, whose value must lie between `low` and `high`, both included."""
    return field(default=default, metadata={"bounds": (low, high)})


def check_bounds(section: str, config: Any) -> None:
    """ValueError that names key, value and bounds if a bounded field of a config section, or of one in it,
    lies outside."""
    for item in fields(config):
        low, high = item.metadata.get("bounds", (None, None))
        value = getattr(config, item.name)
        if is_dataclass(value):
            check_bounds(f"{section}.{item.name}", value)
        elif low is not None and not (low <= value <= high and math.isfinite(value)):
            rule = f"be a number of at least {low}" if high == math.inf else f"lie between {low} and {high}"
            raise ValueError(f"{section}.{item.name}={value} must {rule}")
