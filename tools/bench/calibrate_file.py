"""A hardware file as text: the keys of `Hardware`, each with a comment that says where its value comes
from."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.hardware import Hardware, Link

DIGITS = 4  # significant: more than repeats agree on


@dataclass(frozen=True)
class Noted:
    """A value of `Hardware`, and where it comes from."""

    value: Any
    source: str


def hardware_text(title: str, values: Mapping[str, Noted]) -> str:
    """The file, with a `title` on top; `values` by key of Hardware, all but the name."""
    lines = [f"# {title}"]
    for key in (item.name for item in dataclasses.fields(Hardware)):
        if key != "name":
            lines += _lines(key, values[key].value, values[key].source, "")
    return "\n".join(lines) + "\n"


def source_in(path: Path, key: str) -> str:
    """What the comment behind a key of a hardware file says; "" if there is none."""
    match = re.search(rf"^{key}:[^#\n]*# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def _lines(key: str, value: Any, source: str, indent: str) -> list[str]:
    comment = f"  # {source}" if source else ""
    if isinstance(value, Link):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(Link)}
    if isinstance(value, Mapping):
        inner = [line for name in value for line in _lines(name, value[name], "", indent + "  ")]
        return [f"{indent}{key}:{comment}", *inner]
    return [f"{indent}{key}: {_leaf(value)}{comment}"]


def _leaf(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return number_text(value)
        case ((_, share),):  # a curve of one point holds everywhere
            return _leaf(share)
        case list() | tuple():
            return f"[{', '.join(map(_leaf, value))}]"
        case _:
            return str(value)


def number_text(value: float) -> str:
    """DIGITS significant digits, as YAML 1.1 reads a float: with a point, also before an exponent."""
    digits, e, exponent = f"{value:.{DIGITS}g}".partition("e")
    return (digits if "." in digits else f"{digits}.0") + (f"e{int(exponent):+d}" if e else "")
