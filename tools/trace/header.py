"""What a trace says besides its events, checked once, so that whoever reads on can rely on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.train.errors import DataError

RUN, GROUPS = "meshwright", "distributedInfo"  # written by train.profiling, and by torch's profiler
COUNTS = ("rank", "world_size", "local_world_size", "first_step", "steps")
SAME = ("world_size", "first_step")  # in all traces of one profile


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Raises DataError for what neither of the two writes."""
    _check_count(path, "baseTimeNanoseconds", header)
    for key in (RUN, GROUPS):
        part = header.get(key) or {}
        if not isinstance(part, dict):
            raise _wrong(path, key, part, "an object")
        for name in COUNTS:
            _check_count(path, name, part)
    groups = (header.get(GROUPS) or {}).get("pg_config") or []
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _wrong(path, "pg_config", groups, "a list of objects")


def _check_count(path: Path, name: str, part: Mapping[str, Any]) -> None:
    value = part.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(path, name, value, "a whole number")


def _wrong(path: Path, name: str, value: object, kind: str) -> DataError:
    return DataError(
        f"{path}: {name} is {str(value)[:80]!r} in place of {kind}, as torch's profiler writes it. "
        f"Profile again"
    )


def why_apart(facts: Mapping[str, Any], rank: int, shown: Mapping[str, Any]) -> str:
    """Why a rank's trace is not of the same profile as the one shown, by what train.profiling says of both;
    "" if it is."""
    for name in SAME:
        if facts.get(name) != shown.get(name):
            return f"{name} {facts.get(name)}, not {shown.get(name)}"
    world_size = shown.get("world_size")
    return f"no rank of {world_size}" if world_size is not None and rank >= world_size else ""
